"""Application profiles: a file for each set of GPUs, whole, for everybody to read, and for no more GPUs than it can."""

from __future__ import annotations

import json
import os
import stat
from itertools import chain, combinations
from pathlib import Path

import pytest

from nri_gpu.domain.edits import PROFILE_GPUS_MAX
from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.profiles import planned_profiles, profile_text, write_profiles

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
