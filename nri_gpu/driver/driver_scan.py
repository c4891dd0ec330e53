"""The search for the driver's user space below a driver root: libraries, programs, and files mounted one by one."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from posixpath import basename, dirname, join, relpath
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import DriverError, fault_of
from nri_gpu.domain.gpu import Capabilities, Capability
from nri_gpu.driver import table
from nri_gpu.driver.elf import Elf, claims_to_be_elf, read_elf
from nri_gpu.driver.host_files import PLAIN_NAME, HostFile, LeftOut, distinct_folders, examine
from nri_gpu.driver.libraries import LibraryFolders
from nri_gpu.driver.search import DriverSearch, OtherDriver, machine_of, search_paths
from nri_gpu.system.storage import signature

# Part of every generation's name: raise it when the same host files are to be staged differently, or have another form
# of manifest.
LAYOUT: Final = 4
CONFIG_BYTES_MAX: Final = 64 * 1024
# On the host, below a library folder, and then below the root.
# Source: NVIDIA/nvidia-container-toolkit internal/discover/graphics.go.
X_FOLDERS: Final = (
    "nvidia/xorg",
    *(f"xorg/modules/{part}{kind}" for part in ("", "updates/") for kind in ("drivers", "extensions")),
)
X_ROOTS: Final = ("usr/lib", "usr/lib64", "usr/X11R6/lib", "usr/X11R6/lib64")
# In the driver's own search order; a flat root such as /usr/local/nvidia has the same folders without `usr`.
CONFIG_ROOTS: Final = ("etc", "usr/local/share", "usr/share", "share")

# Libraries that loaders' configuration names by a path, as NixOS and Fedora do. In containers they lie elsewhere: there
# the name alone is right. Source: NixOS/nixpkgs pkgs/os-specific/linux/nvidia-x11/builder.sh.
_BY_PATH: Final = {
    ".json": re.compile(rb'(?P<before>"library_path"\s*:\s*")[^"]*/(?P<name>[^"/]*)'),
    ".icd": re.compile(rb"(?P<before>^[ \t]*)\S*/(?P<name>[^\s/]*)", re.MULTILINE),
}
_NO_SUCH_NAME: Final = "names a library by a path that containers do not have"
_TOO_LONG: Final = f"longer than {CONFIG_BYTES_MAX} bytes"

# Device, inode and time of change of each path; None where it does not exist. snapshot.json holds these.
Signatures = tuple[tuple[int, int, int] | None, ...]


class DriverFile(Struct, frozen=True):
    """A file to stage."""

    name: str  # its path in its part of a tree, mostly the file's own name
    capabilities: Capabilities  # a container with one of them gets it
    source: HostFile
    links: tuple[tuple[str, str], ...] = ()  # (path, target) of its symlinks, every target before the links to it
    places: tuple[str, ...] = ()  # in the container, of a file that is mounted by itself


class FoundDriver(Struct, frozen=True, kw_only=True):
    """A driver root's content for containers."""

    root: Path
    version: str
    generation: str  # safe as a file name; changes whenever a file does
    libraries: tuple[DriverFile, ...]
    libraries_32: tuple[DriverFile, ...]  # for compat32
    binaries: tuple[DriverFile, ...]
    singles: tuple[DriverFile, ...]  # configuration and modules, mounted one by one
    missing: Mapping[Capability, tuple[str, ...]]  # as in `DriverFiles`
    lacks: Mapping[Capability, str]  # as in `DriverFiles`
    unknown: tuple[str, ...]  # files of this driver's version that our table does not name, so no container gets them
    left_out: tuple[LeftOut, ...]  # found, and not usable
    others: tuple[OtherDriver, ...]  # drivers beside it
    # The programs that run on the host, if one of them does not run in containers; else empty.
    host_binaries: tuple[DriverFile, ...] = ()

    @property
    def files(self) -> tuple[DriverFile, ...]:
        return self.libraries + self.libraries_32 + self.binaries + self.singles + self.host_binaries


def scan(
    driver_root: Path, machine_name: str = "", library_dirs: Sequence[str] = (), *, module: str = ""
) -> FoundDriver:
    """Search `driver_root` (`/`, or a folder such as `/usr/local/nvidia`) for the driver.

    machine_name: as `uname -m`; empty: this machine's. library_dirs: below the root, searched before all others;
    so are `bin`, `share` and `etc` beside them. module: the version of the loaded kernel module: of several drivers
    the one with this version is taken. Reads directories and the heads of some 100 files, which takes a few tens of
    milliseconds.

    Raises: DriverError: there is no driver, two versions of it, or none for this machine.
    """
    machine = machine_of(machine_name)
    try:
        return _scan(driver_root, machine, library_dirs, module)
    except OSError as error:
        raise DriverError(f"driver root {driver_root} cannot be searched: {fault_of(error)}") from error


def folder_signatures(driver_root: Path, library_dirs: Sequence[str] = ()) -> Signatures:
    """Return signatures of all that says where the driver is. Taken before a scan, they also show changes during it."""
    name = platform.machine()
    machines = [each for each in (table.MACHINES.get(name), table.COMPATIBLE.get(name)) if each]
    searched = search_paths(driver_root, machines, library_dirs)
    return signatures((*searched, *(f"{driver_root}/{folder}" for folder in table.BINARY_FOLDERS)))


def signatures(paths: Iterable[str | None]) -> Signatures:
    """Return a value that differs once a folder has other entries, or a file other content."""
    return tuple(found and found[:3] for found in (signature(path) if path else None for path in paths))


def changed(driver_root: Path, library_dirs: Sequence[str], before: Signatures, found: FoundDriver | None) -> bool:
    """Return whether a folder has other entries than before, or a file that was found has other content."""
    if folder_signatures(driver_root, library_dirs) != before:
        return True
    return found is not None and not all(file.source.unchanged() for file in found.files)


def _scan(driver_root: Path, machine: table.Machine, library_dirs: Sequence[str], module: str) -> FoundDriver:
    search = DriverSearch.below(driver_root, machine, library_dirs)
    version = search.version(module)
    folders = LibraryFolders.of(search, version)
    libraries = tuple(_libraries(folders))
    other = table.COMPATIBLE.get(machine.name)
    folders_32 = LibraryFolders.of(DriverSearch.below(driver_root, other, library_dirs), version) if other else None
    libraries_32 = tuple(_libraries(folders_32)) if folders_32 else ()
    refused_32 = folders_32.left_out() if folders_32 else ()
    left_out: list[LeftOut] = []
    binaries = tuple(_binaries(folders, _why_not_in_containers, left_out))
    on_host = tuple(_binaries(folders, _why_no_program, []))
    host_binaries = on_host if len(on_host) > len(binaries) else ()
    staged = {basename(name) for file in libraries for name in (file.name, *(name for name, _ in file.links))}
    singles = tuple(_singles(folders, staged, left_out))
    every = (*libraries, *libraries_32, *binaries, *singles, *host_binaries)
    return FoundDriver(
        root=search.root,
        version=version,
        generation=f"{version}-{_digest(every)}",
        libraries=libraries,
        libraries_32=libraries_32,
        binaries=binaries,
        singles=singles,
        missing=_missing(every, machine, version),
        lacks=_lacks(libraries),
        unknown=folders.unknown(),
        left_out=tuple(dict.fromkeys((*folders.left_out(), *refused_32, *left_out))),
        others=search.others(version),
        host_binaries=host_binaries,
    )


def _libraries(folders: LibraryFolders) -> Iterator[DriverFile]:
    version = folders.version
    taken = {name for library in table.LIBRARIES for name in library.file_names(version)}
    compat = {Capability.COMPAT32} if folders.search.machine.bits == 32 else frozenset[Capability]()
    for library in table.LIBRARIES:
        found = folders.first(library.file_names(version))
        if found is None:
            continue
        source, soname = found.source, join(library.folder, found.elf.soname)
        name = join(library.folder, basename(found.name))
        # The driver has files with the same SONAME: the first of the table gets it.
        middle = soname if PLAIN_NAME.fullmatch(found.elf.soname) and soname not in taken else ""
        aliases = {*folders.aliases(library, source), *table.ALWAYS_LINKED.get(library.name, ())}
        # As on a host: `libcuda.so` leads to `libcuda.so.1`, and that to the file.
        links = [(middle, relpath(name, dirname(middle) or "."))] if middle else []
        links += [
            (alias, relpath(middle or name, dirname(alias) or ".")) for alias in sorted(aliases - taken - {middle})
        ]
        taken.update(link for link, _ in links)
        yield DriverFile(name, library.capabilities | compat, source, tuple(links))


def _binaries(
    folders: LibraryFolders, why_unusable: Callable[[HostFile, table.Machine], str], left_out: list[LeftOut]
) -> Iterator[DriverFile]:
    machine = folders.search.machine
    root, bins = folders.search.root, (join(parent, "bin") for parent in folders.search.parents(folders.version))
    places = (*folders.search.beside(folders.version), *bins, *table.BINARY_FOLDERS)
    known = tuple(distinct_folders(root, (root / folder for folder in places)))
    for name, capabilities in table.BINARIES.items():
        paths = (folder / name for folder in known)
        if source := _first(root, paths, lambda file: why_unusable(file, machine), left_out):
            yield DriverFile(name, capabilities, source)


def _why_no_program(file: HostFile, machine: table.Machine) -> str:
    """Return a clause that says why the host cannot run a trusted file, or empty if it can.

    Raises: DriverError, OSError.
    """
    if not file.mode & 0o111:
        return "not executable"
    if not claims_to_be_elf(file.path):
        return ""  # a script
    elf = read_elf(file.path)
    return "" if elf and _machine_of(elf, machine) else f"not a whole program for {machine.name}"


def _why_not_in_containers(file: HostFile, machine: table.Machine) -> str:
    """Return why a container cannot run the file, or empty. Its image has the usual loader and nothing of the host."""
    if why := _why_no_program(file, machine):
        return why
    elf = read_elf(file.path)
    own = _machine_of(elf, machine) if elf else None
    if not elf or not own or elf.interpreter in ("", own.interpreter):
        return ""
    return f"its interpreter is {elf.interpreter}, which containers do not have"


def _machine_of(elf: Elf, machine: table.Machine) -> table.Machine | None:
    """Return the machine that a program is for, among those whose programs this one runs, or None."""
    return next((each for each in (machine, table.COMPATIBLE.get(machine.name)) if each and each.runs(elf)), None)


def _singles(folders: LibraryFolders, staged: Set[str], left_out: list[LeftOut]) -> Iterator[DriverFile]:
    """Yield the single files. staged: names of the libraries that containers get."""
    root, machine = folders.search.root, folders.search.machine
    for single in table.single_files(machine, folders.version):
        paths = _candidates(single, folders)
        if source := _first(root, paths, lambda file: _why_unusable(file.path, machine, staged), left_out):
            name = single.places[0].lstrip("/")
            yield DriverFile(name, single.capabilities, _without_folders(source), places=single.places)


def _candidates(file: table.SingleFile, libraries: LibraryFolders) -> Iterator[Path]:
    """Return where the file may be, best first."""
    name, root, search = file.names[0], libraries.search.root, libraries.search
    if "/" in name:
        parents = (join(parent, kind) for parent in search.parents(libraries.version) for kind in ("share", "etc"))
        folders = (*parents, *CONFIG_ROOTS, *(("",) if name.startswith("vulkan/") else ()))
        system = (folder / name for folder in distinct_folders(root, (root / each for each in folders)))
        # Debian has data that only one version can use beside its libraries.
        return chain((folder / basename(name) for folder in search.own_folders(libraries.version)), system)
    below = [root / folder for folder in search.beside(libraries.version)]
    below += [folder / each for folder in libraries.listed for each in ("", *X_FOLDERS)]
    below += [root / folder / each for folder in X_ROOTS for each in X_FOLDERS]
    known = tuple(distinct_folders(root, below))
    return (folder / each for each in file.names for folder in known)


def _why_unusable(path: Path, machine: table.Machine, staged: Set[str]) -> str:
    """Return a clause that says why a trusted file is of no use, or empty if it is usable.

    Raises: DriverError, OSError.
    """
    if ".so" in path.name:
        elf = read_elf(path)
        return "" if elf and machine.runs(elf) else machine.wrong_class
    if not (by_path := _BY_PATH.get(path.suffix)):
        return ""
    with path.open("rb") as file:
        content = file.read(CONFIG_BYTES_MAX + 1)
    if len(content) > CONFIG_BYTES_MAX:
        return _TOO_LONG
    names = {match["name"].decode(errors="replace") for match in by_path.finditer(content)}
    return "" if names <= staged else _NO_SUCH_NAME


def _without_folders(file: HostFile) -> HostFile:
    """Return a usable file whose copy names libraries without their folders. Raises: OSError."""
    if not (by_path := _BY_PATH.get(file.path.suffix)):
        return file
    content = file.path.read_bytes()
    plain = by_path.sub(rb"\g<before>\g<name>", content)
    return file if plain == content else replace(file, content=plain)


def _first(
    root: Path, paths: Iterable[Path], why_unusable: Callable[[HostFile], str], left_out: list[LeftOut]
) -> HostFile | None:
    """Return the first usable file. Add those before it to `left_out`."""
    for path in paths:
        if not path.is_symlink() and not path.exists():
            continue
        source = examine(root, path)
        if isinstance(source, LeftOut):
            left_out.append(source)
        elif reason := why_unusable(source):
            left_out.append(LeftOut(source.relative, reason))
        else:
            return source
    return None


def _missing(
    files: tuple[DriverFile, ...], machine: table.Machine, version: str
) -> Mapping[Capability, tuple[str, ...]]:
    native = [file for file in files if Capability.COMPAT32 not in file.capabilities]
    lacking = _lacking(native, machine, version)
    missing = {
        capability: tuple(f"{each.name}.so" for each in lacking if capability in each.capabilities)
        for capability in Capability
    }
    missing[Capability.DISPLAY] = tuple(
        name for name in table.X_NAMES if name not in {basename(file.name) for file in native}
    )
    missing[Capability.COMPAT32] = ()
    if other := table.COMPATIBLE.get(machine.name):
        compatible = [file for file in files if Capability.COMPAT32 in file.capabilities]
        lacking = _lacking(compatible, other, version)
        missing[Capability.COMPAT32] = (
            tuple(f"{each.name}.so" for each in lacking) if compatible else ("every 32-bit library",)
        )
    return MappingProxyType(missing)


def _lacks(libraries: Iterable[DriverFile]) -> Mapping[Capability, str]:
    have = _names(libraries)
    lacks = {capability: names for capability, names in table.STANDS_FOR.items() if have.isdisjoint(names)}
    return MappingProxyType({each: " or ".join(f"{name}.so" for name in names) for each, names in lacks.items()})


def _lacking(files: Iterable[DriverFile], machine: table.Machine, version: str) -> tuple[table.DriverLibrary, ...]:
    """Return the libraries that a driver of this version has for a machine, and that are not among its files."""
    have = _names(files)
    return tuple(each for each in table.LIBRARIES if each.expected(machine.name, version) and each.name not in have)


def _names(files: Iterable[DriverFile]) -> set[str]:
    return {basename(file.name).partition(".so.")[0] for file in files}


def _digest(files: tuple[DriverFile, ...]) -> str:
    facts = [
        (file.name, sorted(file.capabilities), file.links, file.places, *file.source.content_facts) for file in files
    ]
    return hashlib.sha256(json.dumps([LAYOUT, facts]).encode()).hexdigest()[:8]
