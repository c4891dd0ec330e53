"""`nri-gpu doctor`: the faults of this node, from the kernel to the container, and how to fix them."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nri_gpu.cli.ask_daemon import ask
from nri_gpu.cli.follow_daemon import policy_in_force
from nri_gpu.cli.installed import findings_here
from nri_gpu.cli.page import Line, Tone, json_text
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.doctor.examine import DoctorDocument, examine, paragraphs, to_text
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.runtimes import container_runtime
from nri_gpu.doctor.support_bundle import bundle
from nri_gpu.domain.errors import CommandError, Exit, PolicyError, cause_of
from nri_gpu.domain.finding import Level
from nri_gpu.domain.names import CONTROL_SOCKET, DEFAULT_OBSERVE, DEFAULT_STATE, POLICY_FILE
from nri_gpu.plugin.guard_status import DEFAULT_RUN_DIR, in_pod
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import UNIT_FOLDER, PolicyMemory
from nri_gpu.system.storage import below, write_whole

PATIENCE_S: Final = 0.8  # for the daemon's answer
PIPED_COLUMNS: Final = 80
BUNDLE_SUFFIX: Final = ".tar.gz"
TONES: Final = {
    None: Tone.HEAD,
    Level.OK: Tone.PLAIN,
    Level.NOTE: Tone.PLAIN,
    Level.WARNING: Tone.WARN,
    Level.ERROR: Tone.BAD,
    Level.UNSEEN: Tone.FAINT,
}


def run(args: argparse.Namespace) -> int:
    """Print the findings, and pack them if asked to. Return 1 if a finding is an error."""
    if args.bundle and not args.bundle.endswith(BUNDLE_SUFFIX):
        raise CommandError(Exit.USAGE, f"--bundle {args.bundle}: the name must end in {BUNDLE_SUFFIX}")
    seen = _examined(args)
    runtime = container_runtime(seen)
    found = examine(seen, runtime)
    sections = (replace(each, findings=findings_here(each.findings)) for each in found.sections)
    found = replace(found, sections=tuple(sections))
    if args.output == "json":
        print(json_text(found))
    elif sys.stdout.isatty():
        _show(found)
    else:
        print(to_text(found, PIPED_COLUMNS))
    if args.bundle:
        _pack(Path(args.bundle), bundle(seen, runtime, reports(found)))
    return Exit.FINDING if found.counts[Level.ERROR] else Exit.OK


def reports(found: DoctorDocument) -> dict[str, str]:
    return {"doctor.txt": f"{to_text(found, PIPED_COLUMNS)}\n", "doctor.json": f"{json_text(found)}\n"}


def _pack(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise CommandError(Exit.of(error), f"{path} cannot be written: {cause_of(error)}") from None
    print(f"{path} is for a bug report: no keys, no environments; it names pods, GPUs and paths", file=sys.stderr)


def _show(found: DoctorDocument) -> None:
    from nri_gpu.cli.terminal import show_whole  # rich: only on a terminal

    columns = shutil.get_terminal_size().columns
    show_whole([Line(text, TONES[level]) for text, level in paragraphs(found, columns)])


def _observer(root: Path) -> DaemonStatus | None:
    """Return the status of this node's observer, or None if none answers us."""
    try:
        found = ask(below(root, DEFAULT_OBSERVE) / CONTROL_SOCKET, "status", DaemonStatus, PATIENCE_S)
    except (OSError, ValueError):
        return None
    return found if found.observer else None


def _examined(args: argparse.Namespace) -> Examined:
    """Return the node, with its daemon's status and the policy that the daemon would read."""
    root = Path(args.root or "/")
    state_dir = Path(args.state_dir or DEFAULT_STATE)
    status: DaemonStatus | None = None
    silence: OSError | ValueError | None = None
    try:
        status = ask(below(root, state_dir) / CONTROL_SOCKET, "status", DaemonStatus, PATIENCE_S)
    except (OSError, ValueError) as error:
        silence = error
    observer = None if status else _observer(root)
    if status and status.observer:  # its folder was named
        status, observer, silence, state_dir = None, status, FileNotFoundError(), DEFAULT_STATE
    policy, policy_error = Policy.default(), None
    try:
        policy = policy_in_force(
            status or observer,
            args.policy,
            below(root, state_dir),
            root=root,
            default=POLICY_FILE,
            all_options=bool(status or observer),
            in_force=bool(PolicyMemory(below(root, UNIT_FOLDER)).source),
        )
    except PolicyError as error:
        policy_error = error
    return Examined(
        root=root,
        policy=policy,
        policy_error=policy_error,
        status=status,
        silence=silence,
        observer=observer,
        state_dir=state_dir,
        guard_dir=Path(args.run_dir or DEFAULT_RUN_DIR),
        in_pod=in_pod() and root == Path("/"),
        now_s=time.time(),
    )
