import errno
import os
import stat
from pathlib import Path

import pytest

from nri_gpu.driver.stage import copy, hard_link, place, reflink


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "original"
    path.write_bytes(os.urandom(100_000))
    path.chmod(0o644)
    os.utime(path, ns=(5, 1_700_000_000_123_456_789))
    return path


def other_mount(original: Path, target: Path) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), original, None, target)


def test_a_copy_is_a_file_of_its_own(original: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    copy(original, target)
    found = target.stat()
    assert target.read_bytes() == original.read_bytes()
    assert found.st_ino != original.stat().st_ino
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o555, original.stat().st_mtime_ns)


def test_a_hard_link_leaves_the_original_as_it_is(original: Path, tmp_path: Path) -> None:
    hard_link(original, tmp_path / "target")
    assert (tmp_path / "target").stat().st_ino == original.stat().st_ino
    assert stat.S_IMODE(original.stat().st_mode) == 0o644


def test_a_file_not_everybody_may_read_is_not_linked(original: Path, tmp_path: Path) -> None:
    original.chmod(0o700)
    with pytest.raises(PermissionError):
        hard_link(original, tmp_path / "target")
    place(original, tmp_path / "target", (hard_link, copy))
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o555


def test_a_reflink_is_whole_or_nothing(original: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    try:
        reflink(original, target)
    except OSError as error:  # a file system without them, which is most
        assert error.errno in {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL}
        assert not target.exists()
    else:
        assert target.read_bytes() == original.read_bytes()


def test_the_next_way_is_tried(original: Path, tmp_path: Path) -> None:
    place(original, tmp_path / "target", (other_mount, copy))
    assert (tmp_path / "target").read_bytes() == original.read_bytes()


def test_the_last_way_says_what_is_wrong(original: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Invalid cross-device link"):
        place(original, tmp_path / "target", (reflink, other_mount))
    with pytest.raises(FileNotFoundError):
        place(tmp_path / "gone", tmp_path / "target", (reflink, hard_link, copy))
    assert not (tmp_path / "target").exists()


def test_nothing_is_left_open(original: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    for number, way in enumerate((reflink, hard_link, copy)):
        place(original, tmp_path / str(number), (way, copy))
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)
