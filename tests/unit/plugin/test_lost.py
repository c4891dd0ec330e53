"""Containers that are over for the runtime and have processes: what they hold, who hears of them, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.events import AllocationKnown
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.processes import STUCK_AFTER_S, WARNED_AFTER_S
from nri_gpu.ledger.recording import Remembered
from nri_gpu.nri.subscription import Event
from nri_gpu.system.cgroups import DEVICES, EVENTS, ContainerCgroups, Mounted
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import Bench, NoRecorder
from tests.support.scripted_runtime import until
from tests.unit.plugin.lasting import Cgroups

ID = "container-first-main"
STILL_RUNS = "container has ended for the runtime, but its processes still hold its GPUs"
ENDS = (Event.STOP_CONTAINER, Event.REMOVE_CONTAINER, Event.STOP_POD_SANDBOX, Event.REMOVE_POD_SANDBOX)


class LostBench(Bench):
    """A plugin with a container that ran, and to which something happens in an event loop."""

    def __init__(self, cgroups: ContainerCgroups | None = None) -> None:
        self.cgroups = Cgroups()
        super().__init__(cgroups=cgroups or self.cgroups)
        self.of = nri.asking("device=0", "first")
        made = nri.container(self.of)
        self.made = nri.running(nri.adjusted(made, self.create(self.of, made)))
        self.tell(Event.START_CONTAINER, self.of, self.made)

    @property
    def free(self) -> bool:
        return not self.plugin.ledger.usage()

    def end(self, kind: Event) -> None:
        of_pod = kind in (Event.STOP_POD_SANDBOX, Event.REMOVE_POD_SANDBOX)
        self.tell(kind, self.of, None if of_pod else self.made)


@pytest.fixture
def bench() -> Iterator[LostBench]:
    yield LostBench()


@pytest.mark.parametrize("kind", ENDS, ids=lambda kind: kind.name.lower())
async def test_it_holds_its_gpu_until_its_last_process_ends(bench: LostBench, kind: Event) -> None:
    bench.end(kind)
    assert bench.phases() == {ID: "lost"}
    assert "(ended, but its processes live on" in bench.refused(nri.asking("device=0", "second"))
    assert "processes of it live on" in bench.not_started(bench.of, bench.made)
    bench.cgroups.left = 0
    await until("the GPU to come free", lambda: bench.free)


async def test_it_is_free_at_once_where_none_is_left(bench: LostBench) -> None:
    bench.cgroups.left = 0
    bench.end(Event.STOP_CONTAINER)  # and the loop's next turn
    assert bench.free


async def test_one_that_the_runtime_does_not_list_is_lost_and_may_come_back(bench: LostBench) -> None:
    bench.synchronize([bench.of], [])
    assert bench.phases() == {ID: "lost"}
    bench.synchronize([bench.of], [nri.running(bench.made, pid=0)])  # its shim does not answer
    assert bench.phases() == {ID: "lost"}
    bench.synchronize([bench.of], [bench.made])
    assert bench.phases() == {ID: "running"}
    assert not bench.plugin.processes.described()


def test_a_list_asks_for_the_processes_of_those_alone_that_hold_something(bench: LostBench) -> None:
    bench.cgroups.asked.clear()
    other = nri.pod("other")
    bench.synchronize([bench.of, other], [bench.made, nri.running(nri.container(other))])
    assert bench.cgroups.asked == [ID]


@pytest.mark.parametrize(
    ("kind", "file", "populated", "empty"),
    [("cgroup", "cgroup.procs", "100\n", ""), ("cgroup2", EVENTS, "populated 1\n", "populated 0\n")],
)
async def test_one_that_the_version_before_knew_is_looked_for_by_its_name(
    tmp_path: Path, kind: str, file: str, populated: str, empty: str
) -> None:
    """Its ledger.json names no processes. That v1's hierarchies tell is known once the runtime has connected."""
    (tmp_path / ID).mkdir()
    (tmp_path / ID / file).write_text(populated)
    bench = LostBench(ContainerCgroups([Mounted("0:1", "/", str(tmp_path), kind, frozenset({DEVICES}))]))
    assert not bench.plugin.ledger.processes
    bench.plugin.same_pids = True
    bench.synchronize([bench.of], [])
    assert bench.phases() == {ID: "lost"}
    (tmp_path / ID / file).write_text(empty)
    await until("the GPU to come free", lambda: bench.free)


@pytest.mark.parametrize("known_by", ["ledger.json", "journal"])
async def test_one_that_started_while_no_daemon_ran_and_is_not_listed_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_by: str
) -> None:
    """The last daemon knew it as created; then it was paused and its runtime restarted, or its shim was killed."""
    (tmp_path / ID).mkdir()
    (tmp_path / ID / EVENTS).write_text("populated 1\n")
    bench = Bench(cgroups=ContainerCgroups([Mounted("0:1", "/", str(tmp_path), "cgroup2", frozenset())]))
    bench.granted("device=0", "first")
    if known_by == "journal":
        remembered = Remembered(bench.plugin.ledger.entries[ContainerId(ID)].grant, bench.clock())
        bench.state.ledger = Ledger()
        monkeypatch.setattr(NoRecorder, "remembered", lambda *_: [remembered])
    bench.synchronize()
    assert "gpu-busy" in bench.refused(nri.asking("device=0", "second"))  # nobody has looked yet
    await until("its cgroup to be found", lambda: ContainerId(ID) in bench.plugin.ledger.processes)
    bench.clock.now += 100.0  # its runtime may be creating it for a while, and calls it nowhere ended
    await until("it to be lost", lambda: bench.phases() == {ID: "lost"})
    assert "(ended, but its processes live on" in bench.refused(nri.asking("device=0", "second"))
    (tmp_path / ID / EVENTS).write_text("populated 0\n")
    await until("the GPU to come free", lambda: not bench.plugin.ledger.usage())


async def test_the_next_attempt_ends_no_unlisted_one_that_has_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the journal knows that one, and its runtime may be creating it for all that it tells."""
    (tmp_path / ID).mkdir()
    (tmp_path / ID / EVENTS).write_text("populated 1\n")
    bench = Bench(cgroups=ContainerCgroups([Mounted("0:1", "/", str(tmp_path), "cgroup2", frozenset())]))
    of, _ = bench.granted("device=0", "first")
    remembered = Remembered(bench.plugin.ledger.entries[ContainerId(ID)].grant, bench.clock())
    monkeypatch.setattr(NoRecorder, "remembered", lambda *_: [remembered])
    bench.synchronize()
    await until("its cgroup to be found", lambda: ContainerId(ID) in bench.plugin.ledger.processes)
    again = nri.container(of, id="again")
    bench.create(of, again)
    bench.tell(Event.REMOVE_CONTAINER, of, again)
    assert "gpu-busy" in bench.refused(nri.asking("device=0", "second"))


async def test_one_that_is_looked_for_and_listed_again_is_what_the_list_says(tmp_path: Path) -> None:
    """A list that lacked it was too early, and the runtime still has to start it: the walk ends it no more."""
    bench = Bench(cgroups=ContainerCgroups([Mounted("0:1", "/", str(tmp_path), "cgroup2", frozenset())]))
    of, made = bench.granted("device=0", "first")
    bench.synchronize()
    assert bench.phases() == {ID: "lost"}
    bench.synchronize([of], [nri.created(made)])
    assert bench.phases() == {ID: "created"}
    await until("the walk to be over", lambda: not bench.plugin.ledger.unsought)
    assert bench.phases() == {ID: "created"}


@pytest.mark.parametrize("outer", ["listed", "lost"])
async def test_no_container_tells_of_another_by_the_name_of_a_cgroup_below_its_own(tmp_path: Path, outer: str) -> None:
    """Whether it holds a GPU itself and is lost, or asks for nothing and is listed."""
    other = nri.pod("other") if outer == "listed" else nri.asking("device=1", "other")
    nested = tmp_path / "container-other-main" / ID
    nested.mkdir(parents=True)
    for each in (nested, nested.parent):
        (each / EVENTS).write_text("populated 1\n")
    bench = Bench(cgroups=ContainerCgroups([Mounted("0:1", "/", str(tmp_path), "cgroup2", frozenset())]))
    bench.granted("device=0", "first")
    made = nri.container(other)
    reply = bench.create(other, made)
    listed = [nri.running(nri.adjusted(made, reply), pid=0)] if outer == "listed" else []
    bench.synchronize([other], listed)
    await until("the walk to be over", lambda: not bench.plugin.ledger.unsought)
    assert ID not in bench.plugin.ledger.processes


async def test_an_operator_hears_of_it_and_after_a_minute_no_pod_is_sent_there(bench: LostBench) -> None:
    with Log() as log:
        bench.end(Event.STOP_CONTAINER)
        bench.plugin.processes.look()
        assert not log.said(STILL_RUNS)
        bench.clock.now += WARNED_AFTER_S
        await until("the warning", lambda: bool(log.said(STILL_RUNS)))
        fields = log.one(STILL_RUNS).fields
        assert (fields["pod_name"], fields["pids"]) == ("first", "100,101")
        assert not bench.plugin.ledger.stuck
        bench.clock.now += STUCK_AFTER_S
        await until("the GPU to be stuck", lambda: bool(bench.plugin.ledger.stuck))
        bench.synchronize([bench.of], [])
        assert bench.plugin.ledger.stuck
        bench.cgroups.left = 0
        await until("the GPU to come free", lambda: bench.free)
        assert not bench.plugin.ledger.stuck


@pytest.mark.parametrize(("kind", "lapses"), [(Event.STOP_CONTAINER, False), (Event.STOP_POD_SANDBOX, True)])
async def test_what_the_kubelet_allocated_stays_its_pods_then(bench: LostBench, kind: Event, *, lapses: bool) -> None:
    """For as long as the pod's sandbox is there; where it went first, for a while."""
    device = AllocatedDevice("nvidia.com/gpu", bench.node.gpus[0].uuid)
    bench.plugin.apply(AllocationKnown(0.0, ContainerId(bench.made.id), Allocated((device,))))
    bench.end(kind)
    assert not bench.plugin.ledger.reservations
    bench.cgroups.left = 0
    await until("the container to be gone", lambda: not bench.phases())
    assert (bench.plugin.ledger.reservations[device].until is not None) is lapses


async def test_what_its_next_attempt_has_is_not_kept_for_the_pod_again(bench: LostBench) -> None:
    device = AllocatedDevice("nvidia.com/gpu", bench.node.gpus[0].uuid)
    following = nri.container(bench.of)
    following.id = "next"
    bench.end(Event.STOP_CONTAINER)
    bench.tell(Event.START_CONTAINER, bench.of, nri.adjusted(following, bench.create(bench.of, following)))
    for container in (bench.made, following):
        bench.plugin.apply(AllocationKnown(0.0, ContainerId(container.id), Allocated((device,))))
    bench.cgroups.left = 0
    await until("the first to be gone", lambda: bench.phases() == {"next": "running"})
    assert not bench.plugin.ledger.reservations


# --- the next attempt -------------------------------------------------------------------------------------------------


def attempt(bench: Bench, number: int) -> frozenset[GpuUuid]:
    """Create and start that attempt at a container that asks for any GPU. Returns what is held then.

    This is CRI-O's order at a plugin, for a container that exits by itself (server/container_create.go,
    container_start.go, container_stop.go of its 1.37).
    """
    of = nri.asking("1", "first")
    made: pb.Container = nri.container(of)
    made.id = f"attempt-{number}"
    bench.tell(Event.START_CONTAINER, of, nri.running(nri.adjusted(made, bench.create(of, made))))
    return frozenset(bench.plugin.ledger.usage())


@pytest.mark.parametrize(("runtime", "held"), [("cri-o", 1), ("containerd", 4)])
def test_one_that_exited_holds_nothing_once_the_next_is_created(runtime: str, held: int) -> None:
    bench = Bench()
    bench.plugin.runtime = runtime
    assert [len(attempt(bench, number)) for number in range(4)][-1] == held


async def test_one_whose_processes_live_on_keeps_its_gpu_for_the_next() -> None:
    bench = Bench(cgroups=Cgroups())
    bench.plugin.runtime = "cri-o"
    assert attempt(bench, 1) == attempt(bench, 2)
    assert bench.phases() == {"attempt-1": "lost", "attempt-2": "running"}
