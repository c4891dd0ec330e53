"""Small files: who else could have used them, who has them locked, and nothing that hangs or leads elsewhere."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.system.storage import (
    NotPrivateError,
    boot_id,
    lock_holder,
    open_lock,
    read_private,
    signature,
    text_of,
    try_lock,
    write_whole,
)
from tests.support.little import small_files

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def test_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    assert text_of(tmp_path / "none") is None
    assert boot_id(tmp_path / "none") == ""
    assert len(boot_id()) == 36


def test_a_pipe_or_a_folder_in_the_place_of_a_file_hangs_and_leaks_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    piped(file)
    before = descriptors()
    assert (text_of(file), text_of(tmp_path)) == ("", None)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda file: file.chmod(0o640), "its mode 0640 lets users other than root use it"),
        (lambda file: os.chown(file, 65534, -1), "it belongs to user 65534"),
        (piped, "it is not a regular file"),
    ],
    ids=["readable", "another owner", "fifo"],
)
def test_only_what_is_ours_alone_is_read(tmp_path: Path, make: Callable[[Path], object], fault: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"secret")
    file.chmod(0o600)
    assert read_private(file, 3) == b"sec"
    make(file)
    gc.collect()  # closes what earlier tests have left
    opened = descriptors()
    with pytest.raises(NotPrivateError) as caught:
        read_private(file, 3)
    assert caught.value.strerror == fault
    assert descriptors() == opened


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("other"), Path.mkdir])
def test_a_lock_is_a_file_of_ours(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "lock")
    with pytest.raises(OSError, match=r"regular file|symbolic links|Is a directory"):
        open_lock(tmp_path / "lock")
    assert not (tmp_path / "other").exists()


def test_who_has_a_lock_is_told(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.write_text("")
    file.chmod(0o666)
    other = subprocess.Popen([sys.executable, "-c", HOLD, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout
    other.stdout.readline()
    lock = open_lock(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert not try_lock(lock)
    assert lock_holder(lock) == f" (pid {other.pid})"
    other.communicate(b"\n")
    assert try_lock(lock)
    assert lock_holder(lock) == f" (pid {os.getpid()})"
    os.close(lock)


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_whole_and_whoever_has_the_old_one_keeps_it(tmp_path: Path, *, sync: bool) -> None:
    file = tmp_path / "note"
    file.write_text("old")
    (tmp_path / ".note.new").symlink_to(tmp_path / "elsewhere")  # left behind, or laid as a trap
    umask = os.umask(0o077)
    try:
        with file.open() as opened:
            write_whole(file, b"new", 0o644, sync=sync)
            assert opened.read() == "old"
    finally:
        os.umask(umask)
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_file_that_is_not_written_leaves_no_draft(tmp_path: Path) -> None:
    """It would keep the last room, and nobody knows it."""
    (tmp_path / "note").write_text("old")
    with small_files(4096), pytest.raises(OSError, match="File too large"):
        write_whole(tmp_path / "note", bytes(8192))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("note", "old")]


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "gone" / "note", b"")


def test_the_signature_differs_once_the_content_does(tmp_path: Path) -> None:
    file = tmp_path / "note"
    assert signature(file) is None
    write_whole(file, b"one")
    first = signature(file)
    assert first == signature(file)
    write_whole(file, b"two")
    assert signature(file) != first
    (tmp_path / "link").symlink_to(file)
    assert signature(tmp_path / "link") == signature(file) != signature(tmp_path / "link", follow=False)
