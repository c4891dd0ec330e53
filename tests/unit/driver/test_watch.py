"""A look tells that the driver changed, by whatever way its files were replaced; and keeps still where it did not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.driver.scan import changed, folder_signatures, scan
from tests.support.driver_root import make_driver_root, write_library

V = "580.95.05"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A link to a root, as a driver container's can be."""
    make_driver_root(tmp_path / "one", V)
    make_driver_root(tmp_path / "two", V)
    (tmp_path / "root").symlink_to("one")
    return tmp_path / "root"


def swap_link(root: Path) -> None:
    fresh = root.with_name("fresh")
    fresh.symlink_to("two")
    fresh.rename(root)


def swap_folder(root: Path) -> None:
    (root.parent / "one").rename(root.parent / "old")
    (root.parent / "two").rename(root.parent / "one")


def write_over(root: Path) -> None:
    path = root / f"lib64/libcuda.so.{V}"
    before = path.stat()
    path.write_bytes(path.read_bytes() + b"x")
    os.utime(path.parent, ns=(path.parent.stat().st_mtime_ns,) * 2)
    assert path.stat().st_ino == before.st_ino


CHANGES: dict[str, Callable[[Path], object]] = {
    "the root's link": swap_link,
    "the root itself": swap_folder,
    "a file written over": write_over,
    "a file gone": lambda root: (root / f"lib64/libcuda.so.{V}").unlink(),
    "a file more": lambda root: write_library(root / "lib64/libnvidia-new.so.1", "libnvidia-new.so.1"),
    "a program gone": lambda root: (root / "bin/nvidia-smi").unlink(),
    "a folder more": lambda root: (root / "usr/lib64").mkdir(parents=True),
    "everything gone": lambda root: root.unlink(),
    "a file that others may write": lambda root: (root / f"lib64/libcuda.so.{V}").chmod(0o777),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_shows(root: Path, change: Callable[[Path], object]) -> None:
    before, found = folder_signatures(root), scan(root)
    assert not changed(root, (), before, found)
    change(root)
    assert changed(root, (), before, found)


def test_a_root_that_is_not_there_changes_by_appearing(tmp_path: Path) -> None:
    before = folder_signatures(tmp_path / "root")
    assert not changed(tmp_path / "root", (), before, None)
    make_driver_root(tmp_path / "root", V)
    assert changed(tmp_path / "root", (), before, None)
