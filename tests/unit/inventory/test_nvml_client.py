"""Libraries with older functions than nvidia-ml-py asks for: nothing is lost by it, and it is logged once."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.domain.node import Link
from nri_gpu.health.event_child import EventChild, EventSink
from nri_gpu.inventory.nvml_client import CHAINS, EventDataV1, PciInfoV2, ProcessInfoV1, ProcessInfoV2
from nri_gpu.inventory.nvml_report import read_report
from nri_gpu.inventory.nvml_source import NvmlSource
from tests.support.log import Log
from tests.support.nvml import FakeGpu, build_fake_nvml, happen
from tests.support.running import running
from tests.unit.inventory.machine import Machine

UUIDS = [f"GPU-{n}b200000-0000-4000-8000-00000000000{n}" for n in range(2)]
GPUS = [FakeGpu(uuid=uuid, domain=1, bus=0x3B + n, nvlinks=(1 - n,), running=(2, 1)) for n, uuid in enumerate(UUIDS)]
LACKING = "this driver's NVML lacks functions: older ones are used, or the facts stay unknown"
EVENTS = ("nvmlEventSetWait_v2", "nvmlDeviceGetHandleByPciBusId")
DESCRIBING = [chain for name, chain in CHAINS.items() if name not in EVENTS]


def test_older_functions_tell_the_same(machine: Machine) -> None:
    """First each call by the newest name but one, then by the oldest that a library may have."""
    whole = machine.look(GPUS)
    assert machine.lacking == ()
    assert [gpu.uuid for gpu in whole.gpus] == UUIDS
    assert (whole.gpus[0].pci_bus_id, whole.gpus[0].processes) == ("0001:3b:00.0", 2)
    assert (whole.links, whole.cuda_version) == ((Link(0, 1, "SYS", 1),), "13.0")
    for at in (0, -1):
        names = {chain.newest: [chain.newest, *(symbol for symbol, _ in chain.older)] for chain in DESCRIBING}
        kept = {chain.newest: chain.older[at][0] for chain in DESCRIBING}
        without = [name for newest, all_of in names.items() for name in all_of[: all_of.index(kept[newest])]]
        again = machine.look(GPUS, without=without)
        assert again == whole
        assert [gpu.processes for gpu in again.gpus] == [2, 2]
        assert machine.lacking == tuple(sorted(f"{new} ({old} is used instead)" for new, old in kept.items()))


def test_a_function_without_any_older_one(machine: Machine) -> None:
    machine.look(GPUS, without=["nvmlDeviceGetMigMode", "nvmlDeviceGetBrand"])
    assert machine.lacking == ("nvmlDeviceGetBrand", "nvmlDeviceGetMigMode")
    with pytest.raises(InventoryError, match=r"nvmlDeviceGetCount: Function Not Found \(13\)"):
        machine.look(GPUS, without=["nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"])


@pytest.mark.parametrize("name", EVENTS)
async def test_events_by_the_older_names(tmp_path: Path, name: str) -> None:
    root = build_fake_nvml(tmp_path, GPUS, without=[CHAINS[name].newest])
    found: list[GpuEvent] = []
    child = EventChild(root, (), EventSink(found.append, lambda: None))
    child.listen(frozenset({"0001:3c:00.0"}))
    async with running(child.run()):
        while not found:
            happen(root, 1, EventType.XID, 79)  # until the event set is there
            await asyncio.sleep(0.05)
    assert found[0] == GpuEvent(UUIDS[1], EventType.XID, 79)


async def test_it_is_logged_once_for_each_driver(tmp_path: Path, log: Log) -> None:
    source = NvmlSource(tmp_path)
    without = ["nvmlDeviceGetCount_v2", "nvmlDeviceGetBrand"]
    for driver in ("470.57.02", "470.57.02", "510.39.01"):
        build_fake_nvml(tmp_path, GPUS, driver=driver, without=without)
        await source.refresh()
        await source.refresh()
    build_fake_nvml(tmp_path, GPUS, driver="580.95.05")
    await source.refresh()
    await source.close()
    logged = [(line.fields["driver_version"], line.fields["fault"]) for line in log.said(LACKING)]
    sentence = "nvmlDeviceGetBrand, nvmlDeviceGetCount_v2 (nvmlDeviceGetCount is used instead)"
    assert logged == [("470.57.02", sentence), ("510.39.01", sentence)]


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
