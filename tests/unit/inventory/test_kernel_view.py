"""A kernel_view shows each thing that comes and goes without NVML."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.inventory.kernel import HostFolders, kernel_view

MIG = "proc/driver/nvidia/capabilities/gpu0/mig"


@pytest.fixture
def places(tmp_path: Path) -> HostFolders:
    found = HostFolders(**{name: tmp_path / name for name in ("proc", "sys", "dev")})
    (tmp_path / MIG / "gi1/ci0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "proc/devices").write_text("Character devices:\n195 nvidia\n")
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/nvidia0").touch()
    return found


def _node_of_another_major(base: Path) -> None:
    (base / "dev/nvidia0").unlink()
    os.mknod(base / "dev/nvidia0", 0o600 | 0o020000, os.makedev(1, 3))


CHANGES: dict[str, Callable[[Path], object]] = {
    "an instance is made": lambda base: (base / MIG / "gi2").mkdir(),
    "a compute instance goes": lambda base: (base / MIG / "gi1/ci0").rmdir(),
    "a GPU leaves": lambda base: shutil.rmtree(base / "proc/driver/nvidia/gpus/0000:01:00.0"),
    "a module is unloaded": lambda base: (base / "sys/module/nvidia").rmdir(),
    "a module comes": lambda base: (base / "sys/module/nvidia_uvm").mkdir(),
    "a major comes": lambda base: (base / "proc/devices").write_text(
        "Character devices:\n195 nvidia\n508 nvidia-uvm\n"
    ),
    "a node comes": lambda base: (base / "dev/nvidia1").touch(),
    "a render node comes": lambda base: (base / "dev/dri/renderD128").touch(),
    "a folder of capabilities comes": lambda base: (base / "dev/nvidia-caps/nvidia-cap3").mkdir(parents=True),
    "a node has another number": _node_of_another_major,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_differs(places: HostFolders, tmp_path: Path, change: Callable[[Path], object]) -> None:
    before = kernel_view(places)
    assert kernel_view(places) == before
    change(tmp_path)
    assert kernel_view(places) != before


def test_other_peoples_devices_do_not_matter(places: HostFolders, tmp_path: Path) -> None:
    before = kernel_view(places)
    (tmp_path / "dev/loop7").touch()
    (tmp_path / "sys/module/loop").mkdir()
    assert kernel_view(places) == before


def test_a_machine_without_any_of_it(tmp_path: Path) -> None:
    nowhere = HostFolders(**{name: tmp_path / name for name in ("proc", "sys", "dev")})
    assert kernel_view(nowhere) == kernel_view(nowhere)
