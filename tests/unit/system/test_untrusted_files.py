"""Files that others may have replaced by something else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.system.untrusted_files import folders_in, opened_folder, read_in


def test_a_file_below_a_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"text")
    os.utime(tmp_path / "inner" / "file", (7, 7))
    with opened_folder(tmp_path) as above, opened_folder("inner", above) as folder:
        assert read_in(folder, "file", 4) == (b"text", 7.0)


MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link": (lambda path: path.symlink_to("/etc/hostname"), "it is a link"),
    "a pipe that nobody writes": (os.mkfifo, "it is no regular file"),
    "a folder": (Path.mkdir, "it is no regular file"),
    "too long": (lambda path: path.write_bytes(b"12345"), "it has 5 bytes, more than 4"),
    "nothing": (lambda _: None, "No such file"),
}


@pytest.mark.parametrize(("make", "why"), MADE.values(), ids=MADE.keys())
def test_what_is_not_read(tmp_path: Path, make: Callable[[Path], object], why: str) -> None:
    make(tmp_path / "file")
    with opened_folder(tmp_path) as folder, pytest.raises(OSError, match=why):
        read_in(folder, "file", 4)


def test_a_link_is_a_folder_by_its_path_alone(tmp_path: Path) -> None:
    """The path is of a folder that only root could replace, and /var/run is a link on every host."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with opened_folder(tmp_path / "link"):
        pass
    refused = pytest.raises(NotADirectoryError, match="a link, which is not followed")
    with opened_folder(tmp_path) as above, refused, opened_folder("link", above):
        pass


def test_all_folders_in_one(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "file").touch()
    with opened_folder(tmp_path) as above:
        found = [(name, folder) for name, folder in folders_in(above)]
    assert [name for name, _ in found] == ["a", "b"]
    for _, folder in found:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(folder)
