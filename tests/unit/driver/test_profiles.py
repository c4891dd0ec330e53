"""Application profiles: a file for each set of GPUs, whole, for everybody to read, for the GPUs that are there."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from itertools import chain, combinations
from pathlib import Path

import pytest

from nri_gpu.domain.edits import PROFILE_GPUS_MAX
from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.profiles import ProfileController, planned_profiles, profile_text, write_profiles
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.scripted_runtime import until

EIGHT = range(8)


def test_every_set_of_eight_gpus_has_its_file(tmp_path: Path) -> None:
    profiles = write_profiles(tmp_path, EIGHT)
    assert (profiles.minors, profiles.fault) == (frozenset(EIGHT), "")
    sets = [*chain.from_iterable(combinations(EIGHT, size) for size in range(1, 9))]
    assert len(sets) == len(list(Path(profiles.folder).iterdir())) == 255
    for some in sets:
        file = Path(profiles.path(some))
        document = json.loads(file.read_text())
        assert document["profiles"] == [
            {"name": "_container_", "settings": ["EGLVisibleDGPUDevices", sum(2**minor for minor in some)]}
        ]
        assert document["rules"] == [{"pattern": [], "profile": "_container_"}]
        assert stat.S_IMODE(file.stat().st_mode) == 0o444


def test_others_than_root_can_read_them_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        profiles = write_profiles(tmp_path, [3])
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path(profiles.folder).stat().st_mode) == 0o755
    assert stat.S_IMODE(Path(profiles.path([3])).stat().st_mode) == 0o444


def test_again_changes_nothing_and_mends_what_is_broken(tmp_path: Path) -> None:
    profiles = write_profiles(tmp_path, [0, 1])
    kept, broken = Path(profiles.path([0])), Path(profiles.path([1]))
    inode = kept.stat().st_ino
    broken.unlink()
    broken.write_text("half")
    (broken.parent / f".{broken.name}.new").write_text("left by somebody who died")
    assert write_profiles(tmp_path, [0, 1]) == profiles == planned_profiles(tmp_path, [0, 1])
    assert kept.stat().st_ino == inode
    assert broken.read_text() == profile_text([1])


def test_no_more_gpus_than_there_are_files_for(tmp_path: Path) -> None:
    profiles = write_profiles(tmp_path, range(PROFILE_GPUS_MAX + 1))
    assert (profiles.minors, "it has 9 GPUs" in profiles.fault) == (frozenset(), True)


def test_no_minor_that_has_no_bit(tmp_path: Path) -> None:
    assert write_profiles(tmp_path, [31]).minors == {31}
    profiles = write_profiles(tmp_path, [0, 32])
    assert (profiles.minors, "/dev/nvidia32" in profiles.fault) == (frozenset(), True)


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(DriverError, match="others than root can change it"):
        write_profiles(tmp_path, [0])


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file")
    with pytest.raises(DriverError, match="cannot be written below"):
        write_profiles(tmp_path, [0])


def test_they_follow_the_gpus(tmp_path: Path) -> None:
    node_state = NodeState(make.inventory(()))
    controller = ProfileController(tmp_path, node_state)
    assert asyncio.run(controller.look())
    assert node_state.node.profiles is None
    for found in (make.gpus(2), make.gpus(3)):
        node_state.put_inventory(make.inventory(found))
        assert asyncio.run(controller.look())
        profiles = node_state.node.profiles
        assert profiles is not None
        assert profiles.minors == {gpu.minor_number for gpu in found}
        assert Path(profiles.path(profiles.minors)).is_file()
    number = node_state.node.number
    assert asyncio.run(controller.look())
    node_state.put_inventory(make.inventory(()))  # a driver is being replaced
    assert asyncio.run(controller.look())
    assert (node_state.node.profiles, node_state.node.number) == (profiles, number + 1)


def test_a_disk_that_refuses_is_said_and_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        blocker = tmp_path / "profiles"
        blocker.write_text("a file")
        node_state = NodeState(make.inventory())
        controller = ProfileController(tmp_path, node_state, retry_s=0.01)
        running = asyncio.create_task(controller.run())
        controller.look_again()
        await until("the fault", lambda: bool((known := node_state.node.profiles) and known.fault))
        blocker.unlink()
        await until("the files", lambda: bool((known := node_state.node.profiles) and known.minors))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
