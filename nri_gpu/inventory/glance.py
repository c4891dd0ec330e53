"""A glance at what the kernel shows of GPUs without asking the driver: cheap enough for every second.

Directories of /proc, /sys and /dev are listed, and no file of the driver's own is read: those may wait for a driver
that hangs. Two glances that are equal say nothing of what only NVML knows (a lost GPU, a MIG mode that is pending).
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import InventoryError
from nri_gpu.inventory.devices import host_majors

MODULES: Final = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
NODE_FOLDERS: Final = ("", "nvidia-caps", "nvidia-caps-imex-channels", "dri")
CAPABILITIES_DEPTH: Final = 4  # gpuN / mig / giN / ciN


class Places(Struct, frozen=True):
    """Where the kernel shows itself; elsewhere in tests."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")


def glance(places: Places) -> Hashable:
    """What is there: modules, GPUs, MIG instances, device nodes, majors. Up to a millisecond with MIG on eight GPUs."""
    try:
        majors = host_majors(str(places.proc / "devices"))
    except InventoryError:
        majors = None
    # A module that was loaded anew has another inode: a reload between two glances shows.
    modules = tuple(_inode(places.sys / "module" / name) for name in MODULES)
    gpus = tuple(_names(places.proc / "driver/nvidia/gpus"))
    instances = tuple(_tree(places.proc / "driver/nvidia/capabilities", CAPABILITIES_DEPTH))
    return modules, majors, gpus, instances, tuple(_nodes(places.dev))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is wanted, each second
    except OSError:
        return []


def _tree(folder: Path, depth: int) -> Iterator[str]:
    """Instances cannot be watched by inotify: nobody writes to procfs, entries just are there or are not."""
    try:
        with os.scandir(folder) as entries:
            below = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in below:
        yield path
        if depth > 1:
            yield from _tree(Path(path), depth - 1)


def _nodes(dev: Path) -> Iterator[tuple[str, int]]:
    """NVIDIA's nodes with their numbers: a node that was made again under another major is another one."""
    for below in NODE_FOLDERS:
        folder = dev / below
        for name in _names(folder):
            if below or name.startswith("nvidia"):
                yield f"{below}/{name}", _number(folder / name)


def _number(path: Path) -> int:
    try:
        return path.lstat().st_rdev
    except OSError:
        return 0


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
