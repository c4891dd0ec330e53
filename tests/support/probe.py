"""What a container finds when it looks for itself: its device nodes, and what the kernel says when it opens one."""

from enum import StrEnum

from msgspec import Struct

from tests.support.cri import ContainerId, Cri
from tests.support.errors import HarnessError

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


def open_number(cri: Cri, container: ContainerId, major: int, minor: int, kind: str = "c") -> Opened:
    """Let the container make its own node of that number, and open it: the attack a device cgroup is there for."""
    made = f"rm -f {NODE} && mknod {NODE} {kind} {major} {minor}"
    return _open(cri, container, f"{made} && exec 3<{NODE}")


def open_path(cri: Cri, container: ContainerId, path: str) -> Opened:
    """Open a node that the container already has."""
    return _open(cri, container, f"exec 3<{path}")


def device_nodes(cri: Cri, container: ContainerId) -> list[DeviceNode]:
    """Every device node below /dev of the container, by path."""
    listed = cri.execute(container, "/bin/sh", "-c", LIST_DEVICES)
    if listed.code:
        raise HarnessError(f"cannot list the devices of {container}: {listed.stderr}")
    return sorted(_device_node(line) for line in listed.stdout.splitlines())


def _open(cri: Cri, container: ContainerId, script: str) -> Opened:
    done = cri.execute(container, "/bin/sh", "-c", script)
    if not done.code:
        return Opened.YES
    for answer in (Opened.DENIED, Opened.NO_DRIVER):
        if "open" in done.stderr and answer.value in done.stderr:
            return answer
    raise HarnessError(f"opening a device in {container} ended unexpectedly: {done.stderr}")


def _device_node(line: str) -> DeviceNode:
    path, kind, major, minor, mode, uid, gid = line.split("|")
    letter = "c" if kind.startswith("character") else "b"
    return DeviceNode(path, letter, int(major, 16), int(minor, 16), int(mode, 8), int(uid), int(gid))
