"""Watches the driver's files cheaply: whether folders, or staged files, changed."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from nri_gpu.domain.node import DriverFiles
from nri_gpu.driver import table
from nri_gpu.driver.scan import FoundDriver
from nri_gpu.driver.stage import BINARIES, LIBRARIES, LIBRARIES_32
from nri_gpu.system.storage import signature

# Device, inode and time of change of each path; None where it does not exist. snapshot.json holds these.
Signatures = tuple[tuple[int, int, int] | None, ...]


def folder_signatures(driver_root: Path, library_dirs: Sequence[str] = ()) -> Signatures:
    """Signatures of the folders that a scan searches. Taken before a scan, they also show what changed during it."""
    name = platform.machine()
    machines = [each for each in (table.MACHINES.get(name), table.COMPATIBLE.get(name)) if each]
    libraries = [folder for machine in machines for folder in machine.folders]
    own = [folder.strip("/") for folder in library_dirs]
    return tuple(_signature(driver_root / folder) for folder in (*own, *libraries, *table.BINARY_FOLDERS))


def changed(driver_root: Path, library_dirs: Sequence[str], before: Signatures, found: FoundDriver | None) -> bool:
    """Whether a folder has other entries than before, or a file that was found has other content."""
    if folder_signatures(driver_root, library_dirs) != before:
        return True
    return found is not None and not all(file.source.unchanged() for file in found.files)


def staged_signatures(files: DriverFiles) -> Signatures:
    """Signatures of the folders that containers get, some hundred. A folder that loses a file changes."""
    trees = sorted({tree.path for tree in files.trees.values()})
    return tuple(_signature(Path(tree, part)) for tree in trees for part in ("", LIBRARIES, LIBRARIES_32, BINARIES))


def staged_evidence(files: DriverFiles) -> Signatures:
    """Signatures of the folders that containers get and of every file: a hard link changes when the host's file does.

    A file of several trees is the same file, or a copy of our own.
    """
    parts: dict[str, str] = {}
    for tree in sorted(files.trees.values(), key=lambda tree: tree.path):
        names = [part for part, _ in (*tree.libraries, *tree.libraries_32)] + [part for _, part in tree.files]
        for part in (*names, *(f"{BINARIES}/{name}" for name in tree.binaries)):
            parts.setdefault(part, tree.path)
    return staged_signatures(files) + tuple(_signature(Path(tree, part)) for part, tree in sorted(parts.items()))


def _signature(path: Path) -> tuple[int, int, int] | None:
    found = signature(path)
    return found and found[:3]
