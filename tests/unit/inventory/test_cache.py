"""The cache of the last inventory, with its time injected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import PciBusId
from nri_gpu.domain.node import Inventory, KernelGpu, Majors
from nri_gpu.inventory.controller import InventoryCache
from nri_gpu.inventory.kernel import HostFolders
from nri_gpu.inventory.source import NvmlSource
from nri_gpu.simulation.source import TopologySource
from tests.support.nvml import FakeGpu, build_fake_nvml

ROOT = Path(__file__).parents[3]
ONE = Inventory(taken_at=1.0, driver_version="1.0")
ONE_LATER = Inventory(taken_at=2.0, driver_version="1.0")
TWO = Inventory(taken_at=3.0, driver_version="2.0")


class Scripted:
    """A source that answers from a list, then for ever with the last."""

    def __init__(self, answers: Sequence[Inventory | str | InventoryError]) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.closed = False

    async def refresh(self) -> Inventory:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, str):
            raise InventoryError(answer)
        if isinstance(answer, InventoryError):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


class Bench:
    """A cache with its callbacks and pauses written down. It is cancelled once the script was played."""

    def __init__(self, *answers: Inventory | str | InventoryError) -> None:
        self.source = Scripted(answers)
        self.published: list[Inventory] = []
        self.faults: list[str] = []
        self.pauses: list[float] = []
        self.seconds = 0.0
        self.rests: asyncio.Queue[int] = asyncio.Queue()  # how often the source was asked, at each pause
        self.cache = InventoryCache(
            self.source,
            self.published.append,
            self.faults.append,
            wall=lambda: 10.0,
            monotonic=self.elapsed,
            sleep=self.sleep,
        )

    def elapsed(self) -> float:
        """A second more each time it is asked."""
        self.seconds += 1.0
        return self.seconds

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.rests.put_nowait(self.source.asked)
        if self.source.asked >= len(self.source.answers):
            await asyncio.Event().wait()

    def play(self) -> None:
        async def run() -> None:
            task = asyncio.create_task(self.cache.run())
            async with asyncio.timeout(5):
                for _ in self.source.answers:
                    await self.rests.get()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())
        assert self.source.closed


def test_only_news_is_published() -> None:
    bench = Bench(ONE, ONE_LATER, TWO)
    bench.play()
    assert bench.published == [ONE, TWO]
    assert bench.pauses == [60.0, 60.0, 60.0]
    assert bench.faults == []


def test_the_current_one_is_the_last_confirmed() -> None:
    bench = Bench(ONE, ONE_LATER)
    bench.play()
    assert bench.cache.current == ONE_LATER
    assert bench.cache.current.taken_at == 2.0
    assert bench.cache.age_s() == 1.0


def test_a_failure_keeps_the_last_one() -> None:
    bench = Bench(ONE, "GPU gone")
    bench.play()
    assert bench.published == [ONE]
    assert bench.cache.current == ONE
    assert [bench.cache.age_s(), bench.cache.age_s()] == [2.0, 3.0]  # the second look began at 1.0
    assert bench.cache.fault == "GPU gone"


def test_a_sentence_is_reported_once_until_it_changes_or_it_worked() -> None:
    bench = Bench("a", "a", "b", "a", ONE, "a")
    bench.play()
    assert bench.faults == ["a", "b", "a", "a"]


def test_a_failure_before_any_success_is_published() -> None:
    bench = Bench("no driver", "no driver", "no nodes", ONE)
    bench.play()
    assert [inventory.fault for inventory in bench.published] == ["no driver", "no nodes", ""]
    assert bench.published[0].taken_at == 10.0


def test_what_the_kernel_shows_is_published_with_a_fault_and_again_when_it_changes() -> None:
    away = KernelGpu(pci_bus_id=PciBusId("0000:70:00.0"), reason="bound to vfio-pci")
    found = [(away,), (away,), (), (away,)]
    bench = Bench(*(InventoryError("no driver", each) for each in found), ONE, InventoryError("no driver", (away,)))
    bench.play()
    assert [each.unlisted for each in bench.published] == [(away,), (), (away,), ()]
    assert bench.faults == ["no driver", "no driver"]
    assert bench.cache.current == ONE  # which knew better


def test_there_is_no_age_before_a_success() -> None:
    bench = Bench("no driver")
    assert bench.cache.age_s() is None
    bench.play()
    assert bench.cache.age_s() is None


def test_a_recalled_inventory_is_confirmed_without_news() -> None:
    bench = Bench(ONE_LATER)
    bench.cache.recall(ONE)
    assert bench.cache.current == ONE
    assert not bench.cache.confirmed
    assert bench.cache.age_s() == 10.0  # taken at 1, the wall says 10, and a second went by
    bench.play()
    assert bench.cache.confirmed
    assert bench.published == []


def test_a_recalled_inventory_that_was_not_true_is_replaced() -> None:
    bench = Bench("not yet", TWO)
    bench.cache.recall(ONE)
    bench.play()
    assert bench.published == [TWO]
    assert bench.faults == ["not yet"]


def test_failures_are_retried_soon_then_more_and_more_seldom() -> None:
    bench = Bench(*["x"] * 9, ONE)
    bench.play()
    assert bench.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 60.0]


def test_a_poke_ends_the_pause() -> None:
    bench = Bench(ONE)

    async def run() -> None:
        task = asyncio.create_task(bench.cache.run())
        async with asyncio.timeout(5):
            for asked in (1, 2, 3):
                assert await bench.rests.get() == asked
                bench.cache.poke()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert bench.published == [ONE]


def test_ready_after_a_fault_too() -> None:
    bench = Bench("no driver")

    async def run() -> None:
        async with asyncio.timeout(5):
            waiting = asyncio.create_task(bench.cache.ready())
            await bench.cache.refresh()
            await waiting

    asyncio.run(run())


def test_a_bug_is_not_taken_for_a_failure() -> None:
    bench = Bench(ONE)

    async def broken() -> Inventory:
        raise KeyError("bug")

    bench.source.refresh = broken  # type: ignore[method-assign]  # a source with a bug
    with pytest.raises(KeyError):
        asyncio.run(bench.cache.run())
    assert bench.source.closed


def test_topology_source_reads_the_file_each_time(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    source = TopologySource(path, wall=lambda: 4.0)
    path.write_text((ROOT / "config/topologies/four-gpus.toml").read_text())

    async def run() -> None:
        assert len((await source.refresh()).gpus) == 4
        path.write_text("schema = 1\n[node]\n")
        assert (await source.refresh()).gpus == ()
        path.write_text("schema")
        with pytest.raises(InventoryError):
            await source.refresh()
        await source.close()

    asyncio.run(run())


def test_nvml_source_adds_the_majors_of_the_host(tmp_path: Path) -> None:
    devices = tmp_path / "devices"
    devices.write_text("Character devices:\n195 nvidia\n508 nvidia-uvm\n")
    root = build_fake_nvml(tmp_path / "driver", [FakeGpu()])

    async def run() -> Inventory:
        source = NvmlSource(root, folders=HostFolders(proc=tmp_path), wall=lambda: 4.0)
        try:
            return await source.refresh()
        finally:
            await source.close()

    inventory = asyncio.run(run())
    assert inventory.majors == Majors(195, 508, None)
    assert inventory.taken_at == 4.0
    assert not inventory.simulated
