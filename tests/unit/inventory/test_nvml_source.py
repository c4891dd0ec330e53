"""The machine itself as a source: NVML and the kernel's files together, and files that never answer."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from msgspec.structs import astuple, replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, MigEngines
from nri_gpu.domain.node import Inventory, Majors, NumaNode
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.inventory.nvml_source import FileReader, NvmlSource
from nri_gpu.inventory.topology_file import load_topology
from tests.support.daemon import TOPOLOGIES
from tests.support.files import write_files
from tests.support.kernel import make_pci
from tests.support.log import Log
from tests.support.nvml import FakeGpu, FakeMig, build_fake_nvml, gpus_of


async def described(root: Path, folders: HostFolders) -> Inventory:
    source = NvmlSource(root, folders=folders, boot_clock=lambda: 7.0)
    try:
        return await source.refresh()
    finally:
        await source.close()


def with_zeros(gpu: Gpu) -> Gpu:
    """With none of the engines that the file does not name, as the library says."""
    counts = ((device, [number or 0 for number in astuple(device.engines)]) for device in gpu.mig)
    return replace(gpu, mig=tuple(replace(device, engines=MigEngines(*numbers)) for device, numbers in counts))


async def test_the_shipped_node_with_mig_as_nvml_and_the_kernel_describe_it(tmp_path: Path) -> None:
    simulated = load_topology(TOPOLOGIES / "mig-a100.toml", boot_clock=lambda: 7.0)
    gpus, ancestors = gpus_of(simulated)
    folders = HostFolders(proc=tmp_path / "proc", sys=tmp_path / "sys")
    for part in simulated.parts:
        device = part.device
        place = f"driver/nvidia/capabilities/gpu{part.gpu.minor_number}/mig/gi{device.gpu_instance_id}"
        own = f"{place}/ci{device.compute_instance_id}/access"
        files = {f"{place}/access": device.gpu_instance_minor, own: device.compute_instance_minor}
        write_files(folders.proc, {path: f"DeviceFileMinor: {minor}\n" for path, minor in files.items()})
    write_files(folders.proc, {"devices": "Character devices:\n195 nvidia\n508 nvidia-uvm\n"})
    node = {"cpulist": "16-31\n", "meminfo": "Node 0 MemTotal: 131072 kB\n"}
    write_files(folders.sys / "devices/system/node/node0", node)
    inventory = await described(build_fake_nvml(tmp_path / "driver", gpus, ancestors=ancestors), folders)
    assert tuple(map(with_zeros, inventory.gpus)) == tuple(map(with_zeros, simulated.gpus))
    assert (inventory.majors, inventory.numa) == (Majors(195, 508, None), (NumaNode(0, "16-31"),))
    assert (inventory.taken_at, inventory.simulated) == (7.0, False)


async def test_without_nvml_it_is_known_which_gpus_the_kernel_shows(tmp_path: Path) -> None:
    folders = HostFolders(proc=tmp_path / "proc", sys=tmp_path / "sys")
    make_pci(folders.sys / "bus", "0000:10:00.0", "nvidia")
    (tmp_path / "driver").mkdir()
    with pytest.raises(InventoryError, match="was not found: searched below the driver root in") as caught:
        await described(tmp_path / "driver", folders)
    (gpu,) = caught.value.unlisted
    assert (gpu.pci_bus_id, gpu.reason) == ("0000:10:00.0", str(caught.value))
    assert f"{tmp_path}/driver/usr/lib64" in gpu.reason


async def test_unusual_capability_minors_are_logged_once(tmp_path: Path, log: Log) -> None:
    uuid = "MIG-00000000-0000-5000-8000-000000000000"
    root = build_fake_nvml(tmp_path / "driver", [FakeGpu(mig=(1, 1), parts=(FakeMig(place=0, uuid=uuid, gi=1),))])
    instance = "driver/nvidia/capabilities/gpu0/mig/gi1"
    files = {f"{instance}/access": "DeviceFileMinor: 7\n", f"{instance}/ci0/access": "DeviceFileMinor: 8\n"}
    write_files(tmp_path / "proc", {**files, "devices": "Character devices:\n"})
    source = NvmlSource(root, folders=HostFolders(proc=tmp_path / "proc", sys=tmp_path))
    for _ in range(2):
        (part,) = (await source.refresh()).parts
        assert (part.device.gpu_instance_minor, part.device.compute_instance_minor) == (7, 8)
    await source.close()
    assert log.one("unusual capability minors, used as they are").fields["fault"].startswith(f"MIG device {uuid} has")


def threads() -> int:
    return sum(thread.name == "nri-gpu-files" for thread in threading.enumerate())


async def test_a_reader_passes_on_results_and_errors_of_its_thread() -> None:
    reader = FileReader(5.0)
    assert await reader.run("adding", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        await reader.run("dividing", lambda: 1 // 0)
    assert await reader.run("again", threading.get_ident) != threading.get_ident()


async def test_beside_a_thread_that_hangs_no_other_is_started(tmp_path: Path) -> None:
    file, reader = tmp_path / "access", FileReader(0.05)
    os.mkfifo(file)
    with pytest.raises(InventoryError, match=r"reading it did not finish within 0\.05 s"):
        await reader.run("reading it", file.read_text)
    for _ in range(3):
        with pytest.raises(InventoryError, match="reading it has not finished yet"):
            await reader.run("something else", file.read_text)
    assert threads() == 1
    file.write_text("at last")  # as a driver that comes to itself
    async with asyncio.timeout(10):
        while threads():  # noqa: ASYNC110 - a thread's end sets no event
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)  # its last word is in the loop
    assert await reader.run("another", lambda: "well") == "well"


def test_a_loop_ends_without_its_thread(tmp_path: Path) -> None:
    file = tmp_path / "access"
    os.mkfifo(file)

    async def asked_and_cancelled() -> None:
        task = asyncio.create_task(FileReader(60.0).run("reading it", file.read_text))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asked_and_cancelled())
    assert threads() == 1
    file.write_text("too late")  # nothing waits for it any more
    for thread in threading.enumerate():
        if thread.name == "nri-gpu-files":
            thread.join(10)
    assert threads() == 0
