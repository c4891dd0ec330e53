"""The keeper of health: what is heard and seen becomes what is published, said, kept, and done about containers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from loguru import logger
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Entry, Ledger, Phase
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import Inventory
from nri_gpu.domain.health import EventType, GpuEvent, ScriptedEvent, Sign, State
from nri_gpu.health.fleet import Moment
from nri_gpu.policy.health import Events, OnBad
from nri_gpu.policy.model import Policy
from nri_gpu.verbs import health_keeper as module
from nri_gpu.verbs.health_keeper import HealthKeeper, HealthPlace, Needs
from tests.support.builders import container
from tests.support.health import UUIDS, at, look, xid


class Listening:
    """Who waits for events, as far as the keeper tells."""

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
    """What the keeper needs, and what it did with it."""

    def __init__(self, folder: Path, policy: Policy | None = None) -> None:
        self.policy = policy or Policy.default()
        self.ledger = Ledger()
        self.published: list[Inventory] = []
        self.looks = 0
        self.looked = asyncio.Event()
        self.now = at(1000)
        self.lines: list[str] = []
        place = HealthPlace(driver_root="/", library_dirs=(), file=folder / "health.json", simulated=True)
        needs = Needs(
            policy=lambda: self.policy, ledger=lambda: self.ledger, publish=self.published.append, look=self._look
        )
        self.listening = Listening()
        self.keeper = HealthKeeper(place, needs, self._moment, lambda _: self.listening)

    def _look(self) -> None:
        self.looks += 1
        self.looked.set()

    def _moment(self) -> Moment:
        return self.now

    def later(self, seconds: float) -> None:
        self.now = at(self.now.clock_s + seconds)

    def hold(self, gpu: int) -> None:
        grant = Grant.to(container(), (UUIDS[gpu],), Mode.EXCLUSIVE, "-")
        self.ledger = self.ledger.with_entry(Entry(grant, Phase.RUNNING, 0))


def in_loop(test: Callable[[], None]) -> list[str]:
    """Runs it, and returns what was logged."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="INFO", format="{level} {message} {extra}")

    async def run() -> None:
        test()
        await asyncio.sleep(0)

    try:
        asyncio.run(run())
    finally:
        logger.remove(sink)
    return lines


def test_an_event_holds_at_once_and_is_said_once(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)

    def test() -> None:
        daemon.keeper.judged(look((), ()))
        for _ in range(3):
            daemon.keeper.heard(xid(79, gpu=1))

    lines = in_loop(test)
    assert [[bool(gpu.unavailable) for gpu in each.gpus] for each in daemon.published] == [[False, True]]
    assert sum("gpu health changed" in line for line in lines) == 1
    assert "'index': 1" in next(line for line in lines if "gpu health changed" in line)


def test_it_comes_back_by_looks_alone(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)

    def test() -> None:
        daemon.keeper.judged(look(()))
        daemon.keeper.heard(xid(79))
        for pause_s, state in ((31, State.RECOVERING), (200, State.RECOVERING), (70, State.HEALTHY)):
            daemon.later(pause_s)
            assert daemon.keeper.judged(look(())).gpus[0].health.state is state

    in_loop(test)


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    def test() -> None:
        before = Daemon(tmp_path)
        before.keeper.judged(look((), ()))
        before.keeper.heard(xid(79, gpu=1))
        after = Daemon(tmp_path).keeper.judged(look((), ()))
        assert [gpu.health.state for gpu in after.gpus] == [State.HEALTHY, State.BAD]

    in_loop(test)


def test_a_file_of_rubbish_is_said_and_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "health.json").write_text('{"records": 7}')

    def test() -> None:
        assert Daemon(tmp_path).keeper.judged(look(())).gpus[0].health.state is State.HEALTHY

    assert any("health of before is not known" in line for line in in_loop(test))


def test_containers_on_a_bad_gpu_are_reported(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.hold(1)

    def test() -> None:
        daemon.keeper.judged(look((), ()))
        daemon.keeper.heard(xid(79, gpu=0))
        daemon.keeper.heard(xid(79, gpu=1))

    assert sum("container is on a bad gpu" in line for line in in_loop(test)) == 1


@pytest.mark.parametrize("sign", [None, Sign.LOST])
def test_or_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: Sign | None) -> None:
    health = replace(Policy.default().health, containers=OnBad.STOP)
    daemon = Daemon(tmp_path, replace(Policy.default(), health=health))
    daemon.hold(1)
    stopped: list[tuple[list[str], str]] = []

    async def stop(names: dict[str, str], settings: object, why: str) -> None:
        del settings
        stopped.append((list(names), why))

    monkeypatch.setattr(module, "stop_containers", stop)

    def test() -> None:
        daemon.keeper.judged(look((), ()))
        if sign:
            daemon.keeper.judged(look((), (sign,)))
        else:
            daemon.keeper.heard(xid(79, gpu=1))

    in_loop(test)
    assert stopped == [
        (
            list(daemon.ledger.entries),
            f"its GPU is bad: {'GPU is lost' if sign else 'XID 79, GPU has fallen off the bus'}",
        )
    ]


class Skipping(asyncio.SelectorEventLoop):
    """A loop whose time goes on when the test says so, too."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def play(daemon: Daemon, *scripts: tuple[ScriptedEvent, ...]) -> list[tuple[str, int, int]]:
    """What is heard when looks show these, 10 s apart."""
    heard: list[tuple[str, int, int]] = []
    hear = daemon.keeper.heard

    def overheard(event: GpuEvent) -> None:
        heard.append((event.uuid, event.kind, event.xid))
        hear(event)

    daemon.keeper.heard = overheard  # type: ignore[method-assign] # the keeper is its own audience

    async def run() -> None:
        for script in scripts:
            daemon.keeper.judged(replace(look((), ()), script=script))
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
        [State.HEALTHY, State.BAD],
        [State.SUSPECT, State.BAD],
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
    monkeypatch.setattr(module, "LOOKS_APART_S", 0.0)
    daemon = Daemon(tmp_path)

    async def run() -> None:
        daemon.keeper.judged(look(()))
        for _ in range(1000):
            daemon.keeper.heard(event)
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
        task = asyncio.create_task(daemon.keeper.run())
        daemon.keeper.judged(look((), ()))
        await daemon.listening.until(idle)
        daemon.hold(1)
        daemon.keeper.held_changed()
        await daemon.listening.until(held)
        daemon.ledger = Ledger()
        daemon.keeper.held_changed()
        await daemon.listening.until(idle)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_looks_are_more_frequent_while_one_is_not_well(tmp_path: Path) -> None:
    health = replace(Policy.default().health, reprobe_s=0)
    daemon = Daemon(tmp_path, replace(Policy.default(), health=health))

    async def run() -> None:
        task = asyncio.create_task(daemon.keeper.run())
        daemon.keeper.judged(look(()))
        for _ in range(5):
            await asyncio.sleep(0)
        assert daemon.looks == 0
        daemon.keeper.judged(look((Sign.LOST,)))
        async with asyncio.timeout(10):
            await daemon.looked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
