"""`nri-gpu enable`: the unit or drop-in of a feature, from the installation that runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from nri_gpu.cli.ask_daemon import daemon_status, overrides_of
from nri_gpu.cli.page import Line, Tone
from nri_gpu.cli.render import lines, show
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.unit_checks import unit_findings
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.finding import in_policy
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.enable.enabling import Enabled, EnableOptions, enable
from nri_gpu.enable.features import FEATURES
from nri_gpu.enable.installation import running_installation
from nri_gpu.enable.node_limits import kubeconfig_note
from nri_gpu.plugin.guard_status import in_pod
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import build_policy, read_policy

SYSTEMD = Path("/run/systemd/system")


def run(args: argparse.Namespace) -> int:
    """Enable the feature, or print how. Return 1 if a file is in the way, 69 or 77 if it cannot be, 78 for a fault."""
    require_root(args)
    policy = policy_of(args)  # a fault of it is told before anything is changed
    options = EnableOptions(replace=args.replace, dry_run=args.dry_run, now=args.now)
    done = enable(args.feature, running_installation(), options)
    others = (f"advice: {each.meaning}; see: nri-gpu doctor" for each in unit_findings(Examined()))
    notes = lines((*kubeconfig_note(args.feature, Path("/")), *others), Tone.WARN)
    print_changes(args, done, [*notes, *_lacking(args.feature, policy)])
    return Exit.OK


def require_root(args: argparse.Namespace) -> None:
    """Raise CommandError where units are not this process's to change."""
    if in_pod():
        raise CommandError(Exit.UNAVAILABLE, "a pod has no units: set the chart's values instead")
    if not SYSTEMD.is_dir():
        raise CommandError(Exit.UNAVAILABLE, "systemd does not run here, and the units are for it")
    if os.geteuid() != 0 and not args.dry_run:
        raise CommandError(Exit.PERMISSION, "only root can change units; anybody can use --dry-run")


def policy_of(args: argparse.Namespace) -> Policy:
    """Return the policy as `check` reads it, with the running daemon's options. Raises: PolicyError."""
    return build_policy(read_policy(args.policy), overrides_of(daemon_status(DEFAULT_STATE)))


def _lacking(name: str, policy: Policy) -> Iterable[Line]:
    """Yield the lines that the policy lacks, as `check` writes them."""
    feature = FEATURES[name]
    if feature.setting and not feature.is_set(policy):
        finding = in_policy(f"without {feature.setting}, {name} does nothing", feature.setting, feature.value)
        where, line, _ = finding.fix
        yield Line(f"advice: {finding.meaning}", Tone.WARN)
        yield from lines((f"  {where}", f"  {line}", "  nri-gpu check"), Tone.PLAIN)


def print_changes(args: argparse.Namespace, done: Enabled, notes: Iterable[Line], stopped: Iterable[str] = ()) -> None:
    """Print the steps, then the notes, then what is left to do. stopped: units that still run."""
    page = [Line(f"{'would ' if args.dry_run else ''}{step}") for step in done.plan.steps]
    page = page or [
        Line(f"nothing to do: {args.feature} is {'dis' if args.module.endswith('disable_command') else 'en'}abled")
    ]
    page += notes
    left = [f"systemctl stop {unit}" for unit in stopped]
    if done.due:
        left.append("systemctl daemon-reload    # due: systemd has not read this yet; --now does it after a look")
    if done.plan.steps:
        left += [f"systemctl restart {service}" for service in done.services]
    if left:
        page += [Line("then:"), *lines((f"  {line}" for line in left), Tone.PLAIN)]
    show(page)
