"""The GPUs of the machine without NVML: by the files that the driver shows, and why no more is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.node import Inventory
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.inventory.nvml_source import NvmlSource
from nri_gpu.observe.observed_source import NO_DRIVER, OF_THE_GRADE, ObservedSource
from tests.support import builders as make
from tests.support.files import write_files
from tests.support.kernel import make_information, make_pci
from tests.support.nvml import FakeGpu, build_fake_nvml

FIRST, SECOND, EXCLUDED = "0000:10:00.0", "0000:20:00.0", "0000:30:00.0"


@pytest.fixture
def folders(tmp_path: Path) -> HostFolders:
    """A node with two GPUs, the second with the lower minor, and one that the driver leaves out."""
    folders = HostFolders(proc=tmp_path / "proc", sys=tmp_path / "sys", dev=tmp_path / "dev")
    write_files(folders.proc, {"devices": "Character devices:\n195 nvidia\n508 nvidia-uvm\n"})
    write_files(folders.sys, {"module/nvidia/version": "580.95.05\n"})
    for number, bus_id in enumerate((SECOND, FIRST, EXCLUDED)):
        make_pci(folders.sys / "bus", bus_id, "nvidia")
        told = {"Model": "NVIDIA L4", "GPU UUID": make.uuid(number), "Device Minor": str(number)}
        told["GPU Excluded"] = "Yes" if bus_id == EXCLUDED else "No"
        make_information(folders.proc / "driver", bus_id, told)
    return folders


async def seen(root: Path, folders: HostFolders, *, may_open: bool) -> tuple[Inventory, str]:
    source = ObservedSource(NvmlSource(root, folders=folders), may_open=may_open, folders=folders)
    try:
        return await source.refresh(), source.without
    finally:
        await source.close()


async def test_an_unprivileged_pod_sees_what_the_driver_shows(tmp_path: Path, folders: HostFolders) -> None:
    inventory, without = await seen(tmp_path, folders, may_open=False)
    shown = [(gpu.index, gpu.pci_bus_id, gpu.uuid, gpu.minor_number, gpu.model) for gpu in inventory.gpus]
    assert shown == [(0, FIRST, make.uuid(1), 1, "NVIDIA L4"), (1, SECOND, make.uuid(0), 0, "NVIDIA L4")]
    assert {gpu.memory_bytes for gpu in inventory.gpus} == {None}
    assert (inventory.majors.nvidia, inventory.majors.nvidia_uvm, inventory.driver_version) == (195, 508, "580.95.05")
    assert [(each.pci_bus_id, each.set_aside) for each in inventory.unlisted] == [(EXCLUDED, True)]
    assert OF_THE_GRADE in without
    assert "install the driver" not in without


async def test_a_host_is_told_why_nvml_does_not_answer(tmp_path: Path, folders: HostFolders) -> None:
    inventory, without = await seen(tmp_path, folders, may_open=True)
    assert len(inventory.gpus) == 2
    assert "libnvidia-ml.so.1 was not found" in without


@pytest.mark.parametrize(("may_open", "said"), [(False, NO_DRIVER), (True, "install the driver")])
async def test_without_a_driver_there_are_no_gpus(tmp_path: Path, may_open: bool, said: str) -> None:
    with pytest.raises(InventoryError) as caught:
        await seen(tmp_path, HostFolders(proc=tmp_path / "none", sys=tmp_path / "none"), may_open=may_open)
    assert said in str(caught.value)


async def test_with_nvml_it_is_nvmls_word(tmp_path: Path, folders: HostFolders) -> None:
    root = build_fake_nvml(tmp_path / "driver", [FakeGpu()])
    inventory, without = await seen(root, folders, may_open=True)
    assert len(inventory.gpus) == 1
    assert inventory.gpus[0].memory_bytes
    assert without == ""
