"""Find the host driver's user space below a driver root: which files, under which names, for which capability."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import basename, dirname, join, relpath
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.gpu import Capabilities, Capability
from nri_gpu.driver import extras, table
from nri_gpu.driver.folders import Folders
from nri_gpu.driver.source import LeftOut, Source, distinct_folders, examine

# Part of every generation: raise it when the same host files are to be staged differently.
LAYOUT: Final = 3
# A SONAME becomes a name in a folder of ours.
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*")


class DriverFile(Struct, frozen=True):
    """One file to stage.

    name: its path in its part of a tree; mostly the file's own name. capabilities: whoever has one of them gets it.
    links: (path, target) of the symlinks to it, in an order in which every target comes first.
    places: where containers have it, of files that are mounted one by one.
    """

    name: str
    capabilities: Capabilities
    source: Source
    links: tuple[tuple[str, str], ...] = ()
    places: tuple[str, ...] = ()


class FoundDriver(Struct, frozen=True, kw_only=True):
    """What a driver root holds for containers.

    generation: safe as a file name; changes whenever a file does. libraries_32: for compat32. extras: configuration
    and modules, mounted one by one. missing: as in `domain.gpu.DriverFiles`.
    unknown: files of this driver's version that no table names, so nobody gets them. left_out: found, not usable.
    """

    root: Path
    version: str
    generation: str
    libraries: tuple[DriverFile, ...]
    libraries_32: tuple[DriverFile, ...]
    binaries: tuple[DriverFile, ...]
    extras: tuple[DriverFile, ...]
    missing: Mapping[Capability, tuple[str, ...]]
    unknown: tuple[str, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def files(self) -> tuple[DriverFile, ...]:
        """All of them."""
        return self.libraries + self.libraries_32 + self.binaries + self.extras


def scan(driver_root: Path, machine_name: str = "", library_dirs: Sequence[str] = ()) -> FoundDriver:
    """Look through `driver_root` (`/`, or a folder such as `/usr/local/nvidia`) for the driver.

    machine_name: as `uname -m`, this machine's when empty. library_dirs: below the root, looked into before those we
    know; so are `bin`, `share` and `etc` beside them. Reads directories and the heads of some 100 files: a few tens of
    milliseconds. Raises: DriverError: no driver there, two versions of it, or a machine that has none.
    """
    machine = _machine(machine_name or platform.machine())
    try:
        return _scan(driver_root, machine, tuple(each.strip("/") for each in library_dirs))
    except OSError as error:
        raise DriverError(f"driver root {driver_root} cannot be searched: {error}") from error


def _scan(driver_root: Path, machine: table.Machine, library_dirs: tuple[str, ...]) -> FoundDriver:
    folders = Folders.below(driver_root, machine, library_dirs)
    version = folders.version()
    libraries = tuple(_libraries(folders, version))
    other = table.COMPATIBLE.get(machine.name)
    folders_32 = Folders.below(driver_root, other, library_dirs) if other else None
    libraries_32 = tuple(_libraries(folders_32, version)) if folders_32 else ()
    refused_32 = folders_32.left_out() if folders_32 else ()
    binaries, bad_binaries = _binaries(folders.root, library_dirs)
    extras, bad_extras = _extras(folders, version, library_dirs)
    every = (*libraries, *libraries_32, *binaries, *extras)
    return FoundDriver(
        root=folders.root,
        version=version,
        generation=f"{version}-{_digest(every)}",
        libraries=libraries,
        libraries_32=libraries_32,
        binaries=binaries,
        extras=extras,
        missing=_missing(every, machine),
        unknown=folders.unknown(version),
        left_out=tuple(dict.fromkeys((*folders.left_out(), *refused_32, *bad_binaries, *bad_extras))),
    )


def _machine(name: str) -> table.Machine:
    machine = table.MACHINES.get(name)
    if machine is None:
        raise DriverError(f"there is no NVIDIA driver for {name}, only for {', '.join(table.MACHINES)}")
    return machine


def _libraries(folders: Folders, version: str) -> Iterator[DriverFile]:
    taken = {name for library in table.LIBRARIES for name in library.file_names(version)}
    extra = {Capability.COMPAT32} if folders.machine.bits == 32 else frozenset[Capability]()
    for library in table.LIBRARIES:
        found = folders.first(library.file_names(version))
        if found is None:
            continue
        source, name, soname = found.source, found.name, join(library.folder, found.elf.soname)
        # Two files with one SONAME (the driver has such) cannot both be it: the first of the table wins.
        middle = soname if PLAIN_NAME.fullmatch(found.elf.soname) and soname not in taken else ""
        aliases = {*folders.aliases(library, source), *table.ALWAYS_LINKED.get(library.name, ())}
        links = tuple(_links(name, middle, sorted(aliases - taken - {middle})))
        taken.update(link for link, _ in links)
        yield DriverFile(name, library.capabilities | extra, source, links)


def _links(name: str, middle: str, aliases: list[str]) -> Iterator[tuple[str, str]]:
    """As a host has them: `libcuda.so` leads to `libcuda.so.1`, and that to the file."""
    if middle:
        yield middle, relpath(name, dirname(middle) or ".")
    for alias in aliases:
        yield alias, relpath(middle or name, dirname(alias) or ".")


def _binaries(root: Path, library_dirs: tuple[str, ...]) -> tuple[tuple[DriverFile, ...], tuple[LeftOut, ...]]:
    found, left_out = [], []
    places = (*(join(dirname(folder), "bin") for folder in library_dirs), *table.BINARY_FOLDERS)
    folders = tuple(distinct_folders(root, (root / folder for folder in places)))
    for name, capabilities in table.BINARIES.items():
        for path in (folder / name for folder in folders):
            if not path.is_symlink() and not path.exists():
                continue
            source = examine(root, path)
            if isinstance(source, Source) and source.mode & 0o111:
                found.append(DriverFile(name, capabilities, source))
                break
            left_out.append(source if isinstance(source, LeftOut) else LeftOut(source.relative, "not executable"))
    return tuple(found), tuple(left_out)


def _extras(
    folders: Folders, version: str, library_dirs: tuple[str, ...]
) -> tuple[tuple[DriverFile, ...], tuple[LeftOut, ...]]:
    found, left_out = [], []
    for extra in extras.wanted(folders.machine, version):
        for path in extras.candidates(extra, folders.root, folders.listed, library_dirs):
            if not path.is_symlink() and not path.exists():
                continue
            source = examine(folders.root, path)
            reason = extras.unfit(source.path, folders.machine) if isinstance(source, Source) else ""
            if isinstance(source, Source) and not reason:
                found.append(DriverFile(extra.places[0].lstrip("/"), extra.capabilities, source, places=extra.places))
                break
            left_out.append(source if isinstance(source, LeftOut) else LeftOut(source.relative, reason))
    return tuple(found), tuple(left_out)


def _missing(files: tuple[DriverFile, ...], machine: table.Machine) -> Mapping[Capability, tuple[str, ...]]:
    native = [file for file in files if Capability.COMPAT32 not in file.capabilities]
    have = {basename(file.name).partition(".so.")[0] for file in native}
    lacking = [each for each in table.LIBRARIES if machine.name in each.expected_on and each.name not in have]
    missing = {
        capability: tuple(f"{each.name}.so" for each in lacking if capability in each.capabilities)
        for capability in Capability
    }
    missing[Capability.DISPLAY] = tuple(name for name in extras.X_NAMES if name not in map(_file_name, native))
    lacks_32 = machine.name in table.COMPATIBLE and len(native) == len(files)
    missing[Capability.COMPAT32] = ("every 32-bit library",) if lacks_32 else ()
    return MappingProxyType(missing)


def _file_name(file: DriverFile) -> str:
    return basename(file.name)


def _digest(files: tuple[DriverFile, ...]) -> str:
    facts = [(file.name, sorted(file.capabilities), file.links, file.places, *_identity(file.source)) for file in files]
    return hashlib.sha256(json.dumps([LAYOUT, facts]).encode()).hexdigest()[:8]


def _identity(source: Source) -> tuple[str, int, int, int]:
    return source.relative, source.size_bytes, source.mtime_ns, source.inode
