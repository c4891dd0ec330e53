"""The cache of the last inventory, with its time injected, and the controller that publishes and remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import PciBusId
from nri_gpu.domain.health import KEPT, Health, HealthState, Sign, TransitionKind
from nri_gpu.domain.node import GpuFault, Inventory, KernelGpu
from nri_gpu.inventory.inventory_controller import InventoryCache, InventoryController
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.log import log_lines
from tests.support.running import running

ONE = Inventory(taken_at=1.0, driver_version="1.0")
ONE_LATER = Inventory(taken_at=2.0, driver_version="1.0")
TWO = Inventory(taken_at=3.0, driver_version="2.0")


AWAY = KernelGpu(pci_bus_id=PciBusId("0000:70:00.0"), reason="bound to vfio-pci")


def fault(reason: str, *unlisted: KernelGpu) -> Inventory:
    return Inventory(taken_at=10.0, fault=reason, unlisted=unlisted)


class CacheRig:
    """A cache and its source, with callbacks and pauses written down.

    The source answers from a list, then for ever with the last; a fault is raised. It is cancelled once all were given.
    """

    def __init__(self, *answers: Inventory) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.closed = False
        self.published: list[Inventory] = []
        self.faults: list[str] = []
        self.pauses: list[float] = []
        self.seconds = 0.0
        self.since_boot_s = 10.0
        self.rests: asyncio.Queue[int] = asyncio.Queue()  # how often the source was asked, at each pause
        self.cache = InventoryCache(
            self,
            self.published.append,
            self.faults.append,
            boot_clock=lambda: self.since_boot_s,
            monotonic=self.elapsed,
            sleep=self.sleep,
        )

    async def refresh(self) -> Inventory:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if answer.fault:
            raise InventoryError(answer.fault, answer.unlisted)
        return answer

    async def close(self) -> None:
        self.closed = True

    def elapsed(self) -> float:
        """A second more each time it is asked."""
        self.seconds += 1.0
        return self.seconds

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.rests.put_nowait(self.asked)
        if self.asked >= len(self.answers):
            await asyncio.Event().wait()

    def play(self) -> None:
        async def run() -> None:
            async with asyncio.timeout(20), running(self.cache.run()):
                for _ in self.answers:
                    await self.rests.get()

        asyncio.run(run())
        assert self.closed


A, B = fault("a"), fault("b")
# The answers of the source, what is published of them, and which faults are reported.
PLAYS: dict[str, tuple[list[Inventory], list[Inventory], str]] = {
    "an inventory that differs is published": ([ONE, ONE_LATER, TWO], [ONE, TWO], ""),
    "a failure keeps the last one": ([ONE, A], [ONE], "a"),
    "each failure is reported": ([A, A, B, A, ONE, A], [A, B, A, ONE], "aabaa"),
    "what the kernel shows is published with a fault": (
        [fault("a", AWAY), fault("a", AWAY), A, fault("a", AWAY), ONE, fault("a", AWAY)],  # ONE knows more
        [fault("a", AWAY), A, fault("a", AWAY), ONE],
        "aaaaa",
    ),
}


@pytest.mark.parametrize(("answers", "published", "faults"), PLAYS.values(), ids=PLAYS)
def test_what_is_published(answers: list[Inventory], published: list[Inventory], faults: str) -> None:
    rig = CacheRig(*answers)
    assert rig.cache.age_s() is None
    rig.play()
    assert rig.published == published
    assert rig.faults == [*faults]
    assert rig.published[0].taken_at == published[0].taken_at
    assert rig.cache.current == published[-1]
    assert rig.cache.fault == answers[-1].fault


def test_the_current_one_is_the_last_confirmed() -> None:
    rig = CacheRig(ONE, ONE_LATER, A)
    rig.play()
    assert rig.cache.current
    assert rig.cache.current.taken_at == 2.0
    assert rig.cache.age_s() == 0.0
    rig.since_boot_s += 3600  # suspended: the monotonic clock stood still
    assert rig.cache.age_s() == 3600.0


def test_a_recalled_inventory_is_confirmed() -> None:
    rig = CacheRig(ONE_LATER)
    rig.cache.recall(ONE)
    assert rig.cache.current == ONE
    assert not rig.cache.confirmed
    assert rig.cache.age_s() == 9.0  # taken a second after the boot, ten seconds ago
    rig.play()
    assert rig.cache.confirmed
    assert rig.published == []


def test_a_recalled_inventory_that_is_outdated_is_replaced() -> None:
    rig = CacheRig(A, TWO)
    rig.cache.recall(ONE)
    rig.play()
    assert rig.published == [TWO]
    assert rig.faults == ["a"]


def test_failures_are_retried_soon_then_more_and_more_seldom() -> None:
    rig = CacheRig(*[A] * 9, ONE, ONE)
    rig.play()
    assert rig.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 60.0, 60.0]


async def test_a_poke_ends_the_pause() -> None:
    rig = CacheRig(ONE)
    async with running(rig.cache.run()):
        for asked in (1, 2, 3):
            assert await rig.rests.get() == asked
            rig.cache.poke()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert rig.published == [ONE]


async def test_ready_after_a_fault_too() -> None:
    rig = CacheRig(A)
    waiting = asyncio.create_task(rig.cache.ready())
    await rig.cache.refresh()
    await waiting


def test_a_bug_is_no_failure_of_the_source() -> None:
    rig = CacheRig(ONE)

    async def broken() -> Inventory:
        raise KeyError("bug")

    rig.refresh = broken  # type: ignore[method-assign]  # a source with a bug
    with pytest.raises(KeyError):
        asyncio.run(rig.cache.run())
    assert rig.closed


def test_each_answer_is_passed_on_though_only_processes_changed() -> None:
    """With when it was asked for; nothing is published then, since processes come and go all the time."""
    busy, idle = (make.inventory((make.gpu(0, processes=count),)) for count in (2, 0))
    rig, answers = CacheRig(busy, idle, A), list[tuple[int | None, float]]()
    rig.cache.subscribe(lambda inventory, began: answers.append((inventory.gpus[0].processes, began)))
    rig.play()
    assert answers == [(2, 1.0), (0, 2.0)]
    assert rig.published == [busy]


# --- the controller ---------------------------------------------------------------------------------------------------

NODE = make.inventory(make.gpus(2), driver_version="580.95.05")


class ControllerRig:
    """A controller, its follower and its log."""

    def __init__(self) -> None:
        self.node_state = NodeState(Inventory(taken_at=0, fault="starting"))
        self.looks = 0
        self.lines: list[str] = []
        self.now = 100.0
        self.controller = InventoryController(self.node_state, wall=lambda: self.now, monotonic=lambda: self.now)
        self.controller.subscribe(self.look)

    def look(self) -> None:
        self.looks += 1

    def then(self, inventory: Inventory) -> int:
        """Publish it a second later. Return how often the driver's files were looked for."""
        self.now += 1
        self.looks = 0
        self.lines.clear()
        self.controller.publish(inventory)
        assert self.node_state.node.inventory is inventory
        return self.looks

    def noted(self) -> list[tuple[str, float]]:
        return [(each.kind, each.at_s) for each in self.controller.history.last]


@pytest.fixture
def rig() -> Iterator[ControllerRig]:
    rig = ControllerRig()
    with log_lines(lambda line: rig.lines.append(str(line)), "INFO"):
        yield rig


def gpu_with(**fields: object) -> Inventory:
    return replace(NODE, gpus=(replace(NODE.gpus[0], **fields), *NODE.gpus[1:]))


def test_of_the_first_inventory_only_faults_are_logged(rig: ControllerRig) -> None:
    fault = GpuFault(7, "nvmlDeviceGetHandleByIndex: GPU is lost (15)")
    assert rig.then(replace(gpu_with(unavailable="no"), faults=(fault,))) == 1
    assert rig.noted() == [("description", 101), ("available", 101)]
    assert [line.split()[0] for line in rig.lines] == ["INFO", "WARNING", "WARNING"]


def test_a_sign_that_comes_and_goes_calls_no_follower(rig: ControllerRig) -> None:
    rig.then(NODE)
    for _ in range(3):
        assert rig.then(gpu_with(signs=(Sign.THERMAL,))) == 0
        assert len(rig.lines) == 2
        assert rig.then(NODE) == 0
    assert rig.controller.history.counts == {TransitionKind.SIGN: 6}


@pytest.mark.parametrize(
    ("after", "looks"),
    [
        (replace(NODE, driver_version="590.10"), 1),
        (replace(NODE, gpus=NODE.gpus[:1]), 0),
        (gpu_with(minor_number=5), 0),
        (gpu_with(mig_enabled=True), 0),
        (gpu_with(memory_bytes=7), 0),
        (gpu_with(unavailable="no"), 0),
        (gpu_with(health=Health(HealthState.BAD, 1.0, "XID 79", 1), unavailable="bad"), 0),
    ],
)
def test_the_drivers_files_are_looked_for_when_the_driver_changed(
    rig: ControllerRig, after: Inventory, looks: int
) -> None:
    rig.then(NODE)
    assert rig.then(after) == looks
    (happened,) = rig.controller.history.last
    by_another = happened.kind == TransitionKind.HEALTH  # whose own controller logs it
    assert len(rig.lines) == (1 if by_another else 2)


def test_a_gpu_that_cannot_be_described_is_logged_twice(rig: ControllerRig) -> None:
    lost = replace(NODE, faults=(GpuFault(7, "gone"),))
    rig.then(NODE)
    rig.then(lost)
    assert "WARNING GPU cannot be described" in rig.lines[1]
    rig.then(replace(lost, driver_version="590.10"))
    assert not any("cannot be described" in line for line in rig.lines)
    rig.then(NODE)
    assert any("GPU 7 can be described again" in line for line in rig.lines)
    assert rig.controller.history.counts[TransitionKind.DESCRIPTION] == 2


def test_a_driver_that_does_not_answer_and_does_again(rig: ControllerRig) -> None:
    rig.controller.not_refreshed("no driver")
    rig.then(Inventory(taken_at=1.0, fault="no driver"))
    assert rig.then(NODE) == 1
    rig.controller.answered()
    rig.controller.answered()
    said = [each.what for each in rig.controller.history.last if each.kind == TransitionKind.ANSWER]
    assert said == ["not refreshed: no driver", "the driver answers again"]
    assert rig.controller.history.counts[TransitionKind.GPU] == 2


def test_a_driver_that_does_not_answer_for_minutes_is_an_error_once(rig: ControllerRig) -> None:
    for _ in range(4):
        rig.controller.not_refreshed("no driver")
        rig.now += 150
    assert [line.split()[:4] for line in rig.lines] == [
        ["WARNING", "inventory", "not", "refreshed"],
        ["ERROR", "inventory", "not", "refreshed"],
    ]
    assert "nri-gpu prepare" in rig.lines[1]
    assert rig.controller.history.counts[TransitionKind.ANSWER] == 1
    rig.controller.answered()
    rig.controller.not_refreshed("no driver")
    assert rig.lines[2].startswith("WARNING")


def test_what_flaps_does_not_push_out_other_kinds(rig: ControllerRig) -> None:
    rig.then(NODE)
    rig.controller.module_changed("590.10")
    for _ in range(KEPT):
        rig.then(gpu_with(signs=(Sign.THERMAL,)))
        rig.then(NODE)
    history = rig.controller.history
    assert (history.total, len(history.last)) == (2 * KEPT + 1, KEPT + 1)
    assert history.last[0].what == "kernel module nvidia 590.10 is loaded"
    assert [each.number for each in history.last] == sorted(each.number for each in history.last)
