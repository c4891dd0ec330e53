"""`nri-gpu prepare`: kernel modules, device nodes and /dev/char links, and what the administrator has to do."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from msgspec import to_builtins
from msgspec.structs import asdict

from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.host.facts import CharDevice, HostPaths, look
from nri_gpu.host.plan import Action, FixNode, LoadModule, MakeLink, MakeNode, make_plan
from nri_gpu.host.prepare import PrepareReport, actor, prepare

PLACES = HostPaths()


def run(args: argparse.Namespace) -> int:
    """Prepare, or print how. Returns 1 when something is left to do by hand, 69 without a GPU, 77 when not root."""
    facts = look(PLACES)
    if not facts.devices:
        why = "".join(f"; {finding}" for finding in facts.unreadable)
        raise CommandError(Exit.UNAVAILABLE, f"this machine has no NVIDIA display device on its PCI bus{why}")
    if args.dry_run:
        plan = make_plan(facts, graphics=args.graphics)
        return _print(args, PrepareReport(facts, plan.actions, plan.findings), more=plan.more_may_follow)
    if os.geteuid() != 0:
        sentence = "only root can load modules and make device nodes; anybody can use --dry-run"
        raise CommandError(Exit.PERMISSION, sentence)
    act = actor(PLACES, Path(args.driver_root or "/"))
    return _print(args, prepare(lambda: look(PLACES), act, graphics=args.graphics))


def _print(args: argparse.Namespace, report: PrepareReport, *, more: bool = False) -> int:
    """Schema `nri-gpu/prepare/v1`, or a line for each. report: with --dry-run, of what is to do. more: may follow."""
    if args.output == "json":
        document = {
            "schema": "nri-gpu/prepare/v1",
            "dry_run": args.dry_run,
            "devices": list(report.facts.devices),
            "actions": [{**_action_json(action), "text": str(action)} for action in report.done],
            "more_may_follow": more,
            "findings": to_builtins(report.findings),
        }
        print(json.dumps(document, indent=1))
        return Exit.FINDING if report.findings else Exit.OK
    lines = [f"{'would ' if args.dry_run else ''}{action}" for action in report.done]
    if more:
        lines.append("more may follow: which devices a module serves is known once it is loaded")
    lines += [f"finding: {finding}" for finding in report.findings]
    count = len(report.facts.devices)
    devices = f"{count} NVIDIA device{'s' * (count > 1)}"
    print("\n".join(lines) or f"nothing to do: {devices}, modules loaded, nodes and links in place")
    return Exit.FINDING if report.findings else Exit.OK


def _action_json(action: Action) -> dict[str, object]:
    if isinstance(action, LoadModule):
        return {"action": "load-module", "module": action.module.value}
    path = {"path": action.subject}
    match action:
        case MakeNode(_, node, replaces):
            instead = _node_json(replaces) if replaces else None
            return {"action": "make-node", **path, **_node_json(node), "replaces": instead}
        case FixNode(_, node, was):
            return {"action": "fix-node", **path, **_node_json(node), "was": _node_json(was)}
        case MakeLink(_, target, replaced):
            return {"action": "make-link", **path, "target": target, "replaces": replaced}


def _node_json(node: CharDevice) -> dict[str, object]:
    return {**asdict(node), "mode": f"{node.mode:04o}"}
