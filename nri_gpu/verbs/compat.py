"""CUDA's compatibility packages in what `nri-gpu driver` prints: which there are, for which drivers, what is left out.

What an image wants is not known here; `nri-gpu explain` says what a pod would get.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nri_gpu.driver.compat import FoundCompat, FoundPackages, scan_compat
from nri_gpu.requirements.compat import unfit_driver


def look(folder: str) -> FoundPackages:
    """What policy's folder holds; nothing where it names none. Raises: DriverError."""
    return scan_compat(Path(folder)) if folder else FoundPackages()


def to_json(packages: FoundPackages, driver_version: str) -> dict[str, Any]:
    """Part of schema `nri-gpu/driver/v1`."""
    return {
        "packages": [_json(each, driver_version) for each in packages.packages],
        "left_out": [{"path": each.path, "reason": each.reason} for each in packages.left_out],
    }


def _json(found: FoundCompat, driver_version: str) -> dict[str, Any]:
    return {
        "cuda": "{}.{}".format(*found.cuda),
        "version": found.version,
        "generation": found.generation,
        "drivers": None if found.drivers is None else sorted(found.drivers),
        "not_with_this_driver": unfit_driver(found.version, found.drivers, driver_version),
        "files": sorted(found.files),
    }


def to_lines(packages: FoundPackages, driver_version: str) -> Iterator[str]:
    """A paragraph, where there is anything to say."""
    if packages.packages:
        yield "\nCUDA compatibility packages"
    for each in packages.packages:
        made_for = f"for drivers {', '.join(map(str, sorted(each.drivers)))}" if each.drivers else "for older drivers"
        unfit = unfit_driver(each.version, each.drivers, driver_version)
        cuda = "{}.{}".format(*each.cuda)
        yield f"  CUDA {cuda:<6} libcuda {each.version}, {made_for}{f'; NOT on this one: {unfit}' if unfit else ''}"
    if packages.left_out:
        yield "\nCUDA compatibility packages left out"
        yield from (f"  {each.path}: {each.reason}" for each in packages.left_out)
