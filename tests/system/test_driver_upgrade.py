"""NVML's children while a package manager replaces the driver: the loader takes the staged library of the module."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from msgspec import Struct

from nri_gpu.cli.explain_command import node_snapshot
from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.driver.driver_scan import scan
from nri_gpu.driver.manifest import staged_driver, staged_library
from nri_gpu.driver.stage import stage
from nri_gpu.health.event_child import EventChild, EventSink
from nri_gpu.inventory.nvml_child import NvmlChild
from nri_gpu.policy.model import DriverSettings, Policy
from tests.support.driver_root import put_libraries
from tests.support.files import write_files
from tests.support.nvml import Act, FakeGpu, build_fake_nvml
from tests.support.nvml.build import LIB_DIR
from tests.support.running import running
from tests.support.scripted_runtime import until
from tests.system.chain import DRIVER, LISTENER, PATIENCE_S, TWO, Chain

OLD, NEW = "570.26", "580.95.05"
GPU = FakeGpu(uuid="GPU-0b200000-0000-4000-8000-000000000000")
MISMATCH = Act("nvmlInitWithFlags", "fail", 18)


class Upgrade(Struct, frozen=True):
    """A host whose module is old. staged: the folder of the old driver's staged libraries."""

    root: Path
    sysfs: Path
    stage_dir: Path
    staged: Path

    def unpack(self, *, half: bool = False) -> None:
        """Replace the files. half: nothing is there yet."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        if not half:
            build_fake_nvml(self.root, [GPU], [MISMATCH], driver=NEW)
            put_libraries(self.root, LIB_DIR, NEW, ("libcuda",))

    def child(self, stage_dir: Path | str) -> NvmlChild:
        return NvmlChild(str(self.root), sysfs=str(self.sysfs), stage_dir=str(stage_dir))


@pytest.fixture
def upgrade(tmp_path: Path) -> Upgrade:
    root = put_libraries(build_fake_nvml(tmp_path / "root", [GPU], driver=OLD), LIB_DIR, OLD, ("libcuda",))
    write_files(tmp_path / "sys", {"module/nvidia/version": f"{OLD}\n"})
    stage(scan(root), tmp_path / "stage")
    library = staged_library(tmp_path / "stage", OLD, "libnvidia-ml.so.1")
    assert library
    shutil.copy(root / LIB_DIR / "fake-nvml.conf", library.parent)
    return Upgrade(root, tmp_path / "sys", tmp_path / "stage", library.parent)


def mapped(pid: int | None) -> set[str]:
    """The files of NVML that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "libnvidia-ml" in line}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("runs", [False, True])
async def test_inventory_goes_on_by_the_staged_library(upgrade: Upgrade, *, half: bool, runs: bool) -> None:
    child = upgrade.child(upgrade.stage_dir)
    if runs:  # before and after
        await child.refresh()
        assert mapped(child.pid) == {str(upgrade.root / LIB_DIR / f"libnvidia-ml.so.{OLD}")}
    upgrade.unpack(half=half)
    inventory = await child.refresh()
    assert (inventory.driver_version, [gpu.uuid for gpu in inventory.gpus]) == (OLD, [GPU.uuid])
    assert mapped(child.pid) == {str(upgrade.staged / f"libnvidia-ml.so.{OLD}")}
    await child.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda at: (at.staged / f"libnvidia-ml.so.{OLD}").unlink(), "is 580.95.05 and the loaded kernel module is"),
        (lambda at: write_files(at.sysfs, {"module/nvidia/version": "590.10\n"}), "kernel module is 590.10"),
    ],
    ids=["an incomplete generation", "another module"],
)
async def test_what_does_not_fit_is_not_loaded(upgrade: Upgrade, spoil: object, words: str) -> None:
    upgrade.unpack()
    spoil(upgrade)  # type: ignore[operator]
    child = upgrade.child(upgrade.stage_dir)
    with pytest.raises(InventoryError, match=words):
        await child.refresh()
    await child.close()


def test_explain_has_the_files_that_the_daemon_serves(upgrade: Upgrade) -> None:
    (upgrade.root / LIB_DIR / f"libcuda.so.{OLD}").unlink()
    driver = DriverSettings(root=str(upgrade.root), stage_dir=str(upgrade.stage_dir))
    assert node_snapshot(None, Policy(driver=driver)).driver == staged_driver(upgrade.stage_dir, OLD) is not None


async def test_a_module_that_changed_gets_the_roots_library(upgrade: Upgrade) -> None:
    upgrade.unpack()
    child = upgrade.child(upgrade.stage_dir)
    await child.refresh()
    write_files(upgrade.sysfs, {"module/nvidia/version": f"{NEW}\n"})
    build_fake_nvml(upgrade.root, [GPU], driver=NEW)
    assert (await child.refresh()).driver_version == NEW
    assert mapped(child.pid) == {str(upgrade.root / LIB_DIR / f"libnvidia-ml.so.{NEW}")}
    await child.close()


async def test_health_goes_on_by_the_staged_library(upgrade: Upgrade) -> None:
    upgrade.unpack()
    found: list[GpuEvent] = []
    sink = EventSink(found.append, lambda: None)
    child = EventChild(upgrade.root, (), sink, sysfs=str(upgrade.sysfs), stage_dir=str(upgrade.stage_dir))
    child.listen(frozenset({"0000:10:00.0"}))
    async with running(child.run()):
        while not found:  # until the event set is there
            with (upgrade.staged / "fake-nvml.events").open("a", encoding="ascii") as events:
                events.write(f"0 {EventType.XID} 79 {2**32 - 1} {2**32 - 1}\n")
            await asyncio.sleep(0.05)
    assert found[0] == GpuEvent(GPU.uuid, EventType.XID, 79)


KEPT = "driver files do not fit the kernel module: containers get the staged ones that do"


async def test_a_node_grants_while_its_driver_is_unpacked_and_after_a_restart(tmp_path: Path) -> None:
    """The daemon itself, with both children, from the old driver's last file to the new module."""
    chain = Chain(tmp_path, TWO, events="all")
    async with chain.running():
        library = staged_library(chain.launch.base / "drivers", DRIVER, "libnvidia-ml.so.1")
        assert library
        shutil.copy(chain.root / LIB_DIR / "fake-nvml.conf", library.parent)
        shutil.rmtree(chain.root)
        chain.root.mkdir()
        await asyncio.to_thread(chain.daemon.wait_logged, KEPT)
        await chain.goes_on()
    async with chain.running():
        await until("both children", lambda: chain.children() and chain.children(LISTENER), PATIENCE_S)
        children = chain.children() + chain.children(LISTENER)
        await until("their library", lambda: all(mapped(each) == {str(library)} for each in children), PATIENCE_S)
        build_fake_nvml(chain.root, TWO, [MISMATCH], driver="590.10")
        put_libraries(chain.root, LIB_DIR, "590.10", ("libcuda",))
        await asyncio.to_thread(chain.daemon.wait_logged, "are 590.10, and the module is")
        await chain.goes_on()
        status = await chain.status()
        assert (status["node"]["inventory_fault"], status["node"]["driver_fault"]) == ("", "")
    assert chain.refused == []
    async with chain.connected():
        await chain.until("a grant", "device=0")
        build_fake_nvml(chain.root, TWO, driver="590.10")
        chain.daemon.unload()
        chain.daemon.load("590.10")
        await chain.shown("the new driver", lambda said: said["node"]["driver_generation"].startswith("590.10-"))
        await chain.until("a grant", "device=0")
