"""Where a refused start is not heeded, as on CRI-O, a grant that was never started holds as its cgroup says."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from nri_gpu.domain.container import Cgroup, ContainerId, FirstProcess
from nri_gpu.nri.subscription import Event
from nri_gpu.policy.model import LedgerSettings, Policy
from nri_gpu.system.cgroups import EVENTS, UNIFIED, ContainerCgroups, Mounted
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import Bench
from tests.support.scripted_runtime import until

ID = "container-first-main"
GRACE_S = 1
UNSEEN = "container never started and its cgroup is not seen: it keeps its GPUs until it is removed"


class LookedFor(ContainerCgroups):
    """One for each container. left: how many processes are in it."""

    visible = True
    left = 1
    walks = 0

    @property
    def seen(self) -> bool:
        return self.visible

    def named(self, container_ids: Set[ContainerId], known: Set[ContainerId]) -> Mapping[ContainerId, FirstProcess]:
        self.walks += 1
        return {each: FirstProcess(0, 0, Cgroup(UNIFIED, f"/crio-{each}.scope")) for each in container_ids if self.left}

    def lives(self, process: FirstProcess) -> bool:
        return self.left > 0

    def pids(self, process: FirstProcess, most: int) -> tuple[int, ...]:
        return (100,) * self.left


class UnstartedBench(Bench):
    """A plugin with a container that was granted GPU 0 and never started, and whose grace is over."""

    def __init__(self, runtime: str = "cri-o", cgroups: ContainerCgroups | None = None, grace_s: int = GRACE_S) -> None:
        self.cgroups = LookedFor()
        super().__init__(Policy(ledger=LedgerSettings(created_grace_s=grace_s)), cgroups=cgroups or self.cgroups)
        self.plugin.runtime = runtime
        self.of = nri.asking("device=0", "first")
        self.create(self.of)
        self.clock.now += GRACE_S + 0.1

    def ask_again(self) -> str:
        """How another pod is refused that GPU; empty where it is not."""
        reply = self.ask(nri.asking("device=0", "second"))
        return getattr(reply, "message", "")


def known(bench: Bench) -> bool:
    return ContainerId(ID) in bench.plugin.ledger.processes


async def test_it_holds_its_gpu_while_its_cgroup_has_processes_and_no_longer() -> None:
    bench = UnstartedBench()
    assert "gpu-busy" in bench.ask_again()  # nobody has looked yet
    await until("its cgroup to be known", lambda: known(bench))
    assert "gpu-busy" in bench.ask_again()
    assert bench.phases() == {ID: "created"}
    bench.cgroups.left = 0
    await until("its grant to lapse", lambda: bench.phases() == {ID: "lapsed"})
    assert bench.ask_again() == ""


async def test_a_look_comes_by_itself_and_finds_its_cgroup_before_its_grace_is_over() -> None:
    bench = UnstartedBench(grace_s=100 * GRACE_S)
    await until("its cgroup to be known", lambda: known(bench))
    bench.cgroups.left, walks = 0, bench.cgroups.walks
    await until("another walk", lambda: bench.cgroups.walks > walks)
    assert bench.phases() == {ID: "created"}


async def test_a_cgroup_of_its_name_that_comes_later_holds_it_too(tmp_path: Path) -> None:
    """Such as its own, where a container of another runtime had made one of its name."""
    bench = UnstartedBench(cgroups=ContainerCgroups([Mounted("0:1", "/", str(tmp_path), "cgroup2", frozenset())]))
    bench.clock.now -= GRACE_S
    foreign, own = (tmp_path / where / f"crio-{ID}.scope" for where in ("foreign", "kubepods"))
    foreign.mkdir(parents=True)
    (foreign / EVENTS).write_text("populated 1\n")
    await until("its cgroup to be known", lambda: known(bench))
    own.mkdir(parents=True)
    (own / EVENTS).write_text("populated 1\n")
    (foreign / EVENTS).write_text("populated 0\n")
    bench.clock.now += GRACE_S
    cgroup = Cgroup(UNIFIED, f"/kubepods/crio-{ID}.scope")
    await until("its own to be known", lambda: bench.plugin.ledger.processes[ContainerId(ID)].cgroup == cgroup)
    assert bench.phases() == {ID: "created"}


async def test_one_whose_next_attempt_is_made_holds_it_until_its_cgroup_is_empty() -> None:
    bench = UnstartedBench()
    await until("its cgroup to be known", lambda: known(bench))
    anew = nri.container(bench.of)
    anew.id = "again"
    bench.create(bench.of, anew)
    assert bench.phases() == {ID: "lost", "again": "created"}


async def test_where_no_cgroup_is_seen_it_holds_it_until_it_is_removed() -> None:
    bench = UnstartedBench()
    bench.cgroups.visible = False
    with Log() as log:
        for _ in range(2):
            bench.plugin.processes.look()
        assert "gpu-busy" in bench.ask_again()
        assert log.one(UNSEEN).fields["pod_name"] == "first"
    bench.tell(Event.REMOVE_CONTAINER, bench.of, nri.container(bench.of))
    assert bench.ask_again() == ""


def test_where_a_refused_start_is_heeded_it_lapses_as_its_grace_is_over() -> None:
    assert UnstartedBench("containerd").ask_again() == ""
