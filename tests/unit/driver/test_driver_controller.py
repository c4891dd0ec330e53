"""The driver on the node_state follows the one on the disk and the kernel's module, and is never half of each."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.support.driver_root import put_libraries
from tests.support.running import running
from tests.support.scripted_runtime import until
from tests.unit.driver.host import NEW, OLD, DriverHost


@pytest.fixture
def host(tmp_path: Path) -> DriverHost:
    return DriverHost(tmp_path)


def test_a_new_driver_is_taken_up_once_its_module_is_loaded(host: DriverHost) -> None:
    old = host.driver()
    assert host.driver() is old  # nothing changed
    host.install(NEW)
    assert host.driver() == old
    assert host.staged() == {old.generation}
    host.module = NEW
    node = host.look()
    assert (node.driver and node.driver.version, node.module_version) == (NEW, NEW)
    assert host.module_changes == 1  # NVML has to be asked again
    assert host.staged() == {node.generation}


def test_a_module_that_is_ahead_of_its_files_shows_at_once(host: DriverHost) -> None:
    host.look()
    host.module = NEW
    node = host.look()
    assert (node.driver and node.driver.version, node.module_version) == (OLD, NEW)  # decide() refuses with both
    host.install(NEW)
    assert host.driver().version == NEW


def test_a_module_that_was_unloaded_is_not_one_that_never_was(tmp_path: Path) -> None:
    host = DriverHost(tmp_path)
    host.module = ""
    assert host.look().module_version is None
    host.module = OLD
    assert host.look().module_version == OLD
    assert host.module_changes == 0
    host.module = ""
    assert host.look().module_version == ""
    assert host.module_changes == 1


@pytest.mark.parametrize("what", ["compute/lib64/libcuda.so.1", "compute/bin/nvidia-cuda-mps-server", "compute", "."])
def test_staged_files_that_vanish_are_made_again(host: DriverHost, what: str) -> None:
    before = host.driver()
    gone = host.stage_dir / before.generation / what
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    after = host.driver()
    assert (after != before) is (what != ".")  # a folder that may be mounted somewhere is not written to again
    for tree in after.trees.values():
        assert all(path.exists() for path in Path(tree.path).rglob("*"))
        assert Path(tree.path, "lib64").is_dir()
    assert host.driver() is after


def test_what_failed_for_another_reason_is_tried_again_later(host: DriverHost) -> None:
    host.stage_dir.mkdir()
    host.stage_dir.chmod(0o777)
    failed = host.look()
    assert "users other than root can change it" in failed.driver_fault
    host.stage_dir.chmod(0o755)
    assert host.look() is failed
    host.now = 60
    assert host.driver().version == OLD


def test_of_two_drivers_that_of_the_loaded_module_is_staged(host: DriverHost) -> None:
    put_libraries(host.root, "usr/lib64", NEW)  # before lib64, where the old one lies
    assert host.driver().version == OLD
    host.module = NEW
    assert host.driver().version == NEW


def test_old_generations_go_with_the_last_container_that_has_them(host: DriverHost) -> None:
    old = host.driver().generation
    host.held = None  # the runtime has not told yet
    host.install(NEW)
    host.module = NEW
    new = host.driver().generation
    assert host.staged() == {old, new}
    host.held = frozenset({old})
    host.look()
    assert host.staged() == {old, new}
    host.held = frozenset()
    host.look()
    assert host.staged() == {new}


def test_a_simulated_node_takes_the_files_there_are_and_asks_no_kernel(tmp_path: Path) -> None:
    host = DriverHost(tmp_path, simulated=True)
    assert (host.driver().version, host.look().module_version) == (OLD, None)
    host.install(NEW)
    assert host.driver().version == NEW
    host.root.unlink()
    assert host.driver().generation == "simulated"


def test_of_two_daemons_on_one_folder_the_second_refuses_and_removes_nothing(host: DriverHost, tmp_path: Path) -> None:
    """Two runtimes on a host, each with a state folder: neither knows of the other's containers."""
    first = host.driver()
    second = host.another(tmp_path / "other")
    for version in (OLD, NEW):
        second.install(version)
        second.module = version
        node = second.look()
        assert node.driver is None
        assert f"{host.stage_dir} belongs to another nri-gpu (pid {os.getpid()})" in node.driver_fault
    host.controller.close()  # it is started again, and its containers go on
    second.controller.look_again()
    assert "whose containers may have its files mounted" in second.look().driver_fault
    assert host.staged() == {first.generation}
    simulated = host.another(tmp_path / "simulated", simulated=True)
    assert "set another driver.stage_dir for this one" in simulated.look().driver_fault


def test_a_successor_grants_by_the_snapshot_until_the_folder_passes_to_it(host: DriverHost) -> None:
    files = host.driver()
    fresh, knowing = host.another(host.base), host.another(host.base)
    assert "the previous nri-gpu" in fresh.look().driver_fault
    knowing.node_state.put_driver(files)
    knowing.held = frozenset()
    assert knowing.look().driver == files
    host.controller.close()
    assert knowing.driver() == files

    async def released() -> None:
        async with running(fresh.controller.run()):
            await asyncio.sleep(0)
            knowing.controller.close()
            await until("the files", lambda: fresh.node_state.node.driver == files)

    asyncio.run(released())
