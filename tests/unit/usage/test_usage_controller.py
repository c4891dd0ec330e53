"""The controller of samples: what it makes of them, and that a sample is nobody's news."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.sample import ProcessSample, SampleTarget, UnitSample
from nri_gpu.inventory.nvml_child import SampleSink
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import DriverSettings, Policy
from nri_gpu.policy.usage_settings import UsageSettings
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.usage.idle import HolderUse
from nri_gpu.usage.sample_child import SampleChild
from nri_gpu.usage.sampled_processes import UNTOLD, KnownProcess, ProcessLook
from nri_gpu.usage.usage_controller import ASKED_S, FRESH_WAIT_S, UsageController
from tests.support import builders as make
from tests.support.log import Log

ID, OTHER_ID = ContainerId("ab" * 32), ContainerId("cd" * 32)
MIG_GPU = make.mig_gpu(2)
INVENTORY = make.inventory([make.gpu(0), make.gpu(1), MIG_GPU])
TRAIN, OTHER = make.container(of="train", id=ID), make.container(of="other", id=OTHER_ID)
HELD = make.ledger(make.entry(0, 1, to=TRAIN), make.entry(1, to=OTHER))


class Child:
    """Stands in for the process that samples each second. fresh: what it samples as soon as it is woken."""

    def __init__(self) -> None:
        self.runs = False
        self.woken = asyncio.Event()


class Sampled:
    """A controller, whose processes are in the containers that a test says."""

    def __init__(self, ledger: Ledger = HELD, *, samples: bool = True, simulated: bool = False) -> None:
        policy = replace(Policy.default(), usage=UsageSettings(samples=samples))
        self.state = NodeState(INVENTORY, policy=policy)
        self.state.ledger = ledger
        self.now = 1000.0
        self.within: dict[int, ContainerId | None] = {}
        self.whole = self.same_pids = True
        self.child = Child()
        self.controller = UsageController(
            DriverSettings(),
            self.state,
            simulated=simulated,
            child=self._child,
            look=self._look,
            clock=lambda: self.now,
        )

    def _child(self, targets: object, sink: SampleSink) -> SampleChild:
        assert callable(targets)
        self.targets = targets
        self.sink = sink
        return self.child  # type: ignore[return-value]

    def _look(self, pids: Iterable[int], before: Mapping[int, KnownProcess]) -> ProcessLook:
        seen = {pid: KnownProcess(pid, 10 * pid, 0, "train", self._cgroups(pid)) for pid in pids if pid in self.within}
        return ProcessLook(seen, same_pids=self.same_pids, whole=self.whole)

    def _cgroups(self, pid: int) -> tuple[str, ...]:
        return (f"/kubepods/pod1/{self.within[pid]}",) if self.within[pid] else ("/user.slice",)

    async def sees(self, *units: UnitSample, after_s: float = 60.0) -> None:
        self.now += after_s
        await self.sink.taken(self.now, units)

    def holder(self, container_id: ContainerId, index: int) -> HolderUse:
        return self.controller.report().holders[container_id, make.uuid(index)]


def unit(index: int, *processes: ProcessSample, rate: int | None = 0) -> UnitSample:
    return UnitSample(
        uuid=make.uuid(index),
        memory_used_bytes=9,
        utilization_percent=rate,
        memory_rate_percent=rate,
        processes=processes,
    )


# --- what it makes of samples -----------------------------------------------------------------------------------------


async def test_processes_are_their_containers() -> None:
    sampled = Sampled()
    sampled.within = {1: ID, 2: ID, 3: OTHER_ID, 4: None}
    await sampled.sees(
        unit(0, ProcessSample(1, 5), ProcessSample(4, 7)),
        unit(1, ProcessSample(2, 10), ProcessSample(1, 1), ProcessSample(3, None)),
    )
    looks = {key: each.look for key, each in sampled.controller.report().holders.items()}
    assert {key: (look.memory_bytes, len(look.processes or ())) for key, look in looks.items()} == {
        (ID, make.uuid(0)): (5, 1),
        (ID, make.uuid(1)): (11, 2),
        (OTHER_ID, make.uuid(1)): (None, 1),
    }
    found = [(each.gpu_uuid, each.process.pid, each.container_id) for each in sampled.controller.processes()]
    assert found[:2] == [(make.uuid(0), 1, ID), (make.uuid(0), 4, None)]
    assert len(found) == 5


async def test_a_process_that_is_gone_is_nobodys() -> None:
    sampled = Sampled()
    await sampled.sees(unit(0, ProcessSample(1, 5)))
    use = sampled.holder(ID, 0)
    assert (use.look.processes, use.idle and use.idle.no_process) == (frozenset(), True)
    assert sampled.controller.report().units[make.uuid(0)].unit.processes == ()


async def test_idle_is_since_the_first_sample_without_use() -> None:
    sampled = Sampled()
    sampled.within = {1: ID}
    await sampled.sees(unit(0, ProcessSample(1, 5, used=True), rate=50))
    assert sampled.holder(ID, 0).idle is None
    for _ in range(3):
        await sampled.sees(unit(0, ProcessSample(1, 5, used=False)))
    idle = sampled.holder(ID, 0).idle
    assert idle and (idle.no_process, idle.samples, sampled.now - idle.since) == (False, 3, 120.0)
    await sampled.sees(unit(0))
    idle = sampled.holder(ID, 0).idle
    assert idle and (idle.no_process, idle.samples) == (True, 1)


async def test_a_mig_device_is_idle_only_without_a_process() -> None:
    uuid = MIG_GPU.mig[0].uuid
    sampled = Sampled(make.ledger(make.entry_of(uuid, to=TRAIN)))
    sampled.within = {1: ID}
    part = UnitSample(uuid=uuid, processes=(ProcessSample(1, 5),))
    await sampled.sees(part)
    assert sampled.controller.report().holders[ID, uuid].idle is None
    await sampled.sees(replace(part, processes=()))
    assert sampled.controller.report().holders[ID, uuid].idle


async def test_hidden_processes_are_nobodys_and_a_gpu_that_nobody_uses_is_idle() -> None:
    sampled = Sampled()
    sampled.whole = False
    await sampled.sees(unit(0, ProcessSample(1, 5)), unit(1))
    report = sampled.controller.report()
    assert report.fault == UNTOLD
    assert "hostPID" in report.fault
    hidden, without = sampled.holder(ID, 0), sampled.holder(ID, 1)
    assert not hidden.look.own
    assert hidden.idle and not hidden.idle.no_process
    assert without.look.own
    assert without.idle and without.idle.no_process, "an empty list is certain"
    await sampled.sees(unit(0, ProcessSample(1, 5), rate=3))
    assert sampled.holder(ID, 0).idle is None


async def test_pids_of_another_namespace_say_nothing() -> None:
    sampled = Sampled()
    sampled.same_pids = sampled.whole = False
    await sampled.sees(unit(0))
    assert sampled.holder(ID, 0) == HolderUse(sampled.holder(ID, 0).look)
    assert sampled.holder(ID, 0).look.processes is None
    assert sampled.controller.report().fault == UNTOLD


async def test_a_refresh_replaces_all_and_holders_that_are_gone_go() -> None:
    sampled = Sampled()
    await sampled.sees(unit(0), unit(1))
    await sampled.controller.refreshed.taken(sampled.now, (unit(1),))
    assert sampled.controller.report().units.keys() == {make.uuid(1)}
    sampled.state.ledger = make.ledger(make.entry(1, to=OTHER))
    assert sampled.controller.report().holders.keys() == {(OTHER_ID, make.uuid(1))}


async def test_nobody_is_idle_by_a_sample_of_long_ago() -> None:
    sampled = Sampled()
    await sampled.sees(unit(0))
    assert sampled.holder(ID, 0).idle
    sampled.now += 3 * sampled.state.settings.inventory.refresh_s + 1
    report = sampled.controller.report()
    assert not report.holders
    assert report.units[make.uuid(0)].at == sampled.now - 181, "which is shown with its age"


async def test_a_fault_is_told_until_the_next_sample(log: Log) -> None:
    sampled = Sampled()
    for _ in range(2):
        sampled.sink.failed("nvmlDeviceGetPowerUsage did not return")
    assert sampled.controller.report().fault == "nvmlDeviceGetPowerUsage did not return"
    assert len(log.said("GPU usage not sampled")) == 1
    await sampled.sees(unit(0))
    assert not sampled.controller.report().fault


async def test_a_bug_costs_a_sample_and_nothing_else(log: Log) -> None:
    sampled = Sampled()
    sampled.within = {1: ID}
    sampled.controller._look = lambda *_: 1 // 0  # type: ignore[assignment]
    await sampled.sees(unit(0))
    assert "ZeroDivisionError" in sampled.controller.report().fault
    assert log.said("bug: a sample of GPU usage was lost")


@pytest.mark.parametrize(("samples", "simulated"), [(False, False), (True, True)])
async def test_without_samples_nothing_is_known(samples: bool, simulated: bool) -> None:
    sampled = Sampled(samples=samples, simulated=simulated)
    assert not sampled.sink.wanted()
    await sampled.controller.ask()
    assert sampled.targets() == ()
    report = sampled.controller.report()
    assert (report.enabled, report.units, report.holders, sampled.controller.processes()) == (False, {}, {}, ())


# --- while somebody asks ----------------------------------------------------------------------------------------------


def asked(targets: Sequence[SampleTarget]) -> list[str]:
    return [each.uuid for each in targets]


async def test_only_held_gpus_are_sampled_and_only_while_somebody_asks() -> None:
    sampled = Sampled(make.ledger(make.entry(1, to=TRAIN), make.entry_of(MIG_GPU.mig[1].uuid, to=OTHER)))
    assert sampled.targets() == ()
    await sampled.controller.ask()
    assert sampled.child.woken.is_set()
    assert asked(sampled.targets()) == [make.uuid(1), make.uuid(2)]
    sampled.now += ASKED_S
    assert sampled.targets()
    sampled.now += 0.1
    assert sampled.targets() == ()


async def test_a_node_that_holds_nothing_is_not_sampled() -> None:
    sampled = Sampled(make.ledger())
    await sampled.controller.ask()
    assert not sampled.child.woken.is_set()


async def test_an_answer_waits_for_a_fresh_sample_and_not_for_long() -> None:
    sampled = Sampled()
    began = time.monotonic()
    await sampled.controller.ask()
    assert FRESH_WAIT_S <= time.monotonic() - began < 4 * FRESH_WAIT_S
    waiting = asyncio.create_task(sampled.controller.ask())
    await asyncio.sleep(0)
    await sampled.sees(unit(0), unit(1))
    await asyncio.wait_for(waiting, FRESH_WAIT_S / 2)
    began = time.monotonic()
    await sampled.controller.ask()
    assert time.monotonic() - began < FRESH_WAIT_S / 2


# --- the law ----------------------------------------------------------------------------------------------------------


async def test_a_thousand_samples_are_nobodys_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """No new node, no record, no write, no slice: those follow the node, the policy and the ledger."""
    monkeypatch.chdir(tmp_path)
    sampled = Sampled()
    sampled.within = {1: ID, 2: OTHER_ID}
    told: list[Changed] = []
    for change in Changed:
        sampled.state.first(lambda change=change: told.append(change), change)  # type: ignore[misc]
        sampled.state.then(lambda change=change: told.append(change), change)  # type: ignore[misc]
    before, ledger = sampled.state.node, sampled.state.ledger
    for at in range(1000):
        processes = [ProcessSample(pid, at, used=bool(at % 3)) for pid in (1, 2)][: at % 3]
        await sampled.controller.refreshed.taken(float(at), (unit(0, *processes), unit(1, *processes, rate=at % 100)))
        sampled.controller.report()
    await asyncio.sleep(0.01)
    assert sampled.state.node is before
    assert sampled.state.ledger is ledger
    assert (told, [*os.scandir()], log.lines) == ([], [], [])
    assert len(sampled.controller.report().holders) == 3
