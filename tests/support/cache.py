"""The cache folder of tests, demo and bench: $NRI_GPU_CACHE, else nri-gpu below $XDG_CACHE_HOME or ~/.cache.

Copy it to a machine without a network and it serves there. Delete it to refresh.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the demo runs without it
    import pytest


def cache_folder() -> Path:
    if chosen := os.environ.get("NRI_GPU_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "nri-gpu"


def kept(folder: Path, make: Callable[[Path], object], is_current: Callable[[], bool] | None = None) -> Path:
    """Return `folder`, which `make` has filled once. Whoever is cut leaves nothing that looks whole.

    is_current: whether what is there may stay; it may, when none is given.
    """
    there = is_current or folder.exists
    if there():  # also for a process that may not write there
        return folder
    with one_at_a_time(folder.parent / f"{folder.name}.lock"):
        if not there():
            unfinished = folder.parent / f"{folder.name}.unfinished"
            for old in (unfinished, folder):
                shutil.rmtree(old, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


def once(factory: pytest.TempPathFactory, worker_id: str, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder of this run that the first worker to want it makes, for all of them."""
    own = factory.getbasetemp()
    return kept((own if worker_id == "master" else own.parent) / name, make)


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold a lock that parallel test workers wait for: they want the same thing in the same second."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
