"""The fault table on the running daemon: whatever the driver does, containers for healthy GPUs are created at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.cli.status import to_text
from nri_gpu.daemon.snapshot import SNAPSHOT_FILE
from tests.support.nvml import Act, FakeGpu, FakeMig, build_fake_nvml
from tests.support.scripted_runtime import until
from tests.unit.daemon.chain import DRIVER, PATIENCE_S, Chain
from tests.unit.daemon.rig import gpus

INIT, HANDLE, NAME = "nvmlInitWithFlags", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetName"
TWO = gpus(2)
PARTS = (
    FakeMig(place=0, gi=1, uuid="MIG-a0000000-0000-4000-8000-000000000000"),
    FakeMig(place=1, gi=2, uuid="MIG-b0000000-0000-4000-8000-000000000000"),
)
CUT = replace(TWO[1], mig=(1, 1), parts=PARTS)


@pytest.fixture
def chain(folder: Path) -> Chain:
    return Chain(folder, TWO)


def children(pid: int) -> list[int]:
    """The processes that ask NVML."""
    found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for each in found if b"nri_gpu.inventory.nvml" in command(each)]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_a_hang_stalls_nobody_and_the_age_grows(chain: Chain) -> None:
    async with chain.running():
        chain.play(TWO, Act(NAME, "hang", gpu=1))
        await chain.hangs(NAME)
        first = await chain.shown(
            "the hang", lambda said: "did not return within 2 s" in said["node"]["inventory_fault"]
        )
        later = await chain.shown(
            "its age", lambda said: said["node"]["inventory_age_s"] > first["node"]["inventory_age_s"] + 0.5
        )
        assert "(its GPUs were last confirmed " in to_text(later, 0.0)
        assert later["node"]["inventory_number"] == first["node"]["inventory_number"]
        assert [each["unavailable"] for each in later["gpus"]][1] == ""
        chain.play(TWO)
        await chain.shown("an answer", lambda said: said["node"]["inventory_fault"] == "")
    assert chain.refused == []


async def test_a_child_that_is_killed(chain: Chain) -> None:
    async with chain.running():
        [child] = children(chain.daemon.pid)
        os.kill(child, signal.SIGKILL)
        await until("another one", lambda: children(chain.daemon.pid) not in ([child], []), PATIENCE_S)
        asked = len(chain.calls())
        await until("it to be asked", lambda: len(chain.calls()) > asked, PATIENCE_S)
    assert chain.refused == []


async def test_a_library_that_is_replaced_and_who_has_it_mapped(chain: Chain) -> None:
    async with chain.running():
        [child] = children(chain.daemon.pid)
        assert "libnvidia-ml" in mapped(child)
        build_fake_nvml(chain.root, TWO, driver=DRIVER)  # the same version, another file: a repaired package
        await until("another process", lambda: children(chain.daemon.pid) not in ([child], []), PATIENCE_S)
        await chain.shown("its word", lambda said: said["node"]["inventory_fault"] == "")
        # The daemon itself maps no file of the driver's, and nothing that a driver's library would bring along.
        maps = mapped(chain.daemon.pid)
        assert not any(word in maps for word in ("nvidia", "libcuda", str(chain.root)))
    assert chain.refused == []


async def test_a_driver_that_is_unloaded_and_loaded(chain: Chain) -> None:
    """The one row in which healthy GPUs are refused: they have no driver. Only the kernel's files tell of it."""
    async with chain.running():
        chain.play(TWO, Act(INIT, "fail", 9))
        chain.daemon.unload()
        await chain.until("the end of grants", "device=1", "kernel module was unloaded")
        chain.play(TWO)
        chain.daemon.load(DRIVER)
        await chain.until("grants again", "device=1")
        await chain.shown("an answer", lambda said: said["node"]["inventory_fault"] == "")
    assert all("modprobe nvidia" in refusal for refusal in set(chain.refused)), set(chain.refused)


async def test_a_gpu_that_is_lost_and_comes_back(chain: Chain) -> None:
    async with chain.running():
        chain.play(TWO, Act(HANDLE, "fail", 15, gpu=1))
        await chain.until("its loss", "device=1", "(15)")
        chain.play(TWO)
        await chain.until("its return", "device=1")
    assert chain.refused == []


async def test_mig_on_other_instances_and_off(chain: Chain) -> None:
    async with chain.running():
        chain.play([TWO[0], replace(CUT, parts=PARTS[:1])])
        for name, minor in (("gi1", 147), ("gi1/ci0", 148)):
            chain.capability(name, minor)
        await chain.until("the instance", f"device={PARTS[0].uuid}")
        chain.play([TWO[0], CUT])
        for name, minor in (("gi2", 156), ("gi2/ci0", 157)):
            chain.capability(name, minor)
        await chain.until("another", f"device={PARTS[1].uuid}")
        chain.play([TWO[0], replace(CUT, parts=PARTS[1:])])
        await chain.until("the end of the first", f"device={PARTS[0].uuid}", "no MIG device")
        assert await chain.ask(f"device={PARTS[1].uuid}") == ""
        chain.play(TWO)
        await chain.until("the whole GPU", "device=1")
    assert chain.refused == []


async def test_sixteen_gpus_and_none(chain: Chain) -> None:
    async with chain.running():
        chain.play(gpus(16))
        await chain.until("sixteen", "device=15")
        assert chain.refused == []
        chain.play([])
        # One that was never there: a GPU that is granted while it goes counts as lost, not as taken out.
        await chain.until("none", "device=16", "it has no GPUs")
        chain.play(TWO)
        await chain.until("two", "device=1")


async def test_a_capability_file_that_never_answers(chain: Chain) -> None:
    async with chain.running():
        chain.play([TWO[0], CUT])
        file = chain.capability("gi1", 147)
        file.unlink()
        os.mkfifo(file)
        said = await chain.shown("the file", lambda said: "/proc and /sys" in said["node"]["inventory_fault"])
        await chain.goes_on()
        assert len(said["gpus"]) == 2
        writing = os.open(file, os.O_WRONLY | os.O_NONBLOCK)  # the one reader there is
        file.unlink()
        for name, minor in (("gi1", 147), ("gi1/ci0", 148), ("gi2", 156), ("gi2/ci0", 157)):
            chain.capability(name, minor)
        os.close(writing)
        await chain.until("the instance", f"device={PARTS[0].uuid}")
    assert chain.refused == []


async def test_a_daemon_ends_whatever_hangs(chain: Chain) -> None:
    """A file of the driver's that never answers: the process is gone when told to go, and leaves nothing behind."""
    async with chain.connected():
        chain.play([TWO[0], CUT])
        file = chain.capability("gi1", 147)
        file.unlink()
        os.mkfifo(file)
        await chain.shown("the file", lambda said: "/proc and /sys" in said["node"]["inventory_fault"])
        asking = children(chain.daemon.pid)
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE_S / 2
    await until("the end of its processes", lambda: not any(map(command, asking)), PATIENCE_S)


# --- before there is a driver -----------------------------------------------------------------------------------------

A, B = "0000:10:00.0", "0000:11:00.0"


async def test_early_boot_names_the_gpus_of_the_bus(folder: Path) -> None:
    chain = Chain(folder, TWO, Act(INIT, "fail", 9), version=None)
    chain.on_the_bus(A, "")
    chain.on_the_bus(B, "vfio-pci")
    async with chain.connected():
        said = await chain.shown("the fault", lambda said: "Driver Not Loaded" in said["node"]["inventory_fault"])
        assert [(gpu["pci_bus_id"], gpu["reason"].partition(":")[0]) for gpu in said["unlisted"]] == [
            (A, "not bound to a driver"),
            (B, "bound to vfio-pci, for a virtual machine"),
        ]
        told = await chain.ask("count=1")
        assert f"the kernel shows GPU {A}, not bound to a driver" in told
        assert f"{B}, bound to vfio-pci" in told
        # No restart, ever: the module comes, one GPU is the driver's, the other still somebody else's.
        chain.play([FakeGpu(uuid=TWO[0].uuid)])
        chain.daemon.load(DRIVER)
        chain.on_the_bus(A, "nvidia")
        await chain.until("a grant", "count=1")
        said = await chain.shown("an answer", lambda said: said["node"]["inventory_fault"] == "")
        assert [gpu["pci_bus_id"] for gpu in said["unlisted"]] == [B]
        assert "cannot be granted: bound to vfio-pci" in await chain.ask(f"device={B}")
        assert f"GPU {B}: bound to vfio-pci" in await chain.ask("count=2")


async def test_a_library_of_another_version_than_the_module(folder: Path) -> None:
    chain = Chain(folder, TWO, Act(INIT, "fail", 18), version="570.26")
    uuid = TWO[0].uuid
    chain.on_the_bus(A, "nvidia", **{"GPU UUID": uuid, "Model": "NVIDIA L4", "Device Minor": "0", "GPU Excluded": "No"})
    chain.on_the_bus(B, "nvidia", **{"GPU Excluded": "Yes"})
    async with chain.connected():
        said = await chain.shown("the fault", lambda said: "(18)" in said["node"]["inventory_fault"])
        first, second = said["unlisted"]
        assert (first["uuid"], first["model"], first["minor_number"]) == (uuid, "NVIDIA L4", 0)
        assert first["reason"] == said["node"]["inventory_fault"]
        assert "570.26" in first["reason"]
        assert second["reason"].startswith("excluded by the driver")
        told = await chain.ask("count=1")
        assert f"the kernel shows GPU {A} NVIDIA L4; {B}, excluded by the driver" in told


async def test_a_snapshot_is_of_the_modules_that_are_loaded(chain: Chain) -> None:
    """A restart serves it beside a driver that hangs, and beside another nvidia-uvm does not."""
    async with chain.connected():
        await chain.until("a grant", "device=1")
        await until("a snapshot", (chain.launch.state / SNAPSHOT_FILE).exists, PATIENCE_S)
    chain.play(TWO, Act(INIT, "hang"))
    async with chain.connected():
        assert await chain.ask("device=1") == ""
        said = await chain.status()
        assert not said["node"]["inventory_confirmed"]
    chain.daemon.module("nvidia_uvm", "590.10")
    async with chain.connected():
        assert "another version of one of the kernel modules" in chain.daemon.wait_logged("does not hold")
        assert "the driver has not answered yet" in await chain.ask("device=1")


# --- news of the kernel's ---------------------------------------------------------------------------------------------

NULL = Path("/sys/class/mem/null/uevent")
DEVICE = next(iter(sorted(Path("/sys/bus/pci/devices").glob("*/uevent"))), NULL)


def announce(device: Path) -> None:
    """The kernel says of it that it changed."""
    device.write_text("change")


@pytest.fixture
def vendor() -> str:
    """Of a PCI device of this machine, as the kernel's messages have it."""
    return DEVICE.with_name("vendor").read_text().strip().removeprefix("0x").upper() + ":"


async def test_a_message_of_the_kernel_is_a_look_at_once(folder: Path, vendor: str) -> None:
    """A real one, through a real netlink socket: of a device that is none of ours, then of one that counts as a GPU."""
    chain = Chain(folder, TWO, refresh_s=3600)
    chain.daemon.vendor = vendor
    async with chain.running():
        looks = await chain.at_rest()
        announce(NULL)
        await asyncio.sleep(0.5)
        assert chain.looks() == looks
        announce(DEVICE)
        await until("a look", lambda: chain.looks() > looks, PATIENCE_S)
    assert chain.refused == []


async def test_a_module_that_comes_and_goes_is_a_look_at_once(folder: Path) -> None:
    """Its message cannot be made without the module: what the kernel shows is looked at each second beside it."""
    chain = Chain(folder, TWO, refresh_s=3600)
    async with chain.running():
        looks = await chain.at_rest()
        chain.daemon.unload()
        await until("a look", lambda: chain.looks() > looks, PATIENCE_S)
        looks = await chain.at_rest()
        chain.daemon.load(DRIVER)
        await until("a look", lambda: chain.looks() > looks, PATIENCE_S)
        await chain.until("grants again", "device=0")
