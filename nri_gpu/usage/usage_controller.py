"""The controller of samples: keeps the last ones in memory, and has GPUs that are held sampled while somebody asks."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.sample import ProcessSample, SampleTarget, UnitSample, read_targets
from nri_gpu.inventory.nvml_child import SampleSink
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.policy.model import DriverSettings
from nri_gpu.stray.judge import Known, container_of
from nri_gpu.system.state import NodeState
from nri_gpu.system.tasks import LogOnce, set_within
from nri_gpu.usage.idle import HolderLook, HolderUse, Processes, after, used
from nri_gpu.usage.sample_child import EACH_S, SampleChild
from nri_gpu.usage.sampled_processes import UNTOLD, KnownProcess, ProcessLook, look

ASKED_S: Final = 5.0  # after a question, until the process that samples each second ends
FRESH_WAIT_S: Final = 0.3  # for an answer to wait for a sample
FRESH_S: Final = 1.5 * EACH_S  # as old as a sample may be that nobody waits for

REFRESHES_MISSED: Final = 3  # by a holder's last sample, until nothing is known of the holder any more
LOOKED_AT_ONCE: Final = 32  # processes; each takes 20 microseconds

HolderKey = tuple[ContainerId, GpuUuid]


class SampledUnit(Struct, frozen=True):
    """A GPU or MIG device in its last sample. at: when NVML was asked, on the monotonic clock."""

    at: float
    unit: UnitSample


class SampledUse(Struct, frozen=True, kw_only=True):
    """A process on a GPU, and the container that it is in: empty for one of the host."""

    gpu_uuid: GpuUuid
    process: KnownProcess
    memory_bytes: int | None
    container_id: ContainerId | None


class Usages(Struct, frozen=True, kw_only=True):
    """Everything that samples have shown. enabled, each_second, fault: as in `SamplingStatus`."""

    units: Mapping[GpuUuid, SampledUnit] = {}
    holders: Mapping[HolderKey, HolderUse] = {}
    enabled: bool = False
    each_second: bool = False
    fault: str = ""


NO_USAGES: Final = Usages()


class UsageController:
    """A controller for the life of the daemon. It holds all that it knows in memory, and tells nobody of a sample.

    containers: the runtime's live ones. simulated: there is nothing to sample. child: makes the process that samples
    each second.
    """

    def __init__(
        self,
        driver: DriverSettings,
        node_state: NodeState,
        *,
        simulated: bool = False,
        child: Callable[[Callable[[], Sequence[SampleTarget]], SampleSink], SampleChild] | None = None,
        containers: Callable[[], Mapping[ContainerId, ListedContainer]] = dict,
        look: Callable[[Iterable[int], Mapping[int, KnownProcess]], ProcessLook] = look,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_state = node_state
        self._simulated = simulated
        self._look = look
        self._clock = clock
        self._containers = containers
        self._units: dict[GpuUuid, SampledUnit] = {}
        self._holders: dict[HolderKey, HolderUse] = {}
        self._uses: dict[GpuUuid, tuple[SampledUse, ...]] = {}
        self._known: Mapping[int, KnownProcess] = {}
        self._fault = ""  # why the last sample did not come
        self._untold = ""  # why nobody can tell whose the processes of the last sample are
        self._asked = -math.inf
        self._came = asyncio.Event()  # set with each sample
        self._faults = LogOnce()
        self.refreshed = SampleSink(lambda: self._enabled, self._take_all, self._failed)  # of all GPUs
        child = child or partial(SampleChild, driver.root, driver.library_dirs, stage_dir=driver.stage_dir)
        self._child = child(self._targets, SampleSink(lambda: self._enabled, self.take, self._failed))

    async def run(self) -> None:
        """Sample each second while somebody asks, until cancelled."""
        await self._child.run()

    async def ask(self) -> None:
        """Note that somebody asks. Return once held GPUs have a fresh sample, after FRESH_WAIT_S at most."""
        self._asked = self._clock()
        if not (targets := self._targets()):
            return
        self._child.woken.set()
        self._came.clear()
        if not all(self._is_fresh(each.uuid) for each in targets):
            await set_within(self._came, FRESH_WAIT_S)

    async def _take_all(self, at: float, units: Sequence[UnitSample]) -> None:
        """Take a sample of all GPUs: one that is not in it is gone, or does not answer any more."""
        self._units, self._uses = {}, {}
        await self.take(at, units)

    async def take(self, at: float, units: Sequence[UnitSample]) -> None:
        """Take a sample. at: when NVML was asked, on the monotonic clock."""
        try:
            pids = {each.pid for unit in units for each in unit.processes or ()}
            # Some milliseconds for hundreds of processes, in which the runtime may want an answer; for a few, less than
            # the thread costs.
            aside = len(pids) > LOOKED_AT_ONCE
            seen = await asyncio.to_thread(self._look, pids, self._known) if aside else self._look(pids, self._known)
            self._keep(at, units, seen)
        except Exception as error:  # the NRI plugin goes on serving, whatever goes wrong here
            logger.opt(exception=True).error("bug: a sample of GPU usage was lost")
            self._failed(f"a bug of nri-gpu ({type(error).__name__}); its log has the traceback")
            return
        self._fault = ""
        self._faults.clear()
        self._came.set()

    def report(self) -> Usages:
        """Return what is known now, of GPUs and holders that are there now. Nobody is idle by samples of long ago."""
        if not self._enabled:
            return NO_USAGES
        node, ledger = self._node_state.node, self._node_state.ledger
        shown = {unit.uuid for unit in node.inventory.units}
        recent = self._clock() - REFRESHES_MISSED * self._node_state.settings.inventory.refresh_s
        return Usages(
            units={uuid: each for uuid, each in self._units.items() if uuid in shown},
            holders={
                key: each for key, each in self._holders.items() if key[0] in ledger.entries and each.look.at >= recent
            },
            enabled=True,
            each_second=self._child.runs,
            fault="; ".join(filter(None, (self._fault, self._untold))),
        )

    def processes(self) -> tuple[SampledUse, ...]:
        """Return the processes of the last samples."""
        shown = {unit.uuid for unit in self._node_state.node.inventory.units} if self._enabled else set()
        return tuple(each for uuid, uses in self._uses.items() if uuid in shown for each in uses)

    @property
    def _enabled(self) -> bool:
        return self._node_state.settings.usage.samples and not self._simulated

    def _failed(self, why: str) -> None:
        self._fault = why
        self._faults.note("GPU usage not sampled", why)

    def _targets(self) -> Sequence[SampleTarget]:
        """Return the GPUs that are held, with the MIG devices of each, while somebody asks."""
        if not self._enabled or self._clock() - self._asked > ASKED_S:
            return ()
        held = {uuid for uuid, use in self._node_state.ledger.usage().items() if use.load}
        gpus = self._node_state.node.inventory.gpus
        targets = read_targets(
            [gpu for gpu in gpus if any(uuid in held for uuid in (gpu.uuid, *(part.uuid for part in gpu.parts)))]
        )
        return [replace(each, told_us=self._told_us(each.uuid)) for each in targets]

    def _told_us(self, uuid: str) -> int:
        last = self._units.get(GpuUuid(uuid))
        return last.unit.told_us if last else 0

    def _is_fresh(self, uuid: str) -> bool:
        last = self._units.get(GpuUuid(uuid))
        return last is not None and self._clock() - last.at <= FRESH_S

    def _keep(self, at: float, units: Sequence[UnitSample], seen: ProcessLook) -> None:
        self._untold = "" if seen.whole else UNTOLD
        ledger = self._node_state.ledger
        known = Known(
            inventory=self._node_state.node.inventory,
            entries=ledger.entries,
            live=ledger.live,
            containers=self._containers(),
        )
        containers = {pid: container_of(each.cgroups, known) for pid, each in seen.processes.items()}
        for unit in (_without_gone(each, seen) for each in units):
            self._units[unit.uuid] = SampledUnit(at, unit)
            self._uses[unit.uuid] = tuple(_uses(unit, seen, containers))
            usage = ledger.usage().get(unit.uuid)
            for container_id in usage.grants if usage else ():
                key = container_id, unit.uuid
                holder = _look_at(container_id, at, unit, seen, containers)
                self._holders[key] = after(self._holders.get(key), holder)
        self._holders = {key: each for key, each in self._holders.items() if key[0] in ledger.entries}
        self._known = {each.process.pid: each.process for uses in self._uses.values() for each in uses}


def _without_gone(unit: UnitSample, seen: ProcessLook) -> UnitSample:
    """Return the sample without processes that are gone, and with none where NVML cannot know them by their PIDs."""
    if not seen.same_pids:
        return replace(unit, processes=None)
    if not seen.whole or unit.processes is None:
        return unit
    return replace(unit, processes=tuple(each for each in unit.processes if each.pid in seen.processes))


def _uses(unit: UnitSample, seen: ProcessLook, containers: Mapping[int, ContainerId | None]) -> Iterator[SampledUse]:
    for each in unit.processes or ():
        if known := seen.processes.get(each.pid):
            yield SampledUse(
                gpu_uuid=unit.uuid, process=known, memory_bytes=each.memory_bytes, container_id=containers[each.pid]
            )


def _look_at(
    container_id: ContainerId,
    at: float,
    unit: UnitSample,
    seen: ProcessLook,
    containers: Mapping[int, ContainerId | None],
) -> HolderLook:
    """Return what a sample shows of a holder."""
    if unit.processes is None:
        return HolderLook(at=at)
    if any(each.pid not in containers for each in unit.processes):  # hidden from us
        pids = frozenset((each.pid, 0) for each in unit.processes)
        nobody = False if unit.rate_percent == 0 else None
        return HolderLook(at=at, own=False, processes=pids, memory_bytes=unit.memory_used_bytes, used=nobody)
    own = [each for each in unit.processes if containers[each.pid] == container_id]
    return HolderLook(
        at=at,
        processes=_identities(own, seen),
        memory_bytes=_sum(each.memory_bytes for each in own),
        used=used(unit, own),
        utilization_percent=_sum(each.sm_percent for each in own),
    )


def _identities(own: Iterable[ProcessSample], seen: ProcessLook) -> Processes:
    return frozenset((each.pid, seen.processes[each.pid].started) for each in own)


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of processes' numbers, or None where the driver does not tell that of one."""
    told = list(values)
    return None if None in told else sum(each for each in told if each is not None)
