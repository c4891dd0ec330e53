"""`nri-gpu verify`: proof of grant. Runtime and kernel are asked; the daemon only says which numbers a GPU has now.

Beside an observer, which grants nothing, it is proof of what others allocated.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nri_gpu.cli.ask_daemon import answering, ask, daemon_status, overrides_of
from nri_gpu.cli.follow_daemon import policy_in_force
from nri_gpu.cli.page import Column, Grid, Line, Row, Tone
from nri_gpu.cli.render import answer, lines, titled
from nri_gpu.daemon.answers import DaemonStatus, InventoryAnswer, SamplingStatus
from nri_gpu.domain.errors import CommandError, Exit, PolicyError, UnseenError, cause_of, fault_of
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import counted
from nri_gpu.plugin.guard_status import in_pod
from nri_gpu.records.policy_file import load_last_good, was_kept
from nri_gpu.system.storage import KEY_BYTES, KeyLengthError, read_key
from nri_gpu.verify.compare import VARIABLES
from nri_gpu.verify.container_report import (
    DAEMON,
    OBSERVER,
    SNAPSHOT,
    ContainerReport,
    Expected,
    Report,
    Verdict,
    verify,
)
from nri_gpu.verify.in_kernel import Kernel
from nri_gpu.verify.node_snapshot import SnapshotError, read_snapshot
from nri_gpu.verify.oci_bundles import STATES, read_bundles

FROM_A_POD: Final = "the chart's pods do not mount it: run `nri-gpu verify` on the node, as root"


def run(args: argparse.Namespace) -> int:
    """Print the report. Return 1 for a difference, 69 or 77 if something could not be seen."""
    report, inventory = _look(args)
    answer(args, report, verify_page(report, inventory))
    return code_of(report)


def code_of(report: Report) -> Exit:
    """Return the exit code: a difference counts more than what could not be seen."""
    if any(each.differences for each in report.containers):
        return Exit.FINDING
    if report.unseen or any(each.unseen for each in report.containers):
        return Exit.PERMISSION if report.denied else Exit.UNAVAILABLE
    return Exit.OK


def _look(args: argparse.Namespace) -> tuple[Report, Inventory]:
    """Return the report and the inventory. Raises: CommandError, if nothing could be seen."""
    state_dir = answering(args.state_dir)
    if (status := daemon_status(state_dir)) and status.observer:
        return _beside_observer(args, state_dir)
    states = [Path(each) for each in ([args.containerd_state] if args.containerd_state else STATES)]
    key = _key(state_dir)
    inventory, stage_dir, origin = _numbers(args, state_dir, key)
    if inventory.fault and not inventory.gpus:
        raise CommandError(Exit.UNAVAILABLE, f"the GPUs of this node are not known: {inventory.fault}")
    try:
        evidence = Expected(
            kernel=Kernel(),
            key=key,
            inventory=inventory,
            stage_dir=stage_dir,
            numbers_from=origin,
            holders=lambda: _holders(daemon_status(state_dir)) if origin == DAEMON else {},
        )
        return verify(lambda: read_bundles(states, variables=VARIABLES), evidence), inventory
    except UnseenError as error:
        sentence = f"{error}; {FROM_A_POD}" if in_pod() else error
        raise CommandError(Exit.PERMISSION if error.denied else Exit.UNAVAILABLE, sentence) from None


def _beside_observer(args: argparse.Namespace, run_dir: Path) -> tuple[Report, Inventory]:
    """Look at containers, and hold them against what the observer knows of allocations. Raises: CommandError."""
    from nri_gpu.observe.allocation_report import allocation_report
    from nri_gpu.observe.looker import look_at_node

    socket = run_dir / CONTROL_SOCKET
    try:
        ask(socket, "usage", SamplingStatus)  # for which it looks anew
        known = ask(socket, "status", DaemonStatus).observer
        inventory = ask(socket, "inventory", InventoryAnswer).inventory
    except (OSError, ValueError) as error:
        raise CommandError(Exit.UNAVAILABLE, f"no answer from the observer at {socket}: {fault_of(error)}") from None
    if known is None or known.looked_s is None:
        raise CommandError(Exit.UNAVAILABLE, "the observer has not looked at this node yet: run this again in 10 s")
    states = (args.containerd_state,) if args.containerd_state else ()
    look = asyncio.run(look_at_node(inventory, processes=False, states=states))
    return replace(allocation_report(look, known, inventory), denied=os.geteuid() != 0), inventory


def _key(state_dir: Path) -> bytes:
    """Return the key that grants are signed with. Raises: CommandError."""
    path = state_dir / "key"
    try:
        return read_key(path)
    except FileNotFoundError:
        sentence = f"no key {path} to check grants with: `nri-gpu run` makes it; --state-dir names another state folder"
        raise CommandError(Exit.UNAVAILABLE, sentence) from None
    except KeyLengthError:
        raise CommandError(
            Exit.UNAVAILABLE, f"key {path} is not {KEY_BYTES} bytes long: start `nri-gpu run` again"
        ) from None
    except OSError as error:
        root = "; be root" * isinstance(error, PermissionError)
        raise CommandError(Exit.of(error), f"key {path} cannot be used: {cause_of(error)}{root}") from None


def _numbers(args: argparse.Namespace, state_dir: Path, key: bytes) -> tuple[Inventory, Path, str]:
    """Return the inventory, the stage folder, and who says so. Raises: CommandError, PolicyError."""
    try:
        answer = ask(state_dir / CONTROL_SOCKET, "inventory", InventoryAnswer)
    except (OSError, ValueError) as error:
        silence = f"the daemon at {state_dir} does not say ({fault_of(error)})"
    else:
        return answer.inventory, _stage_dir(args.policy, state_dir), DAEMON
    try:
        last = read_snapshot(state_dir, key)
        why = "there is none"
    except SnapshotError as error:
        last, why = None, str(error)
    if last is None:
        sentence = f"which device numbers the GPUs have is not known: {silence}, nor does its last snapshot ({why})"
        raise CommandError(Exit.UNAVAILABLE, f"{sentence}; is `nri-gpu run` running?")
    return last.inventory, Path(last.evidence.settings[1]).resolve(), SNAPSHOT


def _stage_dir(file: str | None, state_dir: Path) -> Path:
    """Return where the daemon stages drivers. Raises: PolicyError."""
    status = daemon_status(state_dir)
    try:
        policy = policy_in_force(status, file, state_dir, all_options=False, in_force=was_kept(state_dir))
    except PolicyError:
        last = load_last_good(state_dir, overrides_of(status))  # which the daemon runs on, too
        if last is None:
            raise
        policy = last
    return Path(policy.driver.stage_dir).resolve()


def _holders(status: DaemonStatus | None) -> Mapping[str, str] | None:
    if status is None:
        return None
    holders = (holder for gpu in status.gpus for holder in gpu.holders if holder.running)
    return {each.container_id: f"{each.namespace}/{each.pod}" for each in holders}


def verify_page(report: Report, inventory: Inventory) -> list[Line | Grid]:
    """Return a line for each container, and below them the differences and what could not be seen."""
    shown = report.containers
    counts = {verdict: sum(each.verdict is verdict for each in shown) for verdict in Verdict}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    headline = f"{report.node.name}: {counted(len(shown), 'container')}{f': {told}' if told else ''}"
    if report.numbers_from == SNAPSHOT:
        headline += "; no daemon answers, so device numbers are from its last snapshot"
    columns = COLUMNS
    if report.numbers_from == OBSERVER:
        headline += "; an observer answers: held against what the kubelet, claims, CDI and Docker gave"
        columns = tuple(Column("BY") if each.head == "MODE" else each for each in COLUMNS)
    rows = tuple(_row(each, inventory) for each in shown)
    return [
        Line(titled(headline, simulated=inventory.simulated), Tone.HEAD),
        *([Grid(columns, rows)] if rows else []),
        *lines((sentence for each in shown for sentence in _sentences(each)), Tone.BAD),
        *lines((f"not seen: {sentence}" for sentence in report.unseen), Tone.WARN),
    ]


TONES: Final = {
    Verdict.OK: Tone.GOOD,
    Verdict.NO_GPU: Tone.FAINT,
    Verdict.PRIVILEGED: Tone.WARN,
    Verdict.DIFFERS: Tone.BAD,
    Verdict.UNSEEN: Tone.WARN,
    Verdict.ALLOCATED: Tone.GOOD,
    Verdict.WIDENED: Tone.BAD,
    Verdict.NOT_ALLOCATED: Tone.BAD,
}
COLUMNS: Final = (
    Column("POD", name=True),
    Column("CONTAINER", name=True, repeated=True),
    *map(Column, ("GPUS", "MODE", "VERDICT")),
)


def _row(each: ContainerReport, inventory: Inventory) -> Row:
    places: dict[str, str] = {unit.uuid: unit.place for unit in inventory.units}
    gpus = ",".join(places.get(uuid, uuid) for uuid in each.gpu_uuids)
    return each.pod, each.container, gpus or "-", each.mode or each.by or "-", Line(each.verdict, TONES[each.verdict])


def _sentences(each: ContainerReport) -> Iterator[str]:
    name = f"{each.pod} {each.container}"
    yield from (f"{name}: {clause}" for clause in each.differences)
    if each.unseen:
        yield f"{name} not seen: {each.unseen}"
