"""What a container finds when it looks for itself: its device nodes, and what the kernel says when it opens one."""

from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from tests.support.cgroup import Cgroup, DeviceRule, device_rules
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, Cri
from tests.support.errors import HarnessError

Number = tuple[int, int]  # major and minor

NODE = "/tmp/probe"
# One line a node: name, type, major and minor (hex), mode (octal), uid, gid.
LIST_DEVICES = "find /dev -type c -o -type b | xargs stat -c '%n|%F|%t|%T|%a|%u|%g'"


class Opened(StrEnum):
    """The kernel's answer to open(2) on a device number."""

    YES = "opened"
    DENIED = "Operation not permitted"  # EPERM: the device cgroup said no
    NO_DRIVER = "No such device or address"  # ENXIO: the cgroup said yes, and nobody serves the number


class DeviceNode(Struct, frozen=True, order=True):
    """A device node as the container sees it. kind: c or b; mode: permission bits."""

    path: str
    kind: str
    major: int
    minor: int
    mode: int
    uid: int
    gid: int


def open_number(cri: Cri, container: ContainerId, major: int, minor: int) -> Opened:
    """Let the container make its own node of that number, and open it: the attack a device cgroup is there for."""
    return open_numbers(cri, container, [(major, minor)])[major, minor]


def open_numbers(cri: Cri, container: ContainerId, numbers: Iterable[Number]) -> dict[Number, Opened]:
    """The same for several."""
    asked = list(numbers)
    made = (f"rm -f {NODE}; mknod {NODE} c {major} {minor} && exec 3<{NODE}" for major, minor in asked)
    return dict(zip(asked, _opened(cri, container, made), strict=True))


def open_path(cri: Cri, container: ContainerId, path: str) -> Opened:
    """Open a node that the container already has."""
    return open_paths(cri, container, [path])[path]


def open_paths(cri: Cri, container: ContainerId, paths: Iterable[str]) -> dict[str, Opened]:
    """The same for several."""
    asked = list(paths)
    return dict(zip(asked, _opened(cri, container, (f"exec 3<{path}" for path in asked)), strict=True))


def check_opens(
    node: Containerd, container: ContainerId, granted: Collection[Number], others: Collection[Number] = ()
) -> None:
    """By the kernel's word: the container opens these numbers, and of the others none.

    Where its rules can be read (cgroup v1), they are these, of all that have a major from here.
    """
    expected = {number: Opened.NO_DRIVER if number in granted else Opened.DENIED for number in {*granted, *others}}
    assert open_numbers(node.cri, container, expected) == expected
    if node.cgroup is Cgroup.V1:
        majors = {major for major, _ in expected}
        rules = {rule for rule in device_rules(node.container_cgroup(container)) if rule.major in majors}
        assert rules == {DeviceRule("c", major, minor, "rw") for major, minor in granted}


def device_nodes(cri: Cri, container: ContainerId) -> list[DeviceNode]:
    """Every device node below /dev of the container, by path."""
    listed = cri.execute(container, "/bin/sh", "-c", LIST_DEVICES)
    if listed.code:
        raise HarnessError(f"cannot list the devices of {container}: {listed.stderr}")
    return sorted(_device_node(line) for line in listed.stdout.splitlines())


def _opened(cri: Cri, container: ContainerId, scripts: Iterable[str]) -> Iterator[Opened]:
    """What becomes of each, in a shell of its own; all of them by one command in the container."""
    script = "; ".join(f'said=$( {{ {each}; }} 2>&1 ) && echo {Opened.YES} || echo "$said"' for each in scripts)
    for line in cri.execute(container, "/bin/sh", "-c", script).stdout.splitlines():
        answer = next((each for each in Opened if each in line), None)
        if answer is None or (answer is not Opened.YES and "open" not in line):
            raise HarnessError(f"opening a device in {container} ended unexpectedly: {line}")
        yield answer


def _device_node(line: str) -> DeviceNode:
    path, kind, major, minor, mode, uid, gid = line.split("|")
    letter = "c" if kind.startswith("character") else "b"
    return DeviceNode(path, letter, int(major, 16), int(minor, 16), int(mode, 8), int(uid), int(gid))
