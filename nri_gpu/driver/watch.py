"""Whether a driver may have changed since it was scanned: some hundred stats, nothing listed, nothing read."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from nri_gpu.domain.gpu import DriverFiles
from nri_gpu.driver import table
from nri_gpu.driver.scan import FoundDriver
from nri_gpu.driver.stage import BINARIES, LIBRARIES, LIBRARIES_32

# One entry a folder: device, inode and time of change; None where it is not.
Signs = tuple[tuple[int, int, int] | None, ...]


def signs(driver_root: Path, library_dirs: Sequence[str] = ()) -> Signs:
    """Of the folders that a scan looks into. Taken before one, they also show what changed during it."""
    name = platform.machine()
    machines = [each for each in (table.MACHINES.get(name), table.COMPATIBLE.get(name)) if each]
    libraries = [folder for machine in machines for folder in machine.folders]
    own = [folder.strip("/") for folder in library_dirs]
    return tuple(_sign(driver_root / folder) for folder in (*own, *libraries, *table.BINARY_FOLDERS))


def changed(driver_root: Path, library_dirs: Sequence[str], before: Signs, found: FoundDriver | None) -> bool:
    """Whether a folder is another one or has other entries, or a file that was found has other content."""
    if signs(driver_root, library_dirs) != before:
        return True
    return found is not None and not all(file.source.unchanged() for file in found.files)


def staged_signs(files: DriverFiles) -> Signs:
    """Of the folders that containers get: some hundred stats for a whole driver. One that loses a file shows."""
    trees = sorted({tree.path for tree in files.trees.values()})
    return tuple(_sign(Path(tree, part)) for tree in trees for part in ("", LIBRARIES, LIBRARIES_32, BINARIES))


def staged_evidence(files: DriverFiles) -> Signs:
    """The same, and every file once: a hard link shows what was written into the host's file in its place.

    A file that several trees have is one file, or copies that nobody else has.
    """
    parts: dict[str, str] = {}
    for tree in sorted(files.trees.values(), key=lambda tree: tree.path):
        names = [part for part, _ in (*tree.libraries, *tree.libraries_32)] + [part for _, part in tree.files]
        for part in (*names, *(f"{BINARIES}/{name}" for name in tree.binaries)):
            parts.setdefault(part, tree.path)
    return staged_signs(files) + tuple(_sign(Path(tree, part)) for part, tree in sorted(parts.items()))


def _sign(folder: Path) -> tuple[int, int, int] | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
