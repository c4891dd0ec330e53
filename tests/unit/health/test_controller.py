"""The controller of health: what is heard and seen becomes what is published, said, kept, and done about containers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import permutations
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Entry, GrantPhase, Ledger
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.health import EventType, GpuEvent, HealthState, ScriptedEvent, Sign
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.health import controller as module
from nri_gpu.health import stops as health_stops
from nri_gpu.health.controller import HealthController, HealthDependencies, HealthPlace
from nri_gpu.health.node_health import Moment
from nri_gpu.policy.health import Events, OnBad
from nri_gpu.policy.model import Policy
from tests.support.builders import container
from tests.support.health import PARTS, UUIDS, at, look, with_parts, xid
from tests.support.log import Log, hearing
from tests.support.scripted_runtime import until


class Listening:
    """Who waits for events, as far as the controller tells."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.news = asyncio.Event()

    def listen(self, bus_ids: frozenset[str]) -> None:
        self.told.append(sorted(bus_ids))
        self.news.set()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def until(self, bus_ids: list[str]) -> None:
        async with asyncio.timeout(10):
            while not self.told or self.told[-1] != bus_ids:
                self.news.clear()
                await self.news.wait()


class Daemon:
    """What the controller needs, and what it did with it."""

    def __init__(self, folder: Path, policy: Policy | None = None) -> None:
        self.policy = policy or Policy.default()
        self.ledger: Ledger | None = Ledger()
        self.published: list[Inventory] = []
        self.looks = 0
        self.looked = asyncio.Event()
        self.now = at(1000)
        self.lines: list[str] = []
        place = HealthPlace(driver_root="/", library_dirs=(), file=folder / "health.json", simulated=True)
        needs = HealthDependencies(
            policy=lambda: self.policy, ledger=lambda: self.ledger, publish=self.published.append, refresh=self._look
        )
        self.listening = Listening()
        self.controller = HealthController(place, needs, self._moment, lambda _: self.listening)

    def _look(self) -> None:
        self.looks += 1
        self.looked.set()

    def _moment(self) -> Moment:
        return self.now

    def later(self, seconds: float) -> None:
        self.now = at(self.now.clock_s + seconds)

    def hold(self, gpu: int) -> None:
        self.hold_unit(UUIDS[gpu])

    def hold_unit(self, uuid: GpuUuid) -> None:
        grant = Grant.to(container(), (uuid,), Mode.EXCLUSIVE, "-")
        self.ledger = (self.ledger or Ledger()).with_entry(Entry(grant, GrantPhase.RUNNING, 0))
        self.controller.changed()

    def use(self, **health: object) -> None:
        """Policy says so from now on."""
        self.policy = replace(self.policy, health=replace(self.policy.health, **health))
        self.controller.changed()


def holding(daemon: Daemon) -> Iterable[str]:
    """Container ids."""
    assert daemon.ledger
    return daemon.ledger.entries


async def turns() -> None:
    """Long enough for all that waits for nothing."""
    for _ in range(20):
        await asyncio.sleep(0)


def in_loop(test: Callable[[], None], daemon: Daemon | None = None) -> list[str]:
    """Runs it, and returns what was logged. daemon: one whose controller runs."""
    lines: list[str] = []

    async def run() -> None:
        test()
        task = asyncio.create_task(daemon.controller.run() if daemon else asyncio.sleep(0))
        await turns()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with hearing(lambda line: lines.append(str(line)), "INFO"):
        asyncio.run(run())
    return lines


def test_an_event_holds_at_once_and_is_said_once(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)

    def test() -> None:
        daemon.controller.with_health(look((), ()))
        for _ in range(3):
            daemon.controller.take_event(xid(79, gpu=1))

    lines = in_loop(test)
    assert [[bool(gpu.unavailable) for gpu in each.gpus] for each in daemon.published] == [[False, True]]
    assert sum("gpu health changed" in line for line in lines) == 1
    assert "'index': 1" in next(line for line in lines if "gpu health changed" in line)


def test_it_comes_back_by_looks_alone(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)

    def test() -> None:
        daemon.controller.with_health(look(()))
        daemon.controller.take_event(xid(79))
        for pause_s, state in ((31, HealthState.RECOVERING), (200, HealthState.RECOVERING), (70, HealthState.HEALTHY)):
            daemon.later(pause_s)
            assert daemon.controller.with_health(look(())).gpus[0].health.state is state

    in_loop(test)


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    def test() -> None:
        before = Daemon(tmp_path)
        before.controller.with_health(look((), ()))
        before.controller.take_event(xid(79, gpu=1))
        after = Daemon(tmp_path).controller.with_health(look((), ()))
        assert [gpu.health.state for gpu in after.gpus] == [HealthState.HEALTHY, HealthState.BAD]

    in_loop(test)


def test_a_file_of_rubbish_is_said_and_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "health.json").write_text('{"records": 7}')

    def test() -> None:
        assert Daemon(tmp_path).controller.with_health(look(())).gpus[0].health.state is HealthState.HEALTHY

    assert any("saved health not read" in line for line in in_loop(test))


def test_containers_on_a_bad_gpu_are_reported(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.hold(1)

    def test() -> None:
        daemon.controller.with_health(look((), ()))
        daemon.controller.take_event(xid(79, gpu=0))
        daemon.controller.take_event(xid(79, gpu=1))

    assert sum("container is on a bad gpu" in line for line in in_loop(test, daemon)) == 1


class Skipping(asyncio.SelectorEventLoop):
    """A loop whose time goes on when the test says so, too."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def play(daemon: Daemon, *scripts: tuple[ScriptedEvent, ...]) -> list[tuple[str, int, int]]:
    """What is heard when looks show these, 10 s apart."""
    heard: list[tuple[str, int, int]] = []
    hear = daemon.controller.take_event

    def overheard(event: GpuEvent) -> None:
        heard.append((event.uuid, event.kind, event.xid))
        hear(event)

    daemon.controller.take_event = overheard  # type: ignore[method-assign] # the controller is its own audience

    async def run() -> None:
        for script in scripts:
            daemon.controller.with_health(replace(look((), ()), script=script))
            loop.skipped_s += 10
            for _ in range(3):
                await asyncio.sleep(0)

    loop = Skipping()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
    return heard


FALLEN, STORM = ScriptedEvent(0, 1, 79), ScriptedEvent(5, 0, kind=EventType.ECC_STORM)


def test_a_simulated_node_plays_its_script_once(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    heard = play(daemon, (FALLEN, STORM), (FALLEN, STORM))
    assert heard == [(UUIDS[1], EventType.XID, 79), (UUIDS[0], EventType.ECC_STORM, 0)]
    assert [[gpu.health.state for gpu in each.gpus] for each in daemon.published] == [
        [HealthState.HEALTHY, HealthState.BAD],
        [HealthState.SUSPECT, HealthState.BAD],
    ]


def test_and_what_an_edit_adds_but_not_what_it_takes_out(tmp_path: Path) -> None:
    later = ScriptedEvent(15, 1, 62)
    heard = play(Daemon(tmp_path), (later,), (FALLEN, STORM), (FALLEN, STORM, STORM))
    assert [(kind, xid) for _, kind, xid in heard] == [(EventType.XID, 79), *[(EventType.ECC_STORM, 0)] * 2]


@pytest.mark.parametrize(
    ("event", "looks"), [(xid(31), 0), (xid(79), 1), (GpuEvent(UUIDS[0], int(EventType.MIG_CHANGED)), 1)]
)
def test_a_storm_of_events_asks_for_few_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: GpuEvent, looks: int
) -> None:
    monkeypatch.setattr(module, "REFRESHES_APART_S", 0.0)
    daemon = Daemon(tmp_path)

    async def run() -> None:
        daemon.controller.with_health(look(()))
        for _ in range(1000):
            daemon.controller.take_event(event)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert daemon.looks == looks


@pytest.mark.parametrize(
    ("events", "idle", "held"),
    [
        (Events.HELD, [], ["0000:11:00.0"]),
        (Events.ALL, ["0000:10:00.0", "0000:11:00.0"], ["0000:10:00.0", "0000:11:00.0"]),
        (Events.NONE, [], []),
    ],
)
def test_who_is_listened_to(tmp_path: Path, events: Events, idle: list[str], held: list[str]) -> None:
    health = replace(Policy.default().health, events=events)
    daemon = Daemon(tmp_path, replace(Policy.default(), health=health))

    async def run() -> None:
        task = asyncio.create_task(daemon.controller.run())
        daemon.controller.with_health(look((), ()))
        await daemon.listening.until(idle)
        daemon.hold(1)
        daemon.controller.changed()
        await daemon.listening.until(held)
        daemon.ledger = Ledger()
        daemon.controller.changed()
        await daemon.listening.until(idle)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_looks_are_more_frequent_while_one_is_not_well(tmp_path: Path) -> None:
    health = replace(Policy.default().health, reprobe_s=0)
    daemon = Daemon(tmp_path, replace(Policy.default(), health=health))

    async def run() -> None:
        task = asyncio.create_task(daemon.controller.run())
        daemon.controller.with_health(look(()))
        for _ in range(5):
            await asyncio.sleep(0)
        assert daemon.looks == 0
        daemon.controller.with_health(look((Sign.LOST,)))
        async with asyncio.timeout(10):
            await daemon.looked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


# --- containers on what is bad ----------------------------------------------------------------------------------------

LOST = GpuFault(1, "nvmlDeviceGetHandleByIndex: GPU is lost (15)", 15, Sign.LOST)


class Runtime:
    """Stops what it is asked to, or not."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], str]] = []
        self.obeys = True
        self.fails: Exception | None = None

    async def stop(self, names: dict[str, str], settings: object, why: str) -> frozenset[str]:
        del settings
        self.asked.append((list(names), why))
        if self.fails:
            raise self.fails
        return frozenset(names if self.obeys else ())


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(health_stops, "stop_containers", runtime.stop)
    return runtime


def go_bad(daemon: Daemon) -> None:
    daemon.controller.take_event(xid(79, gpu=1))


def get_lost(daemon: Daemon) -> None:
    """It still has a name, and cannot be asked for its MIG devices."""
    shown = look((), (Sign.LOST,))
    mute = replace(shown.gpus[1], unavailable="nvmlDeviceGetName: GPU is lost (15)")
    daemon.controller.with_health(replace(shown, gpus=(shown.gpus[0], mute)))


def get_nameless(daemon: Daemon) -> None:
    daemon.controller.with_health(look((), faults=(LOST,)))


def vanish(daemon: Daemon) -> None:
    daemon.controller.with_health(look(()))


ENDS: dict[Callable[[Daemon], None], str] = {
    go_bad: "XID 79, GPU has fallen off the bus",
    get_lost: "nvmlDeviceGetName: GPU is lost (15)",
    get_nameless: LOST.reason,
    vanish: "GPU is lost: NVML does not list it any more",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("part", [False, True])
async def test_or_stopped(tmp_path: Path, runtime: Runtime, end: Callable[[Daemon], None], part: bool) -> None:
    """Also those that hold a MIG device of a GPU which cannot tell of its MIG devices any more."""
    daemon = Daemon(tmp_path)
    daemon.use(containers=OnBad.STOP)
    daemon.hold_unit(PARTS[0] if part else UUIDS[1])
    async with running(daemon):
        daemon.controller.with_health(with_parts(look((), ()), 1, 0) if part else look((), ()))
        await turns()
        assert runtime.asked == []
        end(daemon)
        await turns()
    assert runtime.asked == [(list(holding(daemon)), f"its GPU is bad: {ENDS[end]}")]


@asynccontextmanager
async def running(daemon: Daemon) -> AsyncIterator[None]:
    task = asyncio.create_task(daemon.controller.run())
    try:
        yield
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def bad(daemon: Daemon) -> None:
    daemon.controller.take_event(xid(79, gpu=1))


def held(daemon: Daemon) -> None:
    daemon.hold(1)


def strict(daemon: Daemon) -> None:
    daemon.use(containers=OnBad.STOP)


@pytest.mark.parametrize(
    "order", [*permutations([bad, held, strict])], ids=lambda order: "-".join(each.__name__ for each in order)
)
async def test_in_whatever_order_it_comes(
    tmp_path: Path, runtime: Runtime, order: tuple[Callable[[Daemon], None], ...]
) -> None:
    """Bad before the runtime tells who holds it, or before policy says stop, or after both."""
    daemon = Daemon(tmp_path)
    async with running(daemon):
        daemon.controller.with_health(look((), ()))
        for step in order:
            await turns()
            assert runtime.asked == []
            step(daemon)
        await turns()
        assert len(runtime.asked) == 1, "without another look"
        daemon.controller.with_health(look((), ()))
        await turns()
    assert [containers for containers, _ in runtime.asked] == [list(holding(daemon))], "once"


async def test_after_a_restart_with_a_gpu_that_was_bad_before(tmp_path: Path, runtime: Runtime) -> None:
    before = Daemon(tmp_path)
    before.controller.with_health(with_parts(look((), ()), 1, 0))
    before.controller.take_event(xid(79, gpu=1))
    daemon = Daemon(tmp_path)
    daemon.use(containers=OnBad.STOP)
    async with running(daemon):
        await turns()
        daemon.hold_unit(PARTS[0])  # Synchronize, and no look yet
        await turns()
        assert len(runtime.asked) == 1


@pytest.mark.parametrize("part", [False, True])
async def test_after_a_restart_with_a_gpu_that_was_lost_meanwhile(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, part: bool
) -> None:
    monkeypatch.setattr(module, "REFRESHES_APART_S", 0.0)
    before = Daemon(tmp_path)
    before.controller.with_health(with_parts(look((), ()), 1, 0) if part else look((), ()))
    daemon = Daemon(tmp_path)
    daemon.ledger = None
    daemon.use(containers=OnBad.STOP)
    async with running(daemon):
        daemon.controller.with_health(look(()))  # before the runtime has told who holds what
        await turns()
        assert runtime.asked == []
        daemon.hold_unit(PARTS[0] if part else UUIDS[1])
        async with asyncio.timeout(10):
            await daemon.looked.wait()
        daemon.controller.with_health(look(()))
        await turns()
        assert len(runtime.asked) == 1


async def test_it_is_not_looked_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG device that was taken away under somebody is no GPU that was lost."""
    monkeypatch.setattr(module, "REFRESHES_APART_S", 0.0)
    daemon = Daemon(tmp_path)
    async with running(daemon):
        daemon.controller.with_health(look((), ()))
        daemon.hold_unit(PARTS[2])
        for _ in range(5):
            await asyncio.sleep(0.01)
            daemon.controller.with_health(look((), ()))
    assert daemon.looks == 1


@pytest.mark.parametrize("fails", [None, OSError("no such program"), TimeoutError()])
async def test_a_stop_that_failed_is_tried_again(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, fails: Exception | None
) -> None:
    monkeypatch.setattr(health_stops, "FIRST_RETRY_S", 0.01)
    runtime.obeys, runtime.fails = False, fails
    daemon = Daemon(tmp_path)
    daemon.use(containers=OnBad.STOP)
    daemon.hold(1)
    async with running(daemon):
        daemon.controller.with_health(look((), ()))
        bad(daemon)
        for _ in range(200):
            daemon.controller.changed()  # whatever happens meanwhile is no reason to hurry
            await asyncio.sleep(0)
        assert len(runtime.asked) <= 2
        await until("more attempts", lambda: len(runtime.asked) >= 4, 10)
        runtime.obeys, runtime.fails = True, None
        asked = len(runtime.asked)
        await until("one more", lambda: len(runtime.asked) > asked, 10)
        await asyncio.sleep(0.2)
        assert len(runtime.asked) == asked + 1


async def test_who_left_is_forgotten_and_who_comes_to_a_recovering_gpu_is_stopped(
    tmp_path: Path, runtime: Runtime
) -> None:
    daemon = Daemon(tmp_path)
    daemon.use(containers=OnBad.STOP)
    daemon.hold(1)
    async with running(daemon):
        daemon.controller.with_health(look((), ()))
        bad(daemon)
        await turns()
        daemon.ledger = Ledger()
        daemon.controller.changed()
        await turns()
        daemon.later(31)
        assert daemon.controller.with_health(look((), ())).gpus[1].health.state is HealthState.RECOVERING
        daemon.hold(1)  # nobody grants it; the runtime told late of one that was there all the while
        await turns()
    assert len(runtime.asked) == 2


async def test_a_container_is_reported_once_for_each_time(tmp_path: Path, log: Log) -> None:
    daemon = Daemon(tmp_path)
    daemon.hold(1)
    async with running(daemon):
        daemon.controller.with_health(look((), ()))
        bad(daemon)
        for _ in range(3):
            await turns()
            daemon.controller.changed()
            daemon.controller.with_health(look((), ()))
        assert len(log.said("container is on a bad gpu")) == 1
        daemon.later(400)
        daemon.controller.with_health(look((), ()))
        daemon.controller.with_health(look((), ()))
        await turns()
        bad(daemon)
        await turns()
        assert len(log.said("container is on a bad gpu")) == 2
