"""Staged drivers that no container of Docker, podman and the like can use any more, and nobody will start one with.

Who has a folder mounted cannot be asked: those runtimes tell us nothing, and the sandbox of our unit hides their
processes. So a folder goes only when all of this holds: no specification names it; it was staged before this boot; and
its driver is of another version than the kernel module that is loaded, so that what it holds works for nobody.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

from nri_gpu.cdi_file import STANDARD, SUFFIXES, SpecFile
from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.gpu import Inventory
from nri_gpu.driver.stage import GENERATION, prune_where
from nri_gpu.verbs.cdi_spec import Wish


def booted_at() -> float:
    """When the machine was, in seconds since the epoch."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def remove_old(wish: Wish, file: SpecFile, inventory: Inventory) -> tuple[str, ...]:
    """Remove them, once `file` is written. Returns their names; none on a simulated node, which has no kernel module.

    Raises: DriverError: a folder cannot be removed, or a specification that may name one not read.
    """
    version = inventory.driver_version
    if inventory.simulated or not version or not wish.stage_dir.is_dir():
        return ()
    base = wish.stage_dir.resolve()
    try:
        named = frozenset(_named(base, {folder.resolve() for folder in (file.path.parent, *STANDARD)}))
        before = booted_at()
        return prune_where(base, lambda folder: _is_old(folder, version, before) and folder.name not in named)
    except OSError as error:
        raise DriverError(f"old driver files stay in {base}: {error}") from error


def _is_old(folder: Path, version: str, before: float) -> bool:
    return folder.name.partition("-")[0] != version and folder.stat().st_mtime < before


def _named(base: Path, folders: Iterable[Path]) -> Iterable[str]:
    generation = re.compile(rf"{re.escape(str(base))}/({GENERATION.pattern})")
    paths = (path for folder in folders for suffix in SUFFIXES for path in folder.glob(f"*{suffix}"))
    return (found for path in paths for found in generation.findall(path.read_text(errors="replace")))
