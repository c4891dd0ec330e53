"""What to do to a host, and what somebody else has to do: a function of one look at it. Pure.

Performing a plan and planning again from a new look gives no actions, unless something failed or others interfere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from msgspec import Struct

from nri_gpu.host.actions import Action, FixNode, LoadModule, MakeLink, MakeNode
from nri_gpu.host.facts import CHAR, DevPath, Entry, Facts, Finding, Folder, Link, Module, Node
from nri_gpu.host.wanted import Wanted, wanted_nodes

_ALWAYS: Final = (Module.NVIDIA, Module.UVM)


class Plan(Struct, frozen=True):
    """Actions in the order in which to perform them. findings: what no action of ours mends."""

    actions: tuple[Action, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def more_may_follow(self) -> bool:
        """Whether more may be to do afterwards: what a module serves is known once it is loaded."""
        return any(isinstance(action, LoadModule) for action in self.actions)


def make_plan(facts: Facts, *, graphics: bool = False) -> Plan:
    """Modules first, then nodes, each with its link. Nothing at all on a machine without an NVIDIA device.

    graphics: for containers that draw, so with nvidia-modeset.
    """
    if not facts.devices:
        return Plan((), facts.unreadable)
    steps: list[Action | Finding] = [*facts.unreadable, *_modules(facts, graphics)]
    for each in wanted_nodes(facts, graphics):
        steps += [each] if isinstance(each, Finding) else _one(each, facts.entries)
    return Plan(
        tuple(step for step in steps if not isinstance(step, Finding)),
        tuple(dict.fromkeys(step for step in steps if isinstance(step, Finding))),
    )


def _modules(facts: Facts, graphics: bool) -> Iterator[LoadModule]:
    needed = (*_ALWAYS, Module.MODESET) if graphics else _ALWAYS
    return (LoadModule(module) for module in needed if module not in facts.modules)


def _one(wanted: Wanted, entries: Mapping[DevPath, Entry]) -> list[Action | Finding]:
    """A node and then its link; no link to a node that is not as it should be and does not get so."""
    step = _node(wanted, entries)
    link = None if isinstance(step, Finding) else _link(wanted, entries)
    return [each for each in (step, link) if each is not None]


def _node(wanted: Wanted, entries: Mapping[DevPath, Entry]) -> Action | Finding | None:
    blocked = _blocked(DevPath(str(PurePosixPath(wanted.path).parent)), entries)
    if blocked:
        return blocked
    there = entries.get(wanted.path)
    if there is not None and not isinstance(there, Node):
        return Finding(f"/dev/{wanted.path}", f"is {there}, where {wanted.node} belongs: remove it")
    if there is None or there.number != wanted.node.number:
        if wanted.hands_off:
            return Finding(f"/dev/{wanted.path}", _missing(wanted, there))
        return MakeNode(wanted.path, wanted.node, there)
    # Where the administrator makes nodes, mode and owner are whatever they chose.
    return None if there == wanted.node or wanted.hands_off else FixNode(wanted.path, wanted.node, there)


def _link(wanted: Wanted, entries: Mapping[DevPath, Entry]) -> Action | Finding | None:
    """/dev/char/MAJOR:MINOR. udev makes it for devices that sysfs knows, and NVIDIA's are not among them.

    runc 1.1.3 to 1.1.6 ask for it, and so does systemd before 240 (opencontainers/runc issues 3708 and 3567): without
    it a container loses its GPU at the next `systemctl daemon-reload`.
    """
    blocked = _blocked(CHAR, entries)
    if blocked:
        return blocked
    path = DevPath(f"{CHAR}/{wanted.node.major}:{wanted.node.minor}")
    target = f"../{wanted.path}"
    there = entries.get(path)
    if there is not None and not isinstance(there, Link):
        return Finding(f"/dev/{path}", f"is {there}, where a link to {target} belongs: remove it")
    if there is not None and there.target in (target, f"/dev/{wanted.path}"):  # nvidia-ctk writes the second
        return None
    return MakeLink(path, target, there.target if there else None)


def _blocked(folder: DevPath, entries: Mapping[DevPath, Entry]) -> Finding | None:
    there = entries.get(folder)
    if str(folder) == "." or there is None or isinstance(there, Folder):
        return None
    return Finding(f"/dev/{folder}", f"is {there}, where a directory belongs: remove it")


def _missing(wanted: Wanted, there: Node | None) -> str:
    """What the administrator has to do by hand, ready to be typed."""
    state = f"is {there}" if there else "is missing"
    node, path = wanted.node, f"/dev/{wanted.path}"
    command = f"mknod -m {node.mode:04o} {path} c {node.major} {node.minor}"
    return f"{state} and should be {node}, but {wanted.hands_off}: {f'rm {path}; ' if there else ''}{command}"
