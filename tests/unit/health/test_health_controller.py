"""The health controller: events and refreshes are published, logged and saved, and containers stopped or reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import EventType, GpuEvent, Health, HealthState, RecoveryAction, ScriptedEvent, Sign
from nri_gpu.domain.node import Inventory
from nri_gpu.health.affected import Stops, holders_of
from nri_gpu.health.event_child import EventChild
from nri_gpu.health.gpu_record import CONTAINED_MAX, Moment
from nri_gpu.health.health_controller import HealthController
from nri_gpu.health.node_health import SOON
from nri_gpu.health.xid_log import UNKNOWN_MAX
from nri_gpu.health.xids import xid_name
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.policy.health_settings import Events, OnBad
from nri_gpu.policy.model import Policy
from nri_gpu.system.state import Changed, NodeState
from tests.support.builders import container, entry, ledger, pod, uuid
from tests.support.health import PARTS, UUIDS, at, look, with_parts, xid
from tests.support.log import Log
from tests.support.running import running
from tests.support.scripted_runtime import until

RETRY_S = 0.01


class Listening(EventChild):
    """Who waits for events, as far as the controller tells."""

    starts = 0

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


class Runtime:
    """Stops what it is asked to, or not."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], str]] = []
        self.obeys = True

    async def stop(self, names: Mapping[str, str], settings: object, why: str) -> frozenset[str]:
        del settings
        self.asked.append((list(names), why))
        return frozenset(names if self.obeys else ())


class Daemon:
    """What the controller needs, and what it did with it."""

    def __init__(self, folder: Path, **health: object) -> None:
        """health: settings of the policy."""
        self.node_state = NodeState(Inventory(taken_at=0))
        self.node_state.synchronized = True
        self.published: list[Inventory] = []
        self.looks = 0
        self.looked = asyncio.Event()
        self.now = at(1000)
        self.listening = Listening()
        self.runtime = Runtime()
        self.controller = HealthController(
            Policy.default().driver,
            folder / "health.json",
            self.node_state,
            publish=self.published.append,
            refresh=self._look,
            simulated=True,
            moment=self._moment,
            listener=lambda _: self.listening,
            stops=partial(Stops, stop=self.runtime.stop, first_retry_s=RETRY_S),
            refreshes_apart_s=0.0,
        )
        self.use(**health)
        self.node_state.then(self.controller.changed.set, Changed.POLICY, Changed.LEDGER)

    def _look(self) -> None:
        self.looks += 1
        self.looked.set()

    def _moment(self) -> Moment:
        return self.now

    def later(self, seconds: float) -> None:
        self.now = at(self.now.clock_s + seconds)

    def shows(self, *signs: tuple[Sign, ...]) -> Inventory:
        """A refresh that shows these GPUs; two well ones by default."""
        return self.controller.with_health(look(*(signs or ((), ()))))

    def hold(self, uuid: GpuUuid = UUIDS[1]) -> None:
        self.node_state.synchronized = True
        grant = Grant.to(container(), (uuid,), Mode.EXCLUSIVE, "-")
        self.node_state.commit(self.node_state.ledger.with_entry(Entry(grant, GrantPhase.RUNNING, 0)))

    def use(self, **health: object) -> None:
        """Policy says so from now on."""
        policy = self.node_state.policy
        self.node_state.use(replace(policy, health=replace(policy.health, **health)))


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


async def turns() -> None:
    """Long enough for all that waits for nothing."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_event_counts_at_once_and_is_logged_once(daemon: Daemon, log: Log) -> None:
    daemon.shows()
    for _ in range(3):
        daemon.controller.take_event(xid(79, gpu=1))
    assert [[bool(gpu.unavailable) for gpu in each.gpus] for each in daemon.published] == [[False, True]]
    assert log.one("GPU health changed").fields["index"] == 1


async def test_a_restart_forgets_nothing(tmp_path: Path, log: Log) -> None:
    before = Daemon(tmp_path)
    before.controller.with_health(look((), ()))
    before.controller.take_event(xid(79, gpu=1))
    after = Daemon(tmp_path).controller.with_health(look((), ()))
    assert [gpu.health.state for gpu in after.gpus] == [HealthState.HEALTHY, HealthState.BAD]
    (tmp_path / "health.json").write_text('{"records": 7}')
    assert Daemon(tmp_path).controller.with_health(look(())).gpus[0].health.state is HealthState.HEALTHY
    assert log.one("saved health not read")


async def test_an_earlier_inventory_frees_nobody_whom_either_knows_as_bad(tmp_path: Path) -> None:
    """A snapshot lags behind; the file may be lost, torn, edited, or one of before."""
    file, before = tmp_path / "health.json", Daemon(tmp_path)
    well, of_before = before.shows(), file.read_bytes()
    before.controller.take_event(xid(79, gpu=1))
    (bad,) = before.published
    known = file.read_bytes()
    lie = known.replace(b'"state":"bad"', b'"state":"healthy"')
    for inventory, content in ((well, known), *((bad, each) for each in (known, b"", known[:-9], of_before, lie))):
        file.write_bytes(content)
        after = Daemon(tmp_path)
        recalled = after.controller.recalled(inventory)
        assert [each.unavailable for each in recalled.gpus] == [each.unavailable for each in bad.gpus]
        assert recalled.gpus[1].health == bad.gpus[1].health
        assert after.shows().gpus[1].health == bad.gpus[1].health  # nor does an answer free it at once


async def test_nor_is_a_gpu_offered_again_that_waits_for_its_reset(tmp_path: Path) -> None:
    before = Daemon(tmp_path)
    well = before.shows((Sign.REMAP_PENDING,), ())
    for _ in range(CONTAINED_MAX):
        before.later(Policy.default().health.reprobe_s)
        before.controller.take_event(xid(94))
    after = Daemon(tmp_path)
    after.node_state.synchronized = False
    assert [each.unavailable for each in after.controller.recalled(well).gpus] == [SOON, ""]


FALLEN, ECC = ScriptedEvent(0, 1, 79), ScriptedEvent(0.02, 0, kind=EventType.ECC_STORM)


async def play(daemon: Daemon, log: Log, script: tuple[ScriptedEvent, ...], events: int) -> list[tuple[str, int]]:
    """A refresh that shows this script. Returns the UUID and XID of all events, so many, some time later."""
    daemon.controller.with_health(replace(look((), ()), script=script))
    await until(f"{events} events", lambda: len(log.said("GPU event")) >= events)
    await asyncio.sleep(0.1)
    return [(line.fields["gpu_uuid"], line.fields["xid"]) for line in log.said("GPU event")]


async def test_a_simulated_node_plays_its_events_once_and_those_that_an_edit_adds(daemon: Daemon, log: Log) -> None:
    daemon.controller.with_health(replace(look((), ()), script=(ScriptedEvent(0.05, 1, 62),)))  # edited away in time
    played = [(UUIDS[1], 79), (UUIDS[0], 0)]
    assert await play(daemon, log, (FALLEN, ECC), 2) == played
    assert [[gpu.health.state for gpu in each.gpus] for each in daemon.published] == [
        [HealthState.HEALTHY, HealthState.BAD],
        [HealthState.SUSPECT, HealthState.BAD],
    ]
    assert await play(daemon, log, (FALLEN, ECC), 2) == played
    assert await play(daemon, log, (FALLEN, ECC, ECC), 3) == [*played, (UUIDS[0], 0)]


@pytest.mark.parametrize(
    ("event", "looks"), [(xid(31), 0), (xid(79), 1), (GpuEvent(UUIDS[0], int(EventType.MIG_CHANGED)), 1)]
)
async def test_many_events_cause_few_refreshes(daemon: Daemon, event: GpuEvent, looks: int) -> None:
    daemon.shows(())
    for _ in range(1000):
        daemon.controller.take_event(event)
    await asyncio.sleep(0.01)
    assert daemon.looks == looks


@pytest.mark.parametrize(
    ("events", "idle", "held"),
    [
        (Events.HELD, [], ["0000:11:00.0"]),
        (Events.ALL, ["0000:10:00.0", "0000:11:00.0"], ["0000:10:00.0", "0000:11:00.0"]),
        (Events.NONE, [], []),
    ],
)
async def test_gpus_that_are_listened_to(tmp_path: Path, events: Events, idle: list[str], held: list[str]) -> None:
    daemon = Daemon(tmp_path, events=events)
    async with running(daemon.controller.run()):
        daemon.shows()
        await daemon.listening.until(idle)
        daemon.hold()
        await daemon.listening.until(held)
        daemon.node_state.commit(Ledger())
        await daemon.listening.until(idle)


async def test_refreshes_are_more_frequent_while_a_gpu_is_unhealthy(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, reprobe_s=0)
    async with running(daemon.controller.run()):
        daemon.shows(())
        for _ in range(5):
            await asyncio.sleep(0)
        assert daemon.looks == 0
        daemon.shows((Sign.LOST,))
        async with asyncio.timeout(10):
            await daemon.looked.wait()


# --- containers on what is bad ----------------------------------------------------------------------------------------


def bad(daemon: Daemon) -> None:
    daemon.controller.take_event(xid(79, gpu=1))


STEPS: dict[str, Callable[[Daemon], None]] = {
    "bad": bad,
    "held": Daemon.hold,
    "strict": partial(Daemon.use, containers=OnBad.STOP),
}


@pytest.mark.parametrize("order", list(permutations(STEPS)), ids="-".join)
async def test_containers_are_stopped_in_any_order_of_causes(daemon: Daemon, order: Sequence[str]) -> None:
    """Bad before the runtime tells who holds it, or before policy says stop, or after both."""
    async with running(daemon.controller.run()):
        daemon.shows()
        for step in order:
            await turns()
            assert daemon.runtime.asked == []
            STEPS[step](daemon)
        await turns()
        assert len(daemon.runtime.asked) == 1, "without another look"
        daemon.shows()
        await turns()
    assert [containers for containers, _ in daemon.runtime.asked] == [list(daemon.node_state.ledger.entries)], "once"


async def test_after_a_restart_with_a_gpu_that_was_bad_before(tmp_path: Path) -> None:
    before = Daemon(tmp_path)
    before.controller.with_health(with_parts(look((), ()), 1, 0))
    before.controller.take_event(xid(79, gpu=1))
    daemon = Daemon(tmp_path, containers=OnBad.STOP)
    async with running(daemon.controller.run()):
        await turns()
        daemon.hold(PARTS[0])  # Synchronize, and no look yet
        await turns()
        assert len(daemon.runtime.asked) == 1


async def test_a_mig_device_that_is_missing_causes_one_refresh(daemon: Daemon) -> None:
    """A held MIG device that was removed is no GPU that was lost."""
    async with running(daemon.controller.run()):
        daemon.shows()
        daemon.hold(PARTS[2])
        for _ in range(5):
            await asyncio.sleep(0.01)
            daemon.shows()
    assert daemon.looks == 1


async def test_a_stop_that_failed_is_tried_again(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, containers=OnBad.STOP)
    daemon.runtime.obeys = False
    daemon.hold()
    async with running(daemon.controller.run()):
        daemon.shows()
        bad(daemon)
        began = asyncio.get_running_loop().time()
        for _ in range(200):
            daemon.controller.changed.set()  # whatever happens meanwhile is no reason to hurry
            await asyncio.sleep(0)
        assert RETRY_S * (2 ** (len(daemon.runtime.asked) - 2) - 1) <= asyncio.get_running_loop().time() - began
        await until("more attempts", lambda: len(daemon.runtime.asked) >= 4, 10)
        daemon.runtime.obeys = True
        asked = len(daemon.runtime.asked)
        await until("one more", lambda: len(daemon.runtime.asked) > asked, 10)
        await asyncio.sleep(0.2)
        assert len(daemon.runtime.asked) == asked + 1


async def test_a_container_that_appears_on_a_recovering_gpu_is_stopped(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, containers=OnBad.STOP, fatal_xids=frozenset({79}))
    daemon.hold()
    async with running(daemon.controller.run()):
        daemon.shows()
        bad(daemon)
        await turns()
        daemon.node_state.commit(Ledger())
        await turns()
        daemon.later(31)
        assert daemon.shows().gpus[1].health.state is HealthState.RECOVERING
        daemon.hold()  # it is not granted; the runtime reports late one that was there all the time
        await turns()
    assert len(daemon.runtime.asked) == 2


async def test_a_container_is_reported_once_for_each_loss(daemon: Daemon, log: Log) -> None:
    daemon.use(fatal_xids=frozenset({79}))
    daemon.hold()
    async with running(daemon.controller.run()):
        daemon.shows()
        bad(daemon)
        for _ in range(3):
            await turns()
            daemon.controller.changed.set()
            daemon.shows()
        assert len(log.said("container holds an unhealthy GPU")) == 1
        daemon.later(400)
        daemon.shows()
        daemon.shows()
        await turns()
        bad(daemon)
        await turns()
        assert len(log.said("container holds an unhealthy GPU")) == 2


# --- XIDs -------------------------------------------------------------------------------------------------------------


def answering(action: RecoveryAction | None = RecoveryAction.NONE) -> Inventory:
    """Two well GPUs of a driver with recovery actions."""
    shown = look((), ())
    return replace(shown, gpus=tuple(replace(gpu, recovery_action=action) for gpu in shown.gpus))


@pytest.mark.parametrize("number", [69, 46, 145, 999])
async def test_a_flood_is_counted_and_holds_nothing_up(daemon: Daemon, log: Log, number: int) -> None:
    """10,000 a second."""
    daemon.controller.with_health(answering(None))
    began = time.process_time()
    for _ in range(10_000):
        daemon.controller.take_event(xid(number))
    assert time.process_time() - began < 5
    assert sum(daemon.controller.xids.counts.values()) == 10_000
    assert len([line for line in log.lines if line.level != "DEBUG"]) <= 3
    assert len(daemon.published) <= 1
    assert daemon.controller.notes()[UUIDS[0]].xid == xid_name(number)


@pytest.mark.parametrize(("action", "looks"), [(RecoveryAction.NONE, 1), (None, 0)])
async def test_the_driver_is_asked_for_its_recovery_action(
    daemon: Daemon, action: RecoveryAction | None, looks: int
) -> None:
    """Also after an XID that changes nothing, though not for each, if the driver has one."""
    daemon.use(reprobe_s=3600)
    daemon.controller.with_health(answering(action))
    for _ in range(1000):
        daemon.controller.take_event(xid(13))
    await asyncio.sleep(0.01)
    assert daemon.looks == looks


async def test_what_came_while_the_driver_was_asked_is_asked_about_later(daemon: Daemon) -> None:
    daemon.use(reprobe_s=0)
    daemon.controller.with_health(answering())
    for _ in range(2):
        daemon.controller.take_event(xid(13))
        await asyncio.sleep(0.01)
    assert daemon.looks == 2


async def test_a_check_that_began_before_the_event_answers_nothing(daemon: Daemon) -> None:
    daemon.controller.with_health(answering())
    daemon.controller.take_event(xid(46))
    before, after = daemon.now.clock_s - 1, daemon.now.clock_s + 1
    daemon.later(2)
    assert daemon.controller.with_health(answering(), before).gpus[0].health.state is HealthState.BAD
    assert daemon.controller.with_health(answering(), after).gpus[0].health.state is HealthState.HEALTHY


async def test_numbers_that_the_catalogue_lacks_are_logged_once_each(daemon: Daemon, log: Log) -> None:
    daemon.shows()
    for number in [173, 173, 0, 2**31, *range(1000, 2000)] * 2:
        daemon.controller.take_event(xid(number))
    found = [line.fields["xid"] for line in log.said("XID is not in the catalogue")]
    assert found[:3] == [173, 0, 2**31]
    assert len(found) == len(set(found)) == UNKNOWN_MAX


async def test_applications_of_three_namespaces_fail_on_one_gpu(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.shows()
    for namespace in ("ml", "ml", "web", "dev"):
        assert daemon.controller.notes()[UUIDS[1]].namespaces == ()
        grant = Grant.to(container(of=pod(namespace, namespace=namespace)), (UUIDS[1],), Mode.EXCLUSIVE, "-")
        daemon.node_state.commit(Ledger().with_entry(Entry(grant, GrantPhase.RUNNING, 0)))
        daemon.controller.take_event(xid(69, gpu=1))
    for each in (daemon, Daemon(tmp_path)):  # and after a restart
        each.shows()
        assert each.controller.notes()[UUIDS[1]].namespaces == ("dev", "ml", "web")
        assert each.controller.notes()[UUIDS[0]].namespaces == ()
    daemon.later(86_400)
    assert daemon.controller.notes()[UUIDS[1]].namespaces == ()


@pytest.mark.parametrize("word", [UUIDS[1], "1", "0000:11:00.0", "00000000:11:00.0"])
async def test_roots_word_that_a_gpu_was_reset(tmp_path: Path, word: str) -> None:
    Daemon(tmp_path).shows()
    before = Daemon(tmp_path)
    before.shows()
    before.controller.take_event(xid(95, gpu=1))
    daemon = Daemon(tmp_path)  # a restart forgets no reset
    for _ in range(3):
        daemon.later(1000)
        assert daemon.shows().gpus[1].health.state is HealthState.BAD
    assert daemon.controller.notes()[UUIDS[1]].reset == "a reset is due since XID 95, uncontained ECC error"
    assert daemon.controller.repaired("7") == ("", "")
    assert daemon.controller.repaired("0") == (UUIDS[0], "")
    assert daemon.controller.repaired(word) == (UUIDS[1], "a reset is due since XID 95, uncontained ECC error")
    assert daemon.controller.repaired(word) == (UUIDS[1], "")
    daemon = Daemon(tmp_path)
    daemon.later(5000)
    daemon.shows()
    assert daemon.shows().gpus[1].health.state is HealthState.HEALTHY


async def test_a_gpu_that_should_be_reset_soon_is_withheld_once_its_holder_has_gone(daemon: Daemon) -> None:
    daemon.node_state.then(daemon.controller.follow_ledger, Changed.LEDGER)
    shown = look((Sign.REMAP_PENDING,), ())
    shown = replace(shown, gpus=(replace(shown.gpus[0], remap_pending=True), shown.gpus[1]))
    daemon.hold(UUIDS[0])
    daemon.controller.with_health(shown)
    for _ in range(3):
        daemon.later(45)
        daemon.controller.take_event(xid(94))
    assert daemon.controller.with_health(shown).gpus[0].unavailable == ""
    daemon.node_state.commit(Ledger())
    await asyncio.sleep(0)
    assert daemon.published[-1].gpus[0].unavailable == SOON
    daemon.hold(UUIDS[0])
    await asyncio.sleep(0)
    assert daemon.published[-1].gpus[0].unavailable == ""
    assert daemon.runtime.asked == []


def test_who_only_monitors_a_bad_gpu_goes_on() -> None:
    bad_ones: dict[str, Health] = {uuid(0): Health(HealthState.BAD, why="xid 79")}
    holds, monitors = entry(0), entry(0, mode=None, to=container(name="monitor"))
    assert list(holders_of(bad_ones, ledger(holds, monitors))) == [holds.grant.container_id]


async def test_a_gpu_that_was_replaced_is_said_to_be_forgotten(daemon: Daemon, log: Log) -> None:
    daemon.node_state.commit(Ledger())
    daemon.shows((), (Sign.LOST,))
    there = look((), ())
    daemon.controller.with_health(replace(there, gpus=(there.gpus[0], replace(there.gpus[1], uuid=UUIDS[2]))))
    (said,) = log.said("GPU was replaced, and is forgotten")
    assert UUIDS[1] in str(said)
    assert f"{UUIDS[2]} is at its address, {there.gpus[1].pci_bus_id}" in str(said)
