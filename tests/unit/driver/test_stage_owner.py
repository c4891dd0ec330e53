"""A folder of staged drivers has one owner: for its life, and between two of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.stage_owner import OWNER_FILE, NotReleasedError, StageOwner, StageTakenError, owner_of
from tests.support.little import small_files


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "drivers"


def test_it_is_had_until_it_is_closed_and_taken_again_and_again(tmp_path: Path, base: Path) -> None:
    owner = StageOwner(base, tmp_path / "state")
    assert not owner.held
    owner.take()
    opened = len(list(Path("/proc/self/fd").iterdir()))
    owner.take()
    assert owner.held
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    assert (base / OWNER_FILE).stat().st_mode & 0o777 == 0o600
    assert owner_of(base) == str(tmp_path / "state")
    owner.close()
    assert not owner.held
    assert owner_of(base) == str(tmp_path / "state")


def test_a_name_that_a_full_disk_kept_out_is_written_when_it_is_taken_again(tmp_path: Path, base: Path) -> None:
    owner = StageOwner(base, tmp_path / "state")
    with small_files(0):
        owner.take()
    assert (owner.held, owner_of(base)) == (True, "")
    owner.take()
    assert owner_of(base) == str(tmp_path / "state")
    owner.close()


def test_a_second_daemon_is_told_whose_it_is(tmp_path: Path, base: Path) -> None:
    first, second = StageOwner(base, tmp_path / "first"), StageOwner(base, tmp_path / "second")
    first.take()
    with pytest.raises(StageTakenError) as alive:
        second.take()
    assert not isinstance(alive.value, NotReleasedError)
    assert str(alive.value) == (
        f"stage folder {base} belongs to another nri-gpu (pid {os.getpid()}), with state folder {tmp_path}/first, and "
        "they would remove each other's files: set another driver.stage_dir for this one"
    )
    first.close()
    with pytest.raises(StageTakenError, match=rf"whose containers may .* for this one; .* remove {base}/\.owner$"):
        second.take()
    first.take()
    first.close()
    (base / OWNER_FILE).unlink()
    second.take()
    second.close()


def test_a_successor_waits_for_its_predecessor(tmp_path: Path, base: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "link").symlink_to("state")
    before, after = StageOwner(base, tmp_path / "state"), StageOwner(base, tmp_path / "link")
    before.take()
    with pytest.raises(NotReleasedError, match=rf"the previous nri-gpu \(pid {os.getpid()}\) still uses"):
        after.take()
    before.close()
    after.take()
    after.close()


def test_the_name_is_as_young_as_the_boot(tmp_path: Path, base: Path) -> None:
    first, second = StageOwner(base, tmp_path / "first"), StageOwner(base, tmp_path / "second")
    first.take()
    first.close()
    (base / OWNER_FILE).write_text(f"another boot\n{tmp_path}/first\n")
    assert owner_of(base) == ""
    second.take()
    assert owner_of(base) == str(tmp_path / "second")
    second.close()


def test_a_folder_that_was_removed_under_its_owner_is_taken_anew(tmp_path: Path, base: Path) -> None:
    owner, other = StageOwner(base, tmp_path / "state"), StageOwner(base, tmp_path / "other")
    owner.take()
    (base / OWNER_FILE).unlink()
    owner.take()
    with pytest.raises(StageTakenError):
        other.take()
    owner.close()


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path, base: Path) -> None:
    base.mkdir()
    (base / OWNER_FILE).symlink_to("elsewhere")
    with pytest.raises(DriverError, match=rf"{base} cannot be used: Too many levels of symbolic links"):
        StageOwner(base, tmp_path).take()
    assert not (base / "elsewhere").exists()
