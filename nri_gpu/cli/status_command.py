"""`nri-gpu status`: the holders of each GPU on this node, as the running daemon reports them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import convert, to_builtins

from nri_gpu.cli.ask_daemon import answer_of, answering, ask
from nri_gpu.cli.observed_page import observed_table
from nri_gpu.cli.page import Line, rows_of
from nri_gpu.cli.processes_page import ask_for_processes, processes_lines
from nri_gpu.cli.render import Times, answer
from nri_gpu.cli.status_page import faults, refusals_page, status_page, to_mend
from nri_gpu.cli.status_table import of_namespace, status_table
from nri_gpu.cli.watch import watch
from nri_gpu.daemon.answers import DaemonStatus, SamplingStatus
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.domain.text import printable
from nri_gpu.system.liveness import alive_age_s
from nri_gpu.system.succession import Succession

GUARD_SILENT_S: Final = 20.0  # before a guard counts as gone
RIGHT: Final = "be root, or in the policy's control.group"


def run(args: argparse.Namespace) -> int:
    """Print the status.

    Return 1 if the daemon is not ready to grant or has rejected the policy file, 69 if it cannot be asked, 77
    without permission.
    """
    if args.watch and (args.alive or args.probe or args.guard):
        raise CommandError(Exit.USAGE, "--watch follows the daemon: leave out --alive, --probe and --guard")
    if args.processes and (args.watch or args.alive or args.probe or args.guard or args.no_headers or args.refusals):
        raise CommandError(
            Exit.USAGE,
            "--processes is a table of its own: leave out --watch, --alive, --probe, --guard, --no-headers and "
            "--refusals",
        )
    if args.watch and (args.no_headers or args.refusals or args.output == "name"):
        raise CommandError(Exit.USAGE, "--watch prints whole pages: leave out --no-headers, --refusals and -o name")
    if args.guard:
        return guard_exit(Path(args.guard), alive=args.alive)
    state_dir = answering(args.state_dir)
    if args.probe and Succession(state_dir).awaited():
        return Exit.OK  # the next pod has to be ready before this one is told to stop
    if args.watch:
        ask = partial(_asked, state_dir, args.namespace)
        return watch(ask, as_json=args.output == "json", wide=args.output == "wide")
    if args.alive:
        answer_of(state_dir, "status", dict, RIGHT)
        return Exit.OK
    found, status = _asked(state_dir, args.namespace, sampled=not args.probe)
    times = Times(time.time(), absolute=args.output == "wide")
    wrong = faults(status, times)
    to_do = to_mend(status)
    if args.output != "json" and (args.no_headers or args.output == "name"):  # a line for each row, and nothing else
        print("".join(f"{line}\n" for line in _bare(status, times, args)), end="")
        print("".join(f"{each}\n" for each in map(printable, (*wrong, *to_do))), end="", file=sys.stderr)
    elif args.refusals:
        answer(args, found, refusals_page(status, times))
    else:
        has = "was given" if status.observer else "holds"
        nothing = "no GPUs" if args.namespace is None else f"no pod of namespace {args.namespace} {has} a GPU"
        page = status_page(status, times, glance=sys.stdout.isatty(), wide=times.absolute, nothing=nothing)
        if args.processes:
            found = to_builtins(processes := ask_for_processes(state_dir))
            page += processes_lines(processes, status)
        answer(args, found, page)
    if args.probe and status.observer:  # it needs neither a runtime nor NVML
        return Exit.FINDING if status.observer.looked_s is None else Exit.OK
    # A pod of a daemon that grants is ready, whatever file it rejected.
    return Exit.FINDING if wrong or (to_do and not args.probe) else Exit.OK


def _bare(status: DaemonStatus, times: Times, args: argparse.Namespace) -> list[str]:
    """Return the UUIDs of the GPUs for `-o name`, else the rows of the table, or the refusals, for --no-headers."""
    if args.refusals:
        return [printable(line.text.strip()) for line in refusals_page(status, times)[2:] if isinstance(line, Line)]
    if args.output == "name":
        return [printable(gpu.uuid) for gpu in status.gpus]
    if status.observer:
        return rows_of(observed_table(status, status.observer, times, wide=times.absolute).filled)
    return rows_of(status_table(status, times, wide=times.absolute).filled)


def _asked(
    state_dir: Path, namespace: str | None, *, sampled: bool = True
) -> tuple[Mapping[str, object], DaemonStatus]:
    """Return the daemon's answer, as it is and as what it shall be; both of one namespace if that is given.

    sampled: have the daemon sample what GPUs do, too; a probe has no use for that, and comes every few seconds.
    Raises: CommandError.
    """
    if sampled:
        with suppress(OSError, ValueError):  # the next question tells; an older daemon does not know this one
            ask(state_dir / CONTROL_SOCKET, "usage", SamplingStatus)
    found, status = answer_of(state_dir, "status", lambda found: (found, convert(found, DaemonStatus)), RIGHT)
    if namespace is None:
        return found, status
    status = of_namespace(status, namespace)
    return to_builtins(status), status


def guard_exit(run_dir: Path, *, alive: bool) -> Exit:
    """Return the exit code for a readiness probe of the guard's pod. alive: being connected does not matter."""
    from nri_gpu.plugin import guard_status as guard  # only here, since it imports the policy

    seen, silent_s = guard.read_guard_status(run_dir), alive_age_s(run_dir)
    if seen is None or silent_s is None or silent_s > GUARD_SILENT_S:
        how = "none runs" if seen is None or silent_s is None else f"it has not reported for {silent_s:.0f} s"
        sentence = f"no guard with --run-dir {run_dir}: {how}; is `nri-gpu guard` running?"
        raise CommandError(Exit.UNAVAILABLE, sentence)
    if not (alive or seen.connected):
        raise CommandError(Exit.FINDING, "the guard is not connected to the runtime; its log says why")
    return Exit.OK
