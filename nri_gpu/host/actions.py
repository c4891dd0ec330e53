"""The plan of actions that prepare this host, from what the driver reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import ClassVar, Final

from msgspec import Struct

from nri_gpu.host.facts import (
    CHAR,
    CharDevice,
    DevEntry,
    DevPath,
    Directory,
    HostFacts,
    HostFinding,
    KernelModule,
    Symlink,
)
from nri_gpu.host.wanted import WantedNode, wanted_nodes


class LoadModule(Struct, frozen=True):
    UNDONE: ClassVar[str] = "not loaded"
    module: KernelModule

    @property
    def subject(self) -> str:
        return f"module {self.module}"

    def __str__(self) -> str:
        return f"load module {self.module}"


class DevAction(Struct, frozen=True):
    """A change of an entry of /dev."""

    path: DevPath

    @property
    def subject(self) -> str:
        return f"/dev/{self.path}"


class MakeNode(DevAction, frozen=True):
    """A device node to make, with its directory. replaces: a node with another number, which is removed first."""

    UNDONE: ClassVar[str] = "not made"
    node: CharDevice
    replaces: CharDevice | None = None

    def __str__(self) -> str:
        instead = f", instead of {self.replaces.major}:{self.replaces.minor}" if self.replaces else ""
        return f"make /dev/{self.path}: {self.node}{instead}"


class FixNode(DevAction, frozen=True):
    """A node whose mode and owner are to be set; its number is right. was: the node as it is now."""

    UNDONE: ClassVar[str] = "not changed"
    node: CharDevice
    was: CharDevice

    def __str__(self) -> str:
        before = f"was mode {self.was.mode:04o}, owner {self.was.uid}:{self.was.gid}"
        return f"fix /dev/{self.path}: {self.node} ({before})"


class MakeLink(DevAction, frozen=True):
    """A link to make in /dev/char. replaces: the target of an existing link, which is removed first."""

    UNDONE: ClassVar[str] = "not made"
    target: str
    replaces: str | None = None

    def __str__(self) -> str:
        instead = f", instead of {self.replaces}" if self.replaces else ""
        return f"link /dev/{self.path} to {self.target}{instead}"


Action = LoadModule | MakeNode | FixNode | MakeLink


_ALWAYS: Final = (KernelModule.NVIDIA, KernelModule.UVM)


class HostPlan(Struct, frozen=True):
    """The actions in the order to perform them. findings: what only the administrator can fix."""

    actions: tuple[Action, ...] = ()
    findings: tuple[HostFinding, ...] = ()

    @property
    def more_may_follow(self) -> bool:
        """Return whether more actions may follow: the devices of a module are known only once it is loaded."""
        return any(isinstance(action, LoadModule) for action in self.actions)


def make_plan(facts: HostFacts, *, graphics: bool = False) -> HostPlan:
    """Plan modules first, then nodes, each with its link, and nothing on a machine without an NVIDIA device.

    graphics: also nvidia-modeset.
    """
    if not facts.devices:
        return HostPlan((), facts.unreadable)
    needed = (*_ALWAYS, KernelModule.MODESET) if graphics else _ALWAYS
    steps: list[Action | HostFinding] = [*facts.unreadable]
    steps += [LoadModule(module) for module in needed if module not in facts.modules]
    for each in wanted_nodes(facts, graphics):
        steps += [each] if isinstance(each, HostFinding) else _for_node(each, facts)
    return HostPlan(
        tuple(step for step in steps if not isinstance(step, HostFinding)),
        tuple(dict.fromkeys(step for step in steps if isinstance(step, HostFinding))),
    )


def _for_node(wanted: WantedNode, facts: HostFacts) -> list[Action | HostFinding]:
    """Return the steps for a node and its link, but no link to a node that is wrong and stays so."""
    step = _node(wanted, facts)
    link = None if isinstance(step, HostFinding) else _link(wanted, facts.entries)
    return [each for each in (step, link) if each is not None]


def _node(wanted: WantedNode, facts: HostFacts) -> Action | HostFinding | None:
    blocked = _blocked(DevPath(str(PurePosixPath(wanted.path).parent)), facts.entries)
    if blocked:
        return blocked
    there = facts.entries.get(wanted.path)
    if there is not None and not isinstance(there, CharDevice):
        return HostFinding(f"/dev/{wanted.path}", f"is {there}, where {wanted.node} belongs: remove it")
    if there is None or there.number != wanted.node.number:
        if facts.hosts_nodes:
            return HostFinding(f"/dev/{wanted.path}", _missing_from_host(wanted, there))
        if wanted.hands_off:
            return HostFinding(f"/dev/{wanted.path}", _missing(wanted, there))
        return MakeNode(wanted.path, wanted.node, there)
    # If the administrator or this container's host makes the nodes, mode and owner are theirs to choose.
    left_alone = wanted.hands_off or (facts.hosts_nodes and _serves(there, wanted.node))
    return None if there == wanted.node or left_alone else FixNode(wanted.path, wanted.node, there)


def _serves(there: CharDevice, wanted: CharDevice) -> bool:
    """Return whether every user may do with a node, whoever owns it, what its owner should."""
    needed = wanted.mode >> 6
    return there.mode & needed == needed


def _missing_from_host(wanted: WantedNode, there: CharDevice | None) -> str:
    state = f"is {there}" if there else "is missing"
    return (
        f"{state} and should be {wanted.node}, and an unprivileged container can make no device nodes: have its host "
        "give it this one (LXC: lxc.mount.entry, LXD: a gpu device)"
    )


def _link(wanted: WantedNode, entries: Mapping[DevPath, DevEntry]) -> Action | HostFinding | None:
    """Return the step for /dev/char/MAJOR:MINOR. udev makes such links only for devices in sysfs, unlike NVIDIA's.

    runc 1.1.3 to 1.1.6 and systemd before 240 need it (opencontainers/runc issues 3708 and 3567): without it a
    container loses its GPU at the next `systemctl daemon-reload`.
    """
    blocked = _blocked(CHAR, entries)
    if blocked:
        return blocked
    path = DevPath(f"{CHAR}/{wanted.node.major}:{wanted.node.minor}")
    target = f"../{wanted.path}"
    there = entries.get(path)
    if there is not None and not isinstance(there, Symlink):
        return HostFinding(f"/dev/{path}", f"is {there}, where a link to {target} belongs: remove it")
    if there is not None and there.target in (target, f"/dev/{wanted.path}"):  # nvidia-ctk writes the second
        return None
    return MakeLink(path, target, there.target if there else None)


def _blocked(folder: DevPath, entries: Mapping[DevPath, DevEntry]) -> HostFinding | None:
    there = entries.get(folder)
    if str(folder) == "." or there is None or isinstance(there, Directory):
        return None
    return HostFinding(f"/dev/{folder}", f"is {there}, where a directory belongs: remove it")


def _missing(wanted: WantedNode, there: CharDevice | None) -> str:
    """Return what the administrator has to do, with the command to type."""
    state = f"is {there}" if there else "is missing"
    node, path = wanted.node, f"/dev/{wanted.path}"
    command = f"mknod -m {node.mode:04o} {path} c {node.major} {node.minor}"
    return f"{state} and should be {node}, but {wanted.hands_off}: {f'rm {path}; ' if there else ''}{command}"
