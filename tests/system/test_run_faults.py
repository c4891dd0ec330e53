"""The fault table on the running daemon: whatever the driver does, containers for healthy GPUs are created at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from nri_gpu.cli.render import Times
from nri_gpu.cli.status_page import faults
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.daemon.node_controllers import HEALTH_FILE
from nri_gpu.domain.health import EventType
from nri_gpu.verify.node_snapshot import SNAPSHOT_FILE
from tests.support.cgroup import Freezer
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, happen
from tests.support.scripted_runtime import until
from tests.support.silent import SilentFile
from tests.support.waiting import aside
from tests.system.chain import (
    CUT,
    DRIVER,
    HANDLE,
    INIT,
    NAME,
    PARTS,
    PATIENCE_S,
    TWO,
    Chain,
    command,
    listens,
)

ENDS_S = 5.0  # a unit has 25 s to stop (TimeoutStopSec=)


def uuids(said: Any) -> list[str]:  # noqa: ANN401 - parsed JSON
    """The GPUs that a status names; a number of the node would count what else has changed."""
    return [gpu["uuid"] for gpu in said["gpus"]]


@pytest.fixture
def chain(folder: Path) -> Chain:
    return Chain(folder, TWO)


def fault(said: Mapping[str, Any]) -> str:
    return str(said["node"]["inventory_fault"])


async def answered(chain: Chain) -> None:
    """NVML answered the last time it was asked."""
    await chain.shown("an answer", lambda said: fault(said) == "")


async def another_child(chain: Chain, before: list[int]) -> None:
    await until("another process", lambda: chain.children() not in (before, []), PATIENCE_S)


@pytest.mark.parametrize("function", [HANDLE, "dlopen"])
async def test_a_hang_stalls_nobody_and_the_age_grows(chain: Chain, function: str) -> None:
    """These calls may wake a GPU, and have longer than others."""
    async with chain.running():
        before = await chain.status()
        chain.play(TWO, Act(function, "hang"))
        if function == "dlopen":  # of the next process alone
            chain.kill()
        await chain.hangs(function)
        first = await chain.shown("the hang", lambda said: " did not return within 2 s" in fault(said))
        age_s = first["node"]["inventory_age_s"]
        later = await chain.shown("its age", lambda said: said["node"]["inventory_age_s"] > age_s + 0.5)
        assert ", last confirmed " in " ".join(faults(convert(later, DaemonStatus), Times(time.time())))
        assert uuids(later) == uuids(before)
        assert later["gpus"][1]["unavailable"] == ""
        chain.play(TWO)
        await answered(chain)
    assert chain.refused == []


async def test_a_library_that_writes_nonsense_into_our_pipe(chain: Chain) -> None:
    """What was believed stays, and another process is asked next."""
    async with chain.running():
        known = uuids(await chain.status())
        for sort in (0, 5, 10, 11):  # a text, a report of nothing, a line that nests too deep, one without an end
            before = chain.children()
            chain.play(TWO, Act(NAME, "babble", sort, gpu=0))
            said = await chain.shown("the nonsense", lambda said: "the NVML process" in fault(said))
            assert uuids(said) == known
            chain.play(TWO)
            await answered(chain)
            assert chain.children() != before
    assert chain.refused == []


async def test_a_library_that_is_replaced_and_who_has_it_mapped(chain: Chain) -> None:
    def mapped(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    async with chain.running():
        [child] = chain.children()
        assert "libnvidia-ml" in mapped(child)
        build_fake_nvml(chain.root, TWO, driver=DRIVER)  # the same version, another file: a repaired package
        await another_child(chain, [child])
        await answered(chain)
        # The daemon itself maps no file of the driver's, and nothing that a driver's library would bring along.
        maps = mapped(chain.daemon.pid)
        assert not any(word in maps for word in ("nvidia", "libcuda", str(chain.root)))
    assert chain.refused == []


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[SilentFile]:
    """Mounted before the daemon has its own view of all mounts."""
    file = SilentFile(tmp_path / "silent")
    try:
        yield file
    finally:
        file.end()


async def never_answers(chain: Chain, silent: SilentFile) -> Path:
    """A capability's file of the driver's, once the daemon has noticed."""
    chain.play(CUT)
    file = chain.capability("gi1")
    file.symlink_to(silent.path)
    await chain.shown("the file", lambda said: "/proc and /sys" in fault(said))
    return file


async def test_a_capability_file_that_never_answers(chain: Chain, silent: SilentFile) -> None:
    async with chain.running():
        file = await never_answers(chain, silent)
        assert len((await chain.status())["gpus"]) == 2
        await chain.goes_on()
        file.unlink()
        chain.capabilities(1, 2)
        silent.fail()
        await chain.until("the instance", f"device={PARTS[0].uuid}")
    assert chain.refused == []


async def test_a_daemon_ends_whatever_hangs(chain: Chain, silent: SilentFile) -> None:
    """The process is gone when told to go, and leaves nothing behind."""
    async with chain.connected():
        await never_answers(chain, silent)
        asking = chain.children()
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE_S / 2
    await until("the end of its processes", lambda: not any(map(command, asking)), PATIENCE_S)


# --- before there is a driver -----------------------------------------------------------------------------------------

A, B = "0000:10:00.0", "0000:11:00.0"


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_daemon_ends_in_time_and_is_succeeded_though_its_child_cannot_be_killed(
    chain: Chain, freezer: Freezer, noticed: bool
) -> None:
    async with chain.connected():
        await chain.until("the first grant", "device=0")
        [child] = chain.children()
        freezer.hold(child)
        if noticed:
            await chain.shown("the hang", lambda said: "cannot be killed" in fault(said))
        with chain.daemon.next() as successor:
            await aside(successor.wait_ready)
            before = time.monotonic()
            assert await aside(chain.daemon.terminate) == 0
            assert time.monotonic() - before < ENDS_S
            await chain.reconnect()
            await chain.until("its successor's grants", "device=0")
            assert freezer.pids == [child]
            assert await aside(successor.terminate) == 0
        chain.daemon.start()
        await chain.reconnect()
        await chain.until("grants of a new one", "device=0")


async def test_early_boot_names_the_gpus_of_the_bus(folder: Path) -> None:
    chain = Chain(folder, TWO, Act(INIT, "fail", 9), version=None)
    chain.on_the_bus(A, "")
    chain.on_the_bus(B, "vfio-pci")
    async with chain.connected():
        said = await chain.shown("the fault", lambda said: "Driver Not Loaded" in fault(said))
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
        said = await chain.shown("an answer", lambda said: fault(said) == "")
        assert [gpu["pci_bus_id"] for gpu in said["unlisted"]] == [B]
        assert "cannot be granted: bound to vfio-pci" in await chain.ask(f"device={B}")
        assert f"GPU {B}: bound to vfio-pci" in await chain.ask("count=2")


async def test_a_library_of_another_version_than_the_module(folder: Path) -> None:
    chain = Chain(folder, TWO, Act(INIT, "fail", 18), version="570.26")
    uuid = TWO[0].uuid
    chain.on_the_bus(A, "nvidia", **{"GPU UUID": uuid, "Model": "NVIDIA L4", "Device Minor": "0", "GPU Excluded": "No"})
    chain.on_the_bus(B, "nvidia", **{"GPU Excluded": "Yes"})
    async with chain.connected():
        said = await chain.shown("the fault", lambda said: "(18)" in fault(said))
        first, second = said["unlisted"]
        assert (first["uuid"], first["model"], first["minor_number"]) == (uuid, "NVIDIA L4", 0)
        assert first["reason"] == fault(said)
        assert "570.26" in first["reason"]
        assert second["reason"].startswith("excluded by the driver")
        told = await chain.ask("count=1")
        assert f"the kernel shows GPU {A} NVIDIA L4; {B}, excluded by the driver" in told


async def test_a_snapshot_is_of_the_modules_that_are_loaded(chain: Chain) -> None:
    """A restart serves it beside a driver that hangs until that answers, and beside another nvidia-uvm does not."""
    async with chain.connected():
        await chain.until("a grant", "device=1")
        await until("a snapshot", (chain.launch.state / SNAPSHOT_FILE).exists, PATIENCE_S)
    chain.play(TWO, Act(INIT, "hang"))
    async with chain.connected():
        assert await chain.ask("device=1") == ""
        assert not (await chain.status())["node"]["inventory_confirmed"]
    chain.daemon.module("nvidia_uvm", "590.10")
    async with chain.connected():
        assert "another version of one of the kernel modules" in chain.daemon.wait_logged("does not match the node")
        assert "the driver has not answered yet" in await chain.ask("device=1")
    chain.daemon.module("nvidia_uvm", DRIVER)
    chain.play(TWO, Act(HANDLE, "fail", 15, gpu=1))
    async with chain.connected():
        await chain.until("NVML's word", "device=1", "(15)")
        assert await chain.ask("device=0") == ""


@pytest.mark.parametrize("lost", ["the snapshot's last second", "the health file"])
async def test_who_dies_behind_an_xid_offers_a_bad_gpu_to_nobody(folder: Path, lost: str) -> None:
    """The health file is written with the verdict, the snapshot up to a second later: each of them holds."""
    chain = Chain(folder, TWO, events="all")
    snapshot = chain.launch.state / SNAPSHOT_FILE
    async with chain.connected(killed=True):
        await chain.until("a grant", "device=1")
        await until("a snapshot", snapshot.exists, PATIENCE_S)
        await listens(chain)
        chain.play(TWO, Act(INIT, "hang"))
        happen(chain.root, 1, EventType.XID, 79)
        await until("the verdict", lambda: "GPU health changed" in chain.daemon.log(), PATIENCE_S)
        if lost == "the health file":
            await until("the next snapshot", lambda: b"XID 79" in snapshot.read_bytes(), PATIENCE_S)
        chain.daemon.kill()
    if lost == "the health file":
        snapshot.with_name(HEALTH_FILE).unlink()
    async with chain.connected():
        assert "XID 79" in await chain.ask("device=1")
        assert await chain.ask("device=0") == ""
        assert not (await chain.status())["node"]["inventory_confirmed"]


async def test_a_module_that_comes_and_goes_is_a_look_at_once(folder: Path) -> None:
    """What the kernel shows is looked at each second, beside its messages."""
    chain = Chain(folder, TWO, refresh_s=3600)
    async with chain.running():
        looks = await chain.at_rest()
        chain.daemon.unload()
        await until("a look", lambda: chain.looks() > looks, PATIENCE_S)
        looks = await chain.at_rest()
        chain.daemon.load(DRIVER)
        await until("a look", lambda: chain.looks() > looks, PATIENCE_S)
        await chain.until("grants again", "device=0")
