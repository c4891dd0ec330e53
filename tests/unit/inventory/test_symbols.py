"""Drivers whose library has older functions than nvidia-ml-py asks for: nothing is lost by it, and it is said once."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.domain.node import Inventory, Link
from nri_gpu.health.listener import EventChild, EventSink
from nri_gpu.inventory.child import NvmlChild
from nri_gpu.inventory.nvml_client import CHAINS, EventDataV1, PciInfoV2, ProcessInfoV1, ProcessInfoV2
from nri_gpu.inventory.report import read_report
from nri_gpu.inventory.source import NvmlSource
from tests.support.log import Log
from tests.support.nvml import FakeGpu, build_fake_nvml, happen

UUIDS = [f"GPU-{n}b200000-0000-4000-8000-00000000000{n}" for n in range(2)]
GPUS = [FakeGpu(uuid=uuid, domain=1, bus=0x3B + n, nvlinks=(1 - n,), running=(2, 1)) for n, uuid in enumerate(UUIDS)]
LACKING = "this driver's NVML lacks functions: older ones are used, or the facts stay unknown"
EVENTS = ("nvmlEventSetWait_v2", "nvmlDeviceGetHandleByPciBusId")
# Each name that a library may have for a call, without those that are newer: (what is taken away, what stands in).
STEPS = [
    ([chain.newest, *(symbol for symbol, _ in chain.older[:at])], older)
    for name, chain in CHAINS.items()
    if name not in EVENTS
    for at, (older, _) in enumerate(chain.older)
]


def asked(root: Path) -> tuple[Inventory, tuple[str, ...]]:
    async def once() -> tuple[Inventory, tuple[str, ...]]:
        child = NvmlChild(str(root), wall=lambda: 7.0)
        try:
            return await child.refresh(), child.lacking
        finally:
            await child.close()

    return asyncio.run(once())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    inventory, lacking = asked(build_fake_nvml(tmp_path_factory.mktemp("driver"), GPUS))
    assert lacking == ()
    assert [gpu.uuid for gpu in inventory.gpus] == UUIDS
    assert inventory.gpus[0].pci_bus_id == "0001:3b:00.0"
    assert inventory.gpus[0].processes == 2
    assert inventory.links == (Link(0, 1, "SYS", 1),)
    assert inventory.cuda_version == "13.0"
    return inventory


@pytest.mark.parametrize(("without", "older"), STEPS, ids=[older for _, older in STEPS])
def test_an_older_function_tells_the_same(tmp_path: Path, whole: Inventory, without: list[str], older: str) -> None:
    inventory, lacking = asked(build_fake_nvml(tmp_path, GPUS, without=without))
    assert inventory == whole
    assert lacking == (f"{without[0]} ({older} is used instead)",)


def test_a_library_with_nothing_but_the_oldest_names(tmp_path: Path, whole: Inventory) -> None:
    chains = [chain for name, chain in CHAINS.items() if name not in EVENTS]
    without = [chain.newest for chain in chains] + [symbol for chain in chains for symbol, _ in chain.older[:-1]]
    inventory, lacking = asked(build_fake_nvml(tmp_path, GPUS, without=without))
    assert inventory == whole
    assert len(lacking) == len(chains)


def test_a_function_without_any_older_one(tmp_path: Path) -> None:
    _, lacking = asked(build_fake_nvml(tmp_path, GPUS, without=["nvmlDeviceGetMigMode", "nvmlDeviceGetBrand"]))
    assert lacking == ("nvmlDeviceGetBrand", "nvmlDeviceGetMigMode")


def test_gpus_that_nothing_can_count(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, GPUS, without=["nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"])
    with pytest.raises(InventoryError, match=r"nvmlDeviceGetCount: Function Not Found \(13\)"):
        asked(root)


@pytest.mark.parametrize("name", EVENTS)
async def test_events_are_heard_by_the_older_names(tmp_path: Path, name: str) -> None:
    root = build_fake_nvml(tmp_path, GPUS, without=[CHAINS[name].newest])
    heard: list[GpuEvent] = []
    child = EventChild(root, (), EventSink(heard.append, lambda: None))
    child.listen(frozenset({"0001:3c:00.0"}))
    listening = asyncio.create_task(child.run())
    try:
        async with asyncio.timeout(20):
            while not heard:
                happen(root, 1, EventType.XID, 79)  # until the event set is there to hear it
                await asyncio.sleep(0.05)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    assert heard[0] == GpuEvent(UUIDS[1], EventType.XID, 79)


async def test_it_is_said_once_for_a_driver_and_again_for_the_next(tmp_path: Path, log: Log) -> None:
    source = NvmlSource(tmp_path)
    without = ["nvmlDeviceGetCount_v2", "nvmlDeviceGetBrand"]
    for driver in ("470.57.02", "470.57.02", "510.39.01"):
        build_fake_nvml(tmp_path, GPUS, driver=driver, without=without)
        await source.refresh()
        await source.refresh()
    build_fake_nvml(tmp_path, GPUS, driver="580.95.05")
    await source.refresh()
    await source.close()
    said = [(line.fields["driver_version"], line.fields["fault"]) for line in log.said(LACKING)]
    sentence = "nvmlDeviceGetBrand, nvmlDeviceGetCount_v2 (nvmlDeviceGetCount is used instead)"
    assert said == [("470.57.02", sentence), ("510.39.01", sentence)]


def test_sizes_are_those_of_the_header() -> None:
    layouts = (PciInfoV2, EventDataV1, ProcessInfoV1, ProcessInfoV2)
    assert [ctypes.sizeof(layout) for layout in layouts] == [52, 24, 16, 24]


REPORT = {"gpus": [], "faults": [], "links": [], "driver_version": "", "cuda_version": ""}
BAD: Sequence[object] = [3, ["a"], [["nvml\n", ""]], [["nvml", "x"]], [[1, 2]], [["nvmlX", ""]] * 1000]


@pytest.mark.parametrize("lacking", BAD)
def test_lists_that_cannot_be_read(lacking: object) -> None:
    assert read_report({**REPORT, "lacking": [["nvmlX", ""]]}, 0.0).lacking == ("nvmlX",)
    with pytest.raises(InventoryError, match="cannot be read"):
        read_report({**REPORT, "lacking": lacking}, 0.0)
