"""Pods that only watch: what they open is kept from nobody, and what follows from a reload and a kubelet's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.decision.overlaps import overlaps
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.monitors import MonitorPods
from nri_gpu.policy.forms import NOTHING, Globs
from nri_gpu.policy.model import ForeignSettings, Policy
from nri_gpu.records.audit_records import Replay, ledger_record
from nri_gpu.stray.allocated import AllocationsUnknownError
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import Bench
from tests.unit.plugin.lasting import Cgroups

POD: Final = "exporter-x2k9v"
MONITORS: Final = Policy(foreign=ForeignSettings(monitors=Globs(("ml/exporter-*",))))
GENERATION: Final = "570.1-0a1b2c3d"


def exporter(name: str = POD) -> tuple[pb.PodSandbox, pb.Container]:
    """It has every GPU's node, and driver files that we staged."""
    of = nri.pod(name)
    made = nri.container(of)
    for minor in range(4):
        made.linux.devices.add(path=f"/dev/nvidia{minor}", type="c", major=195, minor=minor)
    made.mounts.add(destination="/opt", type="bind", source=f"/staged/{GENERATION}/compute/lib64")
    return of, made


def use(bench: Bench, monitors: Globs) -> None:
    """The policy is reloaded, and the daemon's followers are told."""
    bench.state.use(Policy(foreign=ForeignSettings(monitors=monitors)))
    bench.plugin.observe()


def test_what_it_opens_is_kept_from_nobody() -> None:
    """From a container in each mode, the kubelet's device plugin and the health listener; its driver files stay."""
    bench = Bench(MONITORS, stage_dir="/staged")
    of, made = exporter()
    bench.create(of, made)
    (opened,) = bench.plugin.ledger.external.values()
    assert opened.uuids == {gpu.uuid for gpu in bench.node.gpus}
    assert not opened.held
    assert bench.plugin.ledger.usage() == {}
    assert bench.taken(shared=False) == bench.taken(shared=True) == frozenset()
    assert bench.plugin.ledger.generations() == {GENERATION}
    bench.create(nri.asking("4"))
    bench.synchronize([of], [nri.running(made)])
    assert bench.plugin.ledger.usage() == {}
    bench.create(nri.asking("all; mode=shared"))
    assert {use.load for use in bench.plugin.ledger.usage().values()} == {1}


def test_only_the_list_makes_a_monitor() -> None:
    for policy, name in ((MONITORS, "other"), (Policy(), POD)):
        bench = Bench(policy)
        bench.create(*exporter(name))
        said = bench.refused(nri.asking("1"))
        assert f"held by ml/{name} (not through nri-gpu), whose container main opens 4 GPUs" in said
        assert len(bench.taken(shared=True)) == 4


def test_a_reload_makes_a_monitor_and_unmakes_it(log: Log) -> None:
    bench = Bench()
    bench.create(*exporter())
    use(bench, MONITORS.foreign.monitors)
    assert bench.taken(shared=False) == frozenset()
    _, train = bench.granted("device=1", "train")
    bench.create(nri.asking("device=0; mode=shared", "shared"))
    assert not log.warnings()

    use(bench, NOTHING)
    one, zero = bench.node.gpus[1].uuid, bench.node.gpus[0].uuid
    assert set(bench.plugin.ledger.entries) == {ContainerId(train.id), ContainerId("container-shared-main")}
    assert set(overlaps(bench.plugin.ledger)) == {one}
    bench.settle()
    line = log.one("container opens GPUs that another pod has exclusively")
    assert (line.level, line.fields["gpu_uuid"], line.fields["holder"]) == ("ERROR", one, "ml/train")
    assert f"ml/{POD}" in line.fields["fault"]
    assert "[gpu-busy]" in bench.refused(nri.asking("device=1", "next"))
    assert "[gpu-busy]" in bench.refused(nri.asking("device=2", "next"))
    bench.create(nri.asking(f"device={zero}; mode=shared", "beside"))  # as beside anybody else's

    use(bench, MONITORS.foreign.monitors)
    assert overlaps(bench.plugin.ledger) == {}
    bench.create(nri.asking("device=2", "next"))


def test_a_replay_knows_monitors_by_the_record_and_by_another_policy() -> None:
    bench = Bench(MONITORS)
    bench.create(*exporter())
    watched = bench.plugin.ledger
    use(bench, NOTHING)
    for ledger in (watched, bench.plugin.ledger):
        for instead, free in ((None, ledger is watched), (Policy(), False), (MONITORS, True)):
            replay = Replay(lambda _, __: Policy(), instead)
            replay.take(ledger_record(ledger, 0.0))
            assert (not replay.ledger.usage()) is free


async def test_a_lost_monitor_holds_nothing(log: Log) -> None:
    bench = Bench(MONITORS, cgroups=Cgroups())
    of, made = exporter()
    made.pid = 40
    bench.create(of, made)
    bench.tell(Event.START_CONTAINER, of, made)
    bench.tell(Event.STOP_CONTAINER, of, made)
    assert bench.plugin.ledger.lost
    bench.clock.now += 100
    bench.plugin.processes.look()
    assert bench.plugin.processes.described() == ()
    assert bench.plugin.ledger.stuck == frozenset()
    assert "container has ended for the runtime, but its processes still hold its GPUs" not in str(log.lines)
    use(bench, NOTHING)
    bench.plugin.processes.look()
    (lost,) = bench.plugin.processes.described()
    assert len(lost.uuids) == len(bench.plugin.ledger.stuck) == 4


class Answers:
    """A kubelet that fails so often, and then says that it allocated GPU 2 to the exporter."""

    def __init__(self, bench: Bench, failures: int = 0) -> None:
        self.allocated = frozenset({bench.node.gpus[2].uuid})
        self.asked: list[str] = []
        self._failures = failures

    async def __call__(self, socket: str) -> Mapping[tuple[str, str], frozenset[GpuUuid]]:
        self.asked.append(socket)
        if len(self.asked) <= self._failures:
            raise AllocationsUnknownError("it does not answer")
        return {("ml", POD): self.allocated}


async def test_what_the_kubelet_allocated_to_it_it_holds(log: Log) -> None:
    bench = Bench(MONITORS)
    answers = Answers(bench, failures=2)
    monitors = bench.plugin.monitors = MonitorPods(bench.state, answers, first_retry_s=0.001)
    bench.create(*exporter())
    assert bench.taken(shared=False) == frozenset()
    told = asyncio.Event()

    def changed() -> None:
        bench.plugin.observe()
        told.set()

    task = asyncio.create_task(monitors.run(changed))
    await told.wait()
    assert bench.taken(shared=False) == answers.allocated
    assert len(answers.asked) == 3
    assert log.one("kubelet allocations of monitors are unknown").fields["fault"] == "it does not answer"
    assert "[gpu-busy]" in bench.refused(nri.asking("4"))
    bench.create(nri.asking("3"))
    bench.create(nri.asking("1; mode=shared", "no-monitor"))
    bench.settle()
    await asyncio.sleep(0.05)
    assert len(answers.asked) == 3  # once for a sandbox
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_monitor_that_is_gone_is_forgotten() -> None:
    bench = Bench(MONITORS)
    of, made = exporter()
    bench.create(of, made)
    (opened,) = bench.plugin.ledger.external.values()
    bench.plugin.monitors.told({opened.pod_id: opened.uuids})
    bench.plugin.observe()
    assert len(bench.taken(shared=False)) == 4
    bench.tell(Event.REMOVE_CONTAINER, of, made)
    bench.plugin.monitors.told({})
    assert bench.plugin.monitors.now.allocated == {}
    assert replace(bench.plugin.ledger, live={}) == bench.plugin.ledger
