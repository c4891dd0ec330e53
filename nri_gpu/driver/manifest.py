"""The manifest of a staged driver, by which a later daemon, and NVML's children, know that a generation is complete."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from posixpath import dirname
from typing import Final

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.node import DriverFiles
from nri_gpu.domain.text import listed
from nri_gpu.domain.value import Recorded, canonical, decode
from nri_gpu.driver.host_files import HostFile, check_folder
from nri_gpu.system.storage import read_private, why_untrusted

MANIFEST: Final = "manifest.json"  # in a generation's folder, beside the trees
BYTES_MAX: Final = 16 << 20


class StageManifest(Recorded, frozen=True, kw_only=True):
    """The content of the file. content: path in the folder -> size in bytes, or the target of a symlink."""

    driver: DriverFiles
    content: Mapping[str, int | str]


def manifest_text(driver: DriverFiles, plan: Mapping[str, HostFile | str]) -> bytes:
    content = {path: each if isinstance(each, str) else each.staged_bytes for path, each in plan.items()}
    return canonical(StageManifest(driver=driver, content=content)).encode()


def read_manifest(folder: Path) -> StageManifest | None:
    """Return the manifest of a generation, or None without one that root wrote and this version reads."""
    try:
        found = decode(StageManifest, json.loads(read_private(folder / MANIFEST, BYTES_MAX)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    places = {Path(tree.path).parent for tree in found.driver.trees.values()}
    return found if found.driver.generation == folder.name and places <= {folder} else None


def complete(folder: Path) -> DriverFiles | None:
    """Return what containers get of a generation, or None unless all that its manifest names is there, and root's."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    parents = {dirname(path) for path in manifest.content}
    folders = {str(each) for path in parents for each in (PurePosixPath(path), *PurePosixPath(path).parents)}
    try:
        for each in folders:
            check_folder(folder / each, follow=False)
        whole = all(_is_as_staged(folder / path, recorded) for path, recorded in manifest.content.items())
    except (DriverError, OSError):
        return None
    return manifest.driver if whole else None


def _is_as_staged(path: Path, recorded: int | str) -> bool:
    """Return whether a file has the recorded size, or a symlink the target, and only root can change it."""
    found = path.lstat()
    if isinstance(recorded, str):
        ours = stat.S_ISLNK(found.st_mode) and found.st_uid in {0, os.geteuid()}
        return ours and os.fspath(path.readlink()) == recorded
    return stat.S_ISREG(found.st_mode) and found.st_size == recorded and not why_untrusted(found)


def staged_driver(base: Path, version: str, preferred: str = "") -> DriverFiles | None:
    """Return the complete generation of a driver's version: the preferred one, else the last made, or None.

    Blocks for a tenth of a second if a driver has everything.
    """
    folder = Path(os.path.realpath(base))
    try:
        check_folder(folder)
        names = (each for each in folder.iterdir() if each.name.partition("-")[0] == version)
        made = {each: manifest.stat().st_mtime_ns for each in names if (manifest := each / MANIFEST).is_file()}
    except (DriverError, OSError):
        return None
    order = sorted(made, key=lambda each: (each.name == preferred, made[each], each.name), reverse=True)
    return next(filter(None, map(complete, order)), None)


def staged_library(base: Path, version: str, name: str) -> Path | None:
    """Return the library `libnvidia-ml.so.1`, or any other, in the complete generation of a version, or None."""
    driver = staged_driver(base, version)
    trees = driver.trees.values() if driver else ()
    return next((Path(tree.path, path) for tree in trees for path, names in tree.libraries if name in names), None)


def why_unfit(found: DriverFiles, staged: DriverFiles) -> str:
    """Return why the host's files must not replace complete staged ones of the loaded module's version, or empty."""
    if found.version != staged.version:
        return f"they are {found.version}, and the module is {staged.version}"
    lost = _parts(staged) - _parts(found)
    return f"they have no {listed(sorted(lost))} any more" if lost else ""


def _parts(driver: DriverFiles) -> frozenset[str]:
    """Return what a driver has for containers: libraries without their versions, programs, and single files."""
    trees = driver.trees.values()
    libraries = {path.partition(".so.")[0] for tree in trees for path, _ in (*tree.libraries, *tree.libraries_32)}
    programs = (driver.host_binaries, *(tree.binaries for tree in trees))
    return frozenset(libraries).union(*programs, *(dict(tree.files) for tree in trees))
