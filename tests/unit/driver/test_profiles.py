"""Application profiles: a file for each set of GPUs, whole, for everybody to read, for the GPUs that are there."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path

import pytest

from nri_gpu.domain.edits import PROFILE_GPUS_MAX
from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.profiles import ProfileController, planned_profiles, profile_text, write_profiles
from nri_gpu.system.selinux import READ_ONLY, label_of
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.running import running
from tests.support.scripted_runtime import until

EIGHT = range(8)


def test_confined_containers_may_read_them(tmp_path: Path) -> None:
    write_profiles(tmp_path, range(2), label="")  # as an older version left them
    profiles = write_profiles(tmp_path, range(2), label=READ_ONLY)
    folder = Path(profiles.folder)
    assert {label_of(path) for path in (folder, *folder.iterdir())} == {READ_ONLY}


def test_every_set_of_eight_gpus_has_its_file_for_all_to_read(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        profiles = write_profiles(tmp_path, EIGHT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path(profiles.folder).stat().st_mode) == 0o755
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


@pytest.mark.parametrize(
    ("minors", "fault"),
    [(range(PROFILE_GPUS_MAX + 1), "it has 9 GPUs"), ([0, 32], "/dev/nvidia32"), ([31], "")],
    ids=["more GPUs than there are files for", "a minor that has no bit", "the highest minor"],
)
def test_which_gpus_have_files(tmp_path: Path, minors: Sequence[int], fault: str) -> None:
    profiles = write_profiles(tmp_path, minors)
    assert profiles.minors == (frozenset() if fault else frozenset(minors))
    assert fault in profiles.fault


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file")
    with pytest.raises(DriverError, match="cannot be written below"):
        write_profiles(tmp_path, [0])
    (tmp_path / "profiles").unlink()
    tmp_path.chmod(0o777)
    with pytest.raises(DriverError, match="others than root can change it"):
        write_profiles(tmp_path, [0])


async def test_they_follow_the_gpus(tmp_path: Path) -> None:
    node_state = NodeState(make.inventory(()))
    controller = ProfileController(tmp_path, node_state)
    assert await controller.look()
    assert node_state.node.profiles is None
    for found in (make.gpus(2), make.gpus(3)):
        node_state.put_inventory(make.inventory(found))
        assert await controller.look()
        profiles = node_state.node.profiles
        assert profiles is not None
        assert profiles.minors == {gpu.minor_number for gpu in found}
        assert os.access(profiles.path(profiles.minors), os.R_OK)
    number = node_state.node.number
    assert await controller.look()
    node_state.put_inventory(make.inventory(()))  # a driver is being replaced
    assert await controller.look()
    assert (node_state.node.profiles, node_state.node.number) == (profiles, number + 1)


async def test_a_disk_that_refuses_is_said_and_tried_again(tmp_path: Path) -> None:
    blocker = tmp_path / "profiles"
    blocker.write_text("a file")
    node_state = NodeState(make.inventory())
    controller = ProfileController(tmp_path, node_state, retry_s=0.01)
    async with running(controller.run()):
        controller.again.set()
        await until("the fault", lambda: bool((known := node_state.node.profiles) and known.fault))
        blocker.unlink()
        await until("the files", lambda: bool((known := node_state.node.profiles) and known.minors))
