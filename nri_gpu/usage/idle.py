"""Idle holders: what samples show of a holder on one GPU, one after another. Pure."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from nri_gpu.domain.sample import ProcessSample, UnitSample

Processes = frozenset[tuple[int, int]]  # PID, and when it started, clock ticks since boot


class HolderLook(Struct, frozen=True, kw_only=True):
    """A holder in one sample. at: on the monotonic clock.

    processes: what it has on the GPU; None where that cannot be told. used: whether they used it since the sample
    before; None where that cannot be told. own: processes and memory are the holder's; else all there is on the GPU.
    """

    at: float
    own: bool = True
    utilization_percent: int | None = None  # of its processes together
    processes: Processes | None = None
    memory_bytes: int | None = None
    used: bool | None = None


class IdleSince(Struct, frozen=True, kw_only=True):
    """The samples without use, up to the last. since: the first of them, on the monotonic clock.

    no_process: the holder had no process in any of them.
    """

    since: float
    samples: int
    no_process: bool


class HolderUse(Struct, frozen=True):
    """The last look at a holder, and since when it is idle; None: it is not, or nobody can tell."""

    look: HolderLook
    idle: IdleSince | None = None


def after(before: HolderUse | None, look: HolderLook) -> HolderUse:
    """Return what is known of a holder after a look. A process that starts, or memory that changes, is use."""
    if look.processes is None or (look.processes and (look.used is not False or _changed(before, look))):
        return HolderUse(look)
    no_process = not look.processes
    last = before.idle if before else None
    if last is None or last.no_process is not no_process:
        return HolderUse(look, IdleSince(since=look.at, samples=1, no_process=no_process))
    return HolderUse(look, IdleSince(since=last.since, samples=last.samples + 1, no_process=no_process))


def _changed(before: HolderUse | None, look: HolderLook) -> bool:
    if before is None or before.look.processes is None or look.processes is None:
        return False
    return not look.processes <= before.look.processes or look.memory_bytes != before.look.memory_bytes


def used(unit: UnitSample, own: Collection[ProcessSample]) -> bool | None:
    """Return whether a holder's processes used the unit since the sample before, or None if nobody can tell.

    Beside the driver's word on each process, its rates tell: of all at once where they are 0, and else of a holder
    whose processes are all that there are. Where somebody used it, and of nobody it is told, nobody can tell.
    """
    rate, alone = unit.rate_percent, len(own) == len(unit.processes or ())
    told = [each.used for each in own]
    if any(told):
        return True
    if rate is None:
        return None if None in told else False
    if not rate:
        return False
    if alone:
        return True
    by_others = any(each.used for each in unit.processes or ())
    return False if by_others and None not in told else None
