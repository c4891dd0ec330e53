"""`nri-gpu prepare`: kernel modules, device nodes and /dev/char links, and what the administrator has to do."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict

from nri_gpu.cli.page import Line, Tone
from nri_gpu.cli.render import answer, lines
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.text import counted, listed
from nri_gpu.host.actions import Action, FixNode, LoadModule, MakeLink, MakeNode, make_plan
from nri_gpu.host.facts import CharDevice, HostFacts, HostFinding, look
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.host.make_nodes import PrepareReport, actor, prepare
from nri_gpu.system.node_name import NamedNode, this_node

PLACES = HostFolders()

OctalMode = Annotated[str, Meta(pattern="^[0-7]{4}$", description="permission bits, octal")]


class LoadedModule(Struct, frozen=True, kw_only=True, tag_field="action", tag="load-module"):
    """A kernel module that was not loaded. text: the action as a sentence."""

    module: str
    text: str


class NodeLine(Struct, frozen=True):
    """A character device node."""

    major: int
    minor: int
    mode: OctalMode
    uid: int
    gid: int

    @classmethod
    def of(cls, node: CharDevice) -> NodeLine:
        return cls(node.major, node.minor, f"{node.mode:04o}", node.uid, node.gid)


class NodeAction(Struct, frozen=True, kw_only=True):
    """A device node, as it shall be. path: below /dev, with it."""

    path: str
    major: int
    minor: int
    mode: OctalMode
    uid: int
    gid: int


class MadeNode(NodeAction, frozen=True, kw_only=True, tag_field="action", tag="make-node"):
    """A device node that was missing. replaces: a node with another number, which is removed; null where none was."""

    replaces: NodeLine | None
    text: str


class FixedNode(NodeAction, frozen=True, kw_only=True, tag_field="action", tag="fix-node"):
    """A device node with another mode or owner. was: before."""

    was: NodeLine
    text: str


class MadeLink(Struct, frozen=True, kw_only=True, tag_field="action", tag="make-link"):
    """A link in /dev/char. replaces: the target of an older link, which is removed; null where none was."""

    path: str
    target: str
    replaces: str | None
    text: str


ActionLine = LoadedModule | MadeNode | FixedNode | MadeLink


class PrepareDocument(Struct, frozen=True, kw_only=True, tag_field="schema", tag="nri-gpu/prepare/v1"):
    """The actions that were done, in order; with dry_run, those to do. devices: NVIDIA's, by PCI bus id.

    more_may_follow: which devices a module serves is known once it is loaded. findings: what is left to do by hand.
    """

    node: NamedNode
    dry_run: bool
    devices: tuple[str, ...]
    actions: tuple[ActionLine, ...]
    more_may_follow: bool
    findings: tuple[HostFinding, ...]


def run(args: argparse.Namespace) -> int:
    """Prepare, or print how. Return 1 if something is left to do by hand, 69 without a GPU, 77 if not root."""
    facts = _look()
    if not facts.devices:
        why = "".join(f"; {finding}" for finding in facts.unreadable)
        what = "this machine has no NVIDIA display device on its PCI bus"
        if facts.of_machines:
            what = (
                f"each NVIDIA GPU of this machine is bound to vfio, for virtual machines: {listed(facts.of_machines)}"
            )
        raise CommandError(Exit.UNAVAILABLE, f"{what}{why}")
    if args.dry_run:
        plan = make_plan(facts, graphics=args.graphics)
        return _print(args, PrepareReport(facts, plan.actions, plan.findings), more=plan.more_may_follow)
    if os.geteuid() != 0:
        sentence = "only root can load modules and make device nodes; anybody can use --dry-run"
        raise CommandError(Exit.PERMISSION, sentence)
    act = actor(PLACES, Path(args.driver_root or "/"))
    return _print(args, prepare(_look, act, graphics=args.graphics))


def _look() -> HostFacts:
    """Look at the host without the GPUs that a machine which is a container was not given: a node would give them."""
    return look(PLACES)


def _print(args: argparse.Namespace, report: PrepareReport, *, more: bool = False) -> int:
    """Print the report as JSON, or a line for each. report: with --dry-run, of what is to do. more: may follow."""
    document = PrepareDocument(
        node=this_node(),
        dry_run=args.dry_run,
        devices=tuple(report.facts.devices),
        actions=tuple(map(_action_line, report.done)),
        more_may_follow=more,
        findings=report.findings,
    )
    page = [Line(f"{'would ' if args.dry_run else ''}{action}") for action in report.done]
    if more:
        page.append(Line("more may follow: a module's devices are known once it is loaded"))
    page += lines((f"finding: {finding}" for finding in report.findings), Tone.BAD)
    devices = counted(len(report.facts.devices), "NVIDIA device")
    answer(args, document, page or [Line(f"nothing to do: {devices}, modules loaded, nodes and links in place")])
    return Exit.FINDING if report.findings else Exit.OK


def _action_line(action: Action) -> ActionLine:
    text = str(action)
    match action:
        case LoadModule(module):
            return LoadedModule(module=module.value, text=text)
        case MakeLink(_, target, replaced):
            return MadeLink(path=action.subject, target=target, replaces=replaced, text=text)
        case MakeNode(_, node, replaces):
            instead = NodeLine.of(replaces) if replaces else None
            return MadeNode(path=action.subject, **asdict(NodeLine.of(node)), replaces=instead, text=text)
        case FixNode(_, node, was):
            return FixedNode(path=action.subject, **asdict(NodeLine.of(node)), was=NodeLine.of(was), text=text)
