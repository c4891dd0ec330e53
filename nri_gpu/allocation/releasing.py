"""From one pod's exclusive use to the next: a GPU is offered again when no process is on it, or after a grace.

A container's end is told by the runtime, but the driver may go on for a while: memory is being freed, or a process that
escaped its cgroup lives. Whoever came next would share the GPU with it. Pure, as the ledger is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Entry, GrantPhase, Ledger, Releasing
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid


class Wait(Struct, frozen=True):
    """How a GPU that is left is waited for. now: the moment; grace_s: for how long at most, seconds.

    awaited: whether at all, for each GPU: not where nobody will ever tell of processes.
    """

    now: float
    grace_s: float
    awaited: Callable[[GpuUuid], bool]


def vacated(before: Ledger, after: Ledger, among: Iterable[ContainerId], wait: Wait) -> Ledger:
    """`after`, with GPUs leaving that these containers may have used exclusively before and do not hold any more."""
    leaving = dict(after.releasing)
    for container_id in among:
        entry, now = before.entries.get(container_id), after.entries.get(container_id)
        if entry is None or not _used_alone(entry) or (now is not None and now.holds):
            continue
        grant = entry.grant
        leaver = Releasing(grant.pod_uid, f"{grant.namespace}/{grant.pod_name}", wait.now, wait.grace_s)
        leaving |= {uuid: leaver for uuid in grant.uuids if wait.awaited(uuid)}
    return after.with_releasing(leaving)


def looked(ledger: Ledger, processes: Mapping[GpuUuid, int | None], began: float, *, unknown_waits: bool) -> Ledger:
    """After a look at the GPUs' processes. began: when it began; GPUs that were left later are not told of by it.

    unknown_waits: whether one whose processes cannot be told waits for its grace.
    """
    leaving: dict[GpuUuid, Releasing] = {}
    for uuid, leaver in ledger.releasing.items():
        count = processes.get(uuid)
        if began <= leaver.since:
            leaving[uuid] = leaver
        elif count or (count is None and unknown_waits):
            leaving[uuid] = replace(leaver, processes=count)
    return ledger.with_releasing(leaving)


def expired(ledger: Ledger, now: float) -> Ledger:
    """Without those whose grace is over."""
    if not ledger.releasing:
        return ledger
    waits = {uuid: leaver for uuid, leaver in ledger.releasing.items() if now - leaver.since <= leaver.grace_s}
    return ledger.with_releasing(waits)


def _used_alone(entry: Entry) -> bool:
    # One that the runtime listed as created may have run (plugin/handlers.py, NEVER_LAPSES).
    ran = entry.phase is GrantPhase.RUNNING or (entry.phase is GrantPhase.CREATED and entry.until == math.inf)
    return ran and entry.grant.mode is Mode.EXCLUSIVE
