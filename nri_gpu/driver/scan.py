"""Find the host driver's user space below a driver root: which files, under which names, for which capability."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.gpu import Capability
from nri_gpu.driver import table
from nri_gpu.driver.folders import Folders
from nri_gpu.driver.source import LeftOut, Source, distinct_folders, examine

# Part of every generation: raise it when the same host files are to be staged differently.
LAYOUT: Final = 1
# A SONAME becomes a name in a folder of ours.
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, slots=True)
class DriverFile:
    """One file to stage.

    name: its own, as programs may open it. links: (name, target) of the symlinks beside it, in an order in which
    every target comes first.
    """

    name: str
    capability: Capability
    source: Source
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDriver:
    """What a driver root holds for containers.

    generation: safe as a file name; changes whenever a file does. missing: as in `domain.gpu.DriverFiles`.
    unknown: files of this driver's version that no table names, so nobody gets them. left_out: found, not usable.
    """

    root: Path
    version: str
    generation: str
    libraries: tuple[DriverFile, ...]
    binaries: tuple[DriverFile, ...]
    missing: Mapping[Capability, tuple[str, ...]]
    unknown: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


def scan(driver_root: Path, machine_name: str = "") -> FoundDriver:
    """Look through `driver_root` (`/`, or a folder such as `/usr/local/nvidia`) for the driver.

    machine_name: as `uname -m`, this machine's when empty. Reads directories and the heads of some 20 files: a few
    milliseconds. Raises: DriverError: no driver there, two versions of it, or a machine that has none.
    """
    machine = _machine(machine_name or platform.machine())
    try:
        return _scan(driver_root, machine)
    except OSError as error:
        raise DriverError(f"driver root {driver_root} cannot be searched: {error}") from error


def _scan(driver_root: Path, machine: table.Machine) -> FoundDriver:
    folders = Folders.below(driver_root, machine)
    version = folders.version()
    libraries = tuple(_libraries(folders, version))
    binaries, bad_binaries = _binaries(folders.root)
    return FoundDriver(
        root=folders.root,
        version=version,
        generation=f"{version}-{_digest(libraries + binaries)}",
        libraries=libraries,
        binaries=binaries,
        missing=_missing(libraries, machine),
        unknown=folders.unknown(version),
        left_out=folders.left_out() + bad_binaries,
    )


def _machine(name: str) -> table.Machine:
    machine = table.MACHINES.get(name)
    if machine is None:
        raise DriverError(f"there is no NVIDIA driver for {name}, only for {', '.join(table.MACHINES)}")
    return machine


def _libraries(folders: Folders, version: str) -> Iterator[DriverFile]:
    taken = {name for library in table.LIBRARIES for name in library.file_names(version)}
    for library in table.LIBRARIES:
        found = folders.first(library.file_names(version))
        if found is None:
            continue
        source, name, soname = found.source, found.name, found.elf.soname
        # Two files with one SONAME (the driver has such) cannot both be it: the first of the table wins.
        middle = soname if PLAIN_NAME.fullmatch(soname) and soname not in taken else ""
        aliases = {*folders.aliases(library.name, source), *table.ALWAYS_LINKED.get(library.name, ())}
        links = tuple(_links(name, middle, sorted(aliases - taken - {middle})))
        taken.update(link for link, _ in links)
        yield DriverFile(name, library.capability, source, links)


def _links(name: str, middle: str, aliases: list[str]) -> Iterator[tuple[str, str]]:
    """As a host has them: `libcuda.so` leads to `libcuda.so.1`, and that to the file."""
    if middle:
        yield middle, name
    for alias in aliases:
        yield alias, middle or name


def _binaries(root: Path) -> tuple[tuple[DriverFile, ...], tuple[LeftOut, ...]]:
    found, left_out = [], []
    folders = tuple(distinct_folders(root, (root / folder for folder in table.BINARY_FOLDERS)))
    for name, capability in table.BINARIES.items():
        for path in (folder / name for folder in folders):
            if not path.is_symlink() and not path.exists():
                continue
            source = examine(root, path)
            if isinstance(source, Source) and source.mode & 0o111:
                found.append(DriverFile(name, capability, source))
                break
            left_out.append(source if isinstance(source, LeftOut) else LeftOut(source.relative, "not executable"))
    return tuple(found), tuple(left_out)


def _missing(libraries: tuple[DriverFile, ...], machine: table.Machine) -> Mapping[Capability, tuple[str, ...]]:
    have = {file.name.partition(".so.")[0] for file in libraries}
    lacking = [each for each in table.LIBRARIES if machine.name in each.expected_on and each.name not in have]
    return MappingProxyType(
        {
            capability: tuple(f"{each.name}.so" for each in lacking if each.capability == capability)
            for capability in Capability
        }
    )


def _digest(files: tuple[DriverFile, ...]) -> str:
    facts = [
        (file.name, file.capability, file.links, source.relative, source.size_bytes, source.mtime_ns, source.inode)
        for file in files
        for source in (file.source,)
    ]
    return hashlib.sha256(json.dumps([LAYOUT, facts]).encode()).hexdigest()[:8]
