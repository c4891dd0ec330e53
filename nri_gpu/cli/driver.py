"""`nri-gpu driver`: which files of the NVIDIA driver, and which CUDA compatibility packages, containers can get."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import to_builtins

from nri_gpu.daemon.policy_file import load_policy
from nri_gpu.domain.errors import CommandError, DriverError, Exit
from nri_gpu.domain.gpu import Capability
from nri_gpu.driver.compat import FoundCompat, FoundPackages, scan_compat
from nri_gpu.driver.scan import DriverFile, FoundDriver, scan
from nri_gpu.requirements.compat import unfit_driver

COMPAT_32: Final = frozenset({Capability.COMPAT32})


def run(args: argparse.Namespace) -> int:
    """Print what is found. Returns 1 when files had to be left out, 69 without a driver."""
    policy = load_policy(args.policy, {"driver.root": args.driver_root})
    try:
        found = scan(Path(policy.driver.root), library_dirs=policy.driver.library_dirs)
        packages = scan_compat(Path(policy.compat.dir)) if policy.compat.dir else FoundPackages()
    except DriverError as error:
        raise CommandError(Exit.UNAVAILABLE, error) from None
    if args.output == "json":
        print(json.dumps(to_json(found, packages), indent=1))
    else:
        print("\n".join((*_lines(found), *_packages_lines(packages, found.version))))
    return Exit.FINDING if found.left_out or packages.left_out else Exit.OK


def to_json(found: FoundDriver, packages: FoundPackages) -> dict[str, object]:
    """Schema `nri-gpu/driver/v1`."""
    return {
        "schema": "nri-gpu/driver/v1",
        "root": str(found.root),
        "version": found.version,
        "generation": found.generation,
        "capabilities": {
            capability.value: {
                "files": [_file_json(kind, file) for kind, file in _of(found, capability)],
                "missing": list(found.missing[capability]),
            }
            for capability in Capability
        },
        "left_out": to_builtins(found.left_out),
        "unknown": list(found.unknown),
        "compat": {
            "packages": [_package_json(each, found.version) for each in packages.packages],
            "left_out": to_builtins(packages.left_out),
        },
    }


def _file_json(kind: str, file: DriverFile) -> dict[str, object]:
    return {
        "kind": kind,
        "name": file.name,
        "source": file.source.relative,
        "size_bytes": file.source.size_bytes,
        "links": [name for name, _ in file.links],
        "places": list(file.places),
    }


def _lines(found: FoundDriver) -> Iterator[str]:
    """A paragraph for each capability, then the files that no container gets, and why."""
    yield f"driver {found.version} below {found.root}, generation {found.generation}"
    for capability in Capability:
        yield f"\n{capability}"
        for kind, file in _of(found, capability):
            names = ", ".join(file.places or [name for name, _ in file.links])
            yield f"  {kind:<8} {file.source.relative}{' as ' if names else ''}{names}"
        if missing := found.missing[capability]:
            yield f"  missing  {', '.join(missing)}"
    if found.left_out:
        yield "\nleft out, no container gets them"
        yield from (f"  {each.path}: {each.reason}" for each in found.left_out)
    if found.unknown:
        yield "\nof no known capability, no container gets them"
        yield from (f"  {name}" for name in found.unknown)


def _of(found: FoundDriver, capability: Capability) -> Iterator[tuple[str, DriverFile]]:
    """The files of one capability; a 32-bit library is of compat32 alone."""
    kinds = ("library", found.libraries), ("program", found.binaries), ("file", found.singles)
    for kind, files in (*kinds, ("library", found.libraries_32)):
        for file in files:
            if capability in (file.capabilities & COMPAT_32 or file.capabilities):
                yield kind, file


def _package_json(found: FoundCompat, driver_version: str) -> dict[str, object]:
    return {
        "cuda": "{}.{}".format(*found.cuda),
        "version": found.version,
        "generation": found.generation,
        "drivers": None if found.drivers is None else sorted(found.drivers),
        "not_with_this_driver": unfit_driver(found.version, found.drivers, driver_version),
        "files": sorted(found.files),
    }


def _packages_lines(packages: FoundPackages, driver_version: str) -> Iterator[str]:
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
