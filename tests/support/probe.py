"""What a container finds when it looks for itself: its device nodes, and what the kernel says when it opens one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from tests.support.cgroup import Cgroup, device_programs, device_rules
from tests.support.cri import ContainerId, Executed
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


class Executing(Protocol):
    """What can run a command in a container."""

    def execute(self, container: ContainerId, *command: str, timeout_s: int = 20) -> Executed: ...


def open_number(cri: Executing, container: ContainerId, major: int, minor: int) -> Opened:
    """Let the container make its own node of that number, and open it: the attack a device cgroup is there for."""
    return open_numbers(cri, container, [(major, minor)])[major, minor]


def open_numbers(cri: Executing, container: ContainerId, numbers: Iterable[Number]) -> dict[Number, Opened]:
    """The same for several."""
    asked = list(numbers)
    made = (f"rm -f {NODE}; mknod {NODE} c {major} {minor} && exec 3<{NODE}" for major, minor in asked)
    return dict(zip(asked, _opened(cri, container, made), strict=True))


def open_path(cri: Executing, container: ContainerId, path: str) -> Opened:
    """Open a node that the container already has."""
    return open_paths(cri, container, [path])[path]


def open_paths(cri: Executing, container: ContainerId, paths: Iterable[str]) -> dict[str, Opened]:
    """The same for several."""
    asked = list(paths)
    return dict(zip(asked, _opened(cri, container, (f"exec 3<{path}" for path in asked)), strict=True))


class Engine(Protocol):
    """What runs the containers: a Containerd, or a Docker."""

    @property
    def cri(self) -> Executing: ...
    @property
    def cgroup(self) -> Cgroup: ...
    def container_cgroup(self, container: ContainerId) -> Path: ...


def check_opens(
    node: Engine,
    container: ContainerId,
    granted: Collection[Number],
    others: Collection[Number] = (),
    access: Collection[str] = ("rw",),
) -> None:
    """By the kernel's word: the container opens these numbers, and of the others none.

    Its rules are these, of all that have a major from here; on cgroup v2 there is a program in their place.
    """
    expected = {number: Opened.NO_DRIVER if number in granted else Opened.DENIED for number in {*granted, *others}}
    assert open_numbers(node.cri, container, expected) == expected
    if node.cgroup is Cgroup.V2:
        assert device_programs(node.container_cgroup(container))
        return
    majors = {major for major, _ in expected}
    rules = {rule for rule in device_rules(node.container_cgroup(container)) if rule.major in majors}
    assert {(rule.major, rule.minor) for rule in rules} == {*granted}
    assert {rule.kind for rule in rules} <= {"c"}
    assert {rule.access for rule in rules} <= {*access}


def device_nodes(cri: Executing, container: ContainerId) -> list[DeviceNode]:
    """Every device node below /dev of the container, by path."""
    listed = cri.execute(container, "/bin/sh", "-c", LIST_DEVICES)
    if listed.code:
        raise HarnessError(f"cannot list the devices of {container}: {listed.stderr}")
    return sorted(_device_node(line) for line in listed.stdout.splitlines())


def nvidia_nodes(cri: Executing, container: ContainerId) -> dict[str, Number]:
    """Path -> number, of NVIDIA's nodes. Each is a character device that all may read and write, MIG's rights to read.

    Raises: AssertionError: one is not.
    """
    found = [each for each in device_nodes(cri, container) if "nvidia" in each.path]
    for each in found:
        mode = 0o444 if "nvidia-caps/" in each.path else 0o666
        assert (each.kind, each.mode, each.uid, each.gid) == ("c", mode, 0, 0), each
    return {each.path: (each.major, each.minor) for each in found}


def _opened(cri: Executing, container: ContainerId, scripts: Iterable[str]) -> Iterator[Opened]:
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
