"""GPUs that one pod had exclusively and has released, and that other pods wait for.

A GPU is being released until no process is on it, or for a grace. The runtime tells when a container ends, but the
driver may go on for a while: it frees memory, or a process that escaped the cgroup still lives. The next container
would share the GPU with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.events import LedgerEvent, Looked, Rules, Ticked
from nri_gpu.ledger.holders import Releasing, Reservation
from nri_gpu.ledger.ledger import Ledger


def releasing_after(before: Ledger, after: Ledger, event: LedgerEvent, rules: Rules) -> Ledger:
    """`after`, with the GPUs that other pods wait for from now on, and without those whose wait is over."""
    if not rules.waits:
        return after.with_releasing({})
    match event:
        case Looked():
            return after.with_releasing(_looked(after, event, rules))
        case Ticked(at):
            waiting = {uuid: left for uuid, left in after.releasing.items() if at - left.since <= left.grace_s}
            return after.with_releasing(waiting)
        case _:
            waiting = dict(after.releasing)
            for holder, uuid, first_started in _left(before, after):
                if rules.unknown_waits or uuid in rules.counted:
                    left = Releasing(
                        holder.pod_uid,
                        f"{holder.namespace}/{holder.pod_name}",
                        event.at,
                        rules.grace_s,
                        first_started=first_started,
                    )
                    waiting[uuid] = _with_earlier(left, waiting.get(uuid))
            return after.with_releasing(waiting)


def _with_earlier(left: Releasing, earlier: Releasing | None) -> Releasing:
    """Return a release that also waits for the processes of one before it, which is still waited for."""
    if earlier is None or left.first_started is None:
        return left
    first = None if earlier.first_started is None else min(left.first_started, earlier.first_started)
    return replace(left, first_started=first)


def _left(before: Ledger, after: Ledger) -> Iterator[tuple[Grant | Reservation, GpuUuid, int | None]]:
    """Find who had which GPU exclusively and has it no more, and when the first process there began.

    A reservation without an end was for a pod whose container had run.
    """
    if after.entries is before.entries and after.reservations is before.reservations:
        return
    for id_, entry in before.entries.items():
        if entry.used_exclusively and not ((still := after.entries.get(id_)) and still.holds):
            process = before.processes.get(id_)
            yield from ((entry.grant, uuid, process.started if process else None) for uuid in entry.grant.uuids)
    given_up = before.reservations.keys() - after.reservations.keys()
    held = {uuid for each in after.entries.values() if each.holds for uuid in each.grant.held} if given_up else set()
    for device, each in before.reservations.items():
        if device in given_up and device.uuid not in held and each.until is None and each.mode is Mode.EXCLUSIVE:
            yield each, device.uuid, None


def _looked(ledger: Ledger, event: Looked, rules: Rules) -> Mapping[GpuUuid, Releasing]:
    """Count the processes on releasing GPUs. The look says nothing about GPUs that were released after it began."""
    waiting: dict[GpuUuid, Releasing] = {}
    for uuid, left in ledger.releasing.items():
        count = event.processes.get(uuid)
        if event.at <= left.since:
            waiting[uuid] = left
        elif count or (count is None and rules.unknown_waits):
            waiting[uuid] = replace(left, processes=count)
    return waiting
