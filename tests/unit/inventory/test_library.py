"""Where the library is looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nri_gpu.inventory.library import NVML, find_library, library_dirs, search_folders

MACHINE = os.uname().machine
ELF64 = b"\x7fELF\x02rest"
ELF32 = b"\x7fELF\x01rest"


def place(root: Path, folder: str, content: bytes = ELF64) -> Path:
    path = root / folder / NVML
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("folder", library_dirs(MACHINE))
def test_every_folder_is_searched(tmp_path: Path, folder: str) -> None:
    path = place(tmp_path, folder)
    assert find_library(tmp_path) == path


def test_the_order_is_that_of_the_list(tmp_path: Path) -> None:
    place(tmp_path, "lib64")
    first = place(tmp_path, "usr/lib64")
    assert find_library(tmp_path) == first


def test_other_machines_have_other_folders() -> None:
    assert "usr/lib/aarch64-linux-gnu/nvidia/current" in library_dirs("aarch64")


@pytest.mark.parametrize("content", [ELF32, b"", b"not a library"], ids=["32 bit", "empty", "text"])
def test_what_cannot_be_loaded_is_passed_over(tmp_path: Path, content: bytes) -> None:
    place(tmp_path, "usr/lib64", content)
    assert find_library(tmp_path) is None
    good = place(tmp_path, "lib64")
    assert find_library(tmp_path) == good


def test_a_link_out_of_the_root_is_passed_over(tmp_path: Path) -> None:
    elsewhere = place(tmp_path / "host", "usr/lib64")
    root = tmp_path / "root"
    (root / "usr/lib64").mkdir(parents=True)
    (root / "usr/lib64" / NVML).symlink_to(elsewhere)
    assert find_library(root) is None


def test_dangling_and_circular_links_are_passed_over(tmp_path: Path) -> None:
    for folder, target in (("usr/lib64", "absent"), ("lib64", NVML)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / NVML).symlink_to(target)
    assert find_library(tmp_path) is None


def test_a_driver_root_may_itself_be_a_link(tmp_path: Path) -> None:
    place(tmp_path / "real", "lib64")
    root = tmp_path / "root"
    root.symlink_to("real")
    assert find_library(root) == root / "lib64" / NVML


def test_the_folders_tried_are_named(tmp_path: Path) -> None:
    assert str(tmp_path / "usr/lib64") in map(str, search_folders(tmp_path))
