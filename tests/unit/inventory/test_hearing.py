"""The process that waits for NVML's events, through the real binding and a made-up library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from loguru import logger

from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.inventory.hearing import Ear, EventChild
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure, happen

GPUS = tuple(FakeGpu(uuid=f"GPU-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(3))
BUS_IDS = tuple(f"0000:{0x10 + n:02x}:00.0" for n in range(3))
PATIENCE_S = 20.0


class Station:
    """A listener under test, and what it told."""

    def __init__(self, root: Path, silence_s: float = 15.0) -> None:
        self.events: list[GpuEvent] = []
        self.doubts = 0
        self.lines: list[str] = []
        self.news = asyncio.Event()
        ear = Ear(self._heard, self._doubt)
        self.child = EventChild(root, (), ear, silence_s=silence_s, sleep=self._sleep)
        self.pauses: list[float] = []

    def _heard(self, event: GpuEvent) -> None:
        self.events.append(event)
        self.news.set()

    def _doubt(self) -> None:
        self.doubts += 1
        self.news.set()

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    async def until(self, fact: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not fact():
                self.news.clear()
                await self.news.wait()

    def says(self, text: str) -> int:
        return sum(text in line for line in self.lines)


@asynccontextmanager
async def listening(root: Path, *gpus: int, silence_s: float = 15.0) -> AsyncIterator[Station]:
    station = Station(root, silence_s)

    def note(message: object) -> None:
        station.lines.append(str(message))
        station.news.set()

    sink = logger.add(note, level="DEBUG", format="{message} {extra}")
    station.child.listen(frozenset(BUS_IDS[gpu] for gpu in gpus))
    task = asyncio.create_task(station.child.run())
    try:
        yield station
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        logger.remove(sink)


def xid(gpu: int, number: int) -> GpuEvent:
    return GpuEvent(GPUS[gpu].uuid, int(EventType.XID), number)


def test_events_of_the_gpus_that_are_listened_to(tmp_path: Path) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS)
        happen(root, 1, EventType.XID, 13)  # before anybody listened
        async with listening(root, 0, 1) as station:
            await station.until(lambda: station.says("'gpus': 2"))
            happen(root, 2, EventType.XID, 48)
            happen(root, 1, EventType.XID, 79)
            happen(root, 0, EventType.DOUBLE_BIT_ECC)
            await station.until(lambda: len(station.events) == 2)
            assert station.events == [xid(1, 79), GpuEvent(GPUS[0].uuid, int(EventType.DOUBLE_BIT_ECC))]
            assert station.doubts == 0

    asyncio.run(run())


def test_more_gpus_later_and_none_in_the_end(tmp_path: Path) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS)
        async with listening(root, 0) as station:
            await station.until(lambda: station.says("'gpus': 1"))
            station.child.listen(frozenset(BUS_IDS))
            await station.until(lambda: station.says("'gpus': 3"))
            happen(root, 2, EventType.XID, 48)
            await station.until(lambda: station.events)
            # One fewer: NVML has to be left, which is what lets go of a node.
            station.child.listen(frozenset(BUS_IDS[:1]))
            await station.until(lambda: station.says("'gpus': 1") == 2)
            calls = (root / "usr").rglob("fake-nvml.calls")
            assert next(calls).read_text().splitlines().count("nvmlShutdown") == 1
            station.child.listen(frozenset())
            happen(root, 0, EventType.XID, 79)
            await asyncio.sleep(0)
            assert station.events == [xid(2, 48)]

    asyncio.run(run())


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"]
)
@pytest.mark.parametrize("code", [3, 15, 999])
def test_a_gpu_that_cannot_be_registered_costs_itself_alone(tmp_path: Path, function: str, code: int) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS, [Act(function, "fail", code, gpu=1)])
        async with listening(root, 0, 1, 2) as station:
            await station.until(lambda: station.says("'gpus': 2"))
            assert station.says("errors of this gpu are not heard") == 1
            happen(root, 2, EventType.XID, 79)
            await station.until(lambda: station.events)
            assert (station.events, station.doubts) == ([xid(2, 79)], 0)

    asyncio.run(run())


def test_an_event_without_a_gpu_is_said_once_and_blames_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS)
        async with listening(root, 0, 1) as station:
            await station.until(lambda: station.says("'gpus': 2"))
            happen(root, -1, EventType.XID, 79)
            happen(root, -1, EventType.XID, 79)
            happen(root, 1, EventType.XID, 31)
            await station.until(lambda: station.events)
            assert (station.events, station.doubts) == ([xid(1, 31)], 2)
            assert station.says("an event without its gpu") == 1

    asyncio.run(run())


def test_a_lost_gpu_is_known_by_its_handle(tmp_path: Path) -> None:
    """Its UUID was asked for once; afterwards NVML may not tell it any more."""

    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS)
        async with listening(root, 1) as station:
            await station.until(lambda: station.says("'gpus': 1"))
            asked = next((root / "usr").rglob("fake-nvml.calls"))
            before = asked.read_text().splitlines().count("nvmlDeviceGetUUID")
            happen(root, 1, EventType.XID, 79)
            await station.until(lambda: station.events)
            assert asked.read_text().splitlines().count("nvmlDeviceGetUUID") == before

    asyncio.run(run())


@pytest.mark.parametrize("code", [1, 2, 15, 16, 17, 999])
def test_waiting_that_fails_blames_nobody_and_is_tried_again(tmp_path: Path, code: int) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS, [Act("nvmlEventSetWait_v2", "fail", code)])
        async with listening(root, 0, 1) as station:
            await station.until(lambda: station.doubts >= 2)
            assert station.events == []
            assert station.says("not listening for errors") == 1, "once for the same reason"
            configure(root, GPUS)
            await station.until(lambda: station.says("listening for errors of gpus again"))
            assert station.pauses == sorted(station.pauses)
            happen(root, 1, EventType.XID, 79)
            await station.until(lambda: station.events)

    asyncio.run(run())


def test_pauses_grow_while_it_fails_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with listening(tmp_path, 0) as station:  # no library there
            await station.until(lambda: len(station.pauses) >= 3)
            assert station.pauses[:3] == [0.1, 0.2, 0.4]
            assert station.says("was not found below the driver root") == 1

    asyncio.run(run())


@pytest.mark.parametrize("deed", ["hang", "crash"])
def test_a_driver_that_hangs_or_crashes_takes_only_the_process_along(tmp_path: Path, deed: str) -> None:
    async def run() -> None:
        assert deed in ("hang", "crash")
        act = Act("nvmlEventSetWait_v2", "hang" if deed == "hang" else "crash")
        root = build_fake_nvml(tmp_path, GPUS, [act])
        async with listening(root, 0, silence_s=3.0) as station:
            await station.until(lambda: station.doubts)
            assert station.says("nvmlEventSetWait_v2") >= 1

    asyncio.run(run())
