"""GPUs that a pod held exclusively and has released: other pods get one when no process is on it, or after a grace.

The runtime tells when a container ends, but the driver may go on for a while: it frees memory, or a process that
escaped the cgroup still lives. The next container would share the GPU with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Entry, GrantPhase, Lapse, Ledger, Releasing, Reservation
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.kubelet import AllocatedDevice


class Wait(Struct, frozen=True):
    """How to wait for a released GPU. now: monotonic seconds; grace_s: for how long at most.

    awaited: whether to wait for a GPU at all: not where nothing will ever tell of its processes.
    """

    now: float
    grace_s: float
    awaited: Callable[[GpuUuid], bool]


def vacated(
    before: Ledger, after: Ledger, among: Iterable[ContainerId], wait: Wait, reserved: Iterable[AllocatedDevice] = ()
) -> Ledger:
    """`after`, with the GPUs releasing that these containers may have used exclusively and hold no longer.

    reserved: devices whose reservation ended; one without an end was for a pod whose container had run.
    """
    ended: list[tuple[Grant | Reservation, tuple[GpuUuid, ...]]] = []
    for container_id in among:
        entry, now = before.entries.get(container_id), after.entries.get(container_id)
        if entry is not None and _used_exclusively(entry) and not (now is not None and now.holds):
            ended.append((entry.grant, entry.grant.uuids))
    for device in reserved:
        each = before.reservations.get(device)
        if each is not None and each.until is None and each.mode is Mode.EXCLUSIVE and device not in after.reservations:
            ended.append((each, (device.uuid,)))
    left = {
        uuid: Releasing(holder.pod_uid, f"{holder.namespace}/{holder.pod_name}", wait.now, wait.grace_s)
        for holder, uuids in ended
        for uuid in uuids
        if wait.awaited(uuid)
    }
    return after.with_releasing({**after.releasing, **left})


def looked(ledger: Ledger, processes: Mapping[GpuUuid, int | None], began: float, *, unknown_waits: bool) -> Ledger:
    """The ledger after NVML was asked for the GPUs' processes.

    began: when it was asked, monotonic seconds; the answer says nothing about GPUs released later. unknown_waits:
    whether a GPU whose processes NVML cannot tell waits for its grace.
    """
    releasing: dict[GpuUuid, Releasing] = {}
    for uuid, left in ledger.releasing.items():
        count = processes.get(uuid)
        if began <= left.since:
            releasing[uuid] = left
        elif count or (count is None and unknown_waits):
            releasing[uuid] = replace(left, processes=count)
    return ledger.with_releasing(releasing)


def expired(ledger: Ledger, now: float) -> Ledger:
    """The ledger without the releasing GPUs whose grace is over."""
    waiting = {uuid: left for uuid, left in ledger.releasing.items() if now - left.since <= left.grace_s}
    return ledger.with_releasing(waiting)


def _used_exclusively(entry: Entry) -> bool:
    ran = entry.phase is GrantPhase.RUNNING or entry.until is Lapse.NEVER  # one listed as created may be starting
    return ran and entry.grant.mode is Mode.EXCLUSIVE
