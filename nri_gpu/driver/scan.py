"""Files of the driver that programs look for in one place only: configuration, and modules for programs of the image.

Loaders of Vulkan, EGL and OpenCL read folders that images fill too, so each file goes in alone, by a mount of its own.
"""

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
from nri_gpu.driver import table
from nri_gpu.driver.elf import read_elf
from nri_gpu.driver.folders import Folders, LeftOut, Source, distinct_folders, examine
from nri_gpu.driver.table import COMPUTE, DISPLAY, GRAPHICS, Machine

CONFIG_BYTES_MAX: Final = 64 * 1024
X_DRIVER, X_GLX = "nvidia_drv.so", "libglxserver_nvidia.so"
X_NAMES: Final = (X_DRIVER, X_GLX)
# Where X servers look for modules: Debian-like and RHEL-like images.
X_PLACES: Final = ("/usr/lib/xorg/modules", "/usr/lib64/xorg/modules")
# On the host, below a library folder, and then below the root.
# Source: NVIDIA/nvidia-container-toolkit internal/discover/graphics.go.
X_FOLDERS: Final = (
    "nvidia/xorg",
    *(f"xorg/modules/{part}{kind}" for part in ("", "updates/") for kind in ("drivers", "extensions")),
)
X_ROOTS: Final = ("usr/lib", "usr/lib64", "usr/X11R6/lib", "usr/X11R6/lib64")
# The driver's own searching order, and below a flat root such as /usr/local/nvidia the same folders without `usr`.
CONFIG_ROOTS: Final = ("etc", "usr/local/share", "usr/share", "share")

# A library named with its folder would not be there: in containers the driver lies elsewhere.
_ABSOLUTE: Final = re.compile(rb'"library_path"\s*:\s*"/|\A\s*/')
_SONAME_ONLY: Final = "names a library by a path that containers do not have"


class ExtraFile(Struct, frozen=True):
    """One such file. names: on the host, best first. places: in the container, the same content at each."""

    names: tuple[str, ...]
    capabilities: Capabilities
    places: tuple[str, ...]


def extra_files(machine: Machine, version: str) -> Iterator[ExtraFile]:
    """Every file that there can be."""
    for folder, names, capabilities in _CONFIGS:
        for name in (each.format(machine=machine.name) for each in names):
            yield ExtraFile((name,), capabilities, (f"{folder}/{name}",))
    drivers, extensions = ([f"{place}/{kind}" for place in X_PLACES] for kind in ("drivers", "extensions"))
    yield ExtraFile((X_DRIVER,), DISPLAY, tuple(f"{folder}/{X_DRIVER}" for folder in drivers))
    yield ExtraFile((f"{X_GLX}.{version}", X_GLX), DISPLAY, tuple(f"{folder}/{X_GLX}" for folder in extensions))
    # What Mesa's GBM loads for our card is the allocator under another name.
    gbm = (f"/usr/lib/{machine.triple}/gbm/nvidia-drm_gbm.so", "/usr/lib64/gbm/nvidia-drm_gbm.so")
    yield ExtraFile((f"libnvidia-allocator.so.{version}",), GRAPHICS, gbm)


# (folder in the container, files, capabilities)
# Source: NVIDIA/nvidia-container-toolkit internal/discover/graphics.go, pkg/nvcdi/driver-nvml.go.
_CONFIGS: Final = (
    ("/etc", ("OpenCL/vendors/nvidia.icd",), COMPUTE),
    (
        "/etc",
        (
            "vulkan/icd.d/nvidia_icd.json",
            "vulkan/icd.d/nvidia_icd.{machine}.json",
            "vulkan/icd.d/nvidia_layers.json",
            "vulkan/implicit_layer.d/nvidia_layers.json",
        ),
        GRAPHICS,
    ),
    (
        "/usr/share",
        (
            "glvnd/egl_vendor.d/10_nvidia.json",
            "egl/egl_external_platform.d/15_nvidia_gbm.json",
            "egl/egl_external_platform.d/10_nvidia_wayland.json",
            "egl/egl_external_platform.d/09_nvidia_wayland2.json",
            "egl/egl_external_platform.d/20_nvidia_xcb.json",
            "egl/egl_external_platform.d/20_nvidia_xlib.json",
            "nvidia/nvoptix.bin",
        ),
        GRAPHICS,
    ),
    ("/usr/share", ("X11/xorg.conf.d/10-nvidia.conf", "X11/xorg.conf.d/nvidia-drm-outputclass.conf"), DISPLAY),
)


def extra_candidates(
    extra: ExtraFile, root: Path, libraries: Sequence[Path], library_dirs: Sequence[str]
) -> Iterator[Path]:
    """Where below `root` it may be, best first. libraries: the folders that may hold the driver's."""
    name = extra.names[0]
    if "/" in name:
        beside = (f"{dirname(folder)}/{kind}".lstrip("/") for folder in library_dirs for kind in ("share", "etc"))
        folders = (*beside, *CONFIG_ROOTS, *(("",) if name.startswith("vulkan/") else ()))
        return (folder / name for folder in distinct_folders(root, (root / each for each in folders)))
    below = [folder / each for folder in libraries for each in ("", *X_FOLDERS)]
    below += [root / folder / each for folder in X_ROOTS for each in X_FOLDERS]
    known = tuple(distinct_folders(root, below))
    return (folder / each for each in extra.names for folder in known)


def unfit_extra(path: Path, machine: Machine) -> str:
    """Why a file that may be trusted is of no use; empty when it is. Raises: DriverError, OSError."""
    if ".so" in path.name:
        elf = read_elf(path)
        fits = elf is not None and (elf.bits, elf.machine) == (machine.bits, machine.elf)
        return "" if fits else f"not a {machine.bits}-bit {machine.name} library"
    if path.suffix not in {".json", ".icd"}:
        return ""
    with path.open("rb") as file:
        return _SONAME_ONLY if _ABSOLUTE.search(file.read(CONFIG_BYTES_MAX)) else ""


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
    for extra in extra_files(folders.machine, version):
        for path in extra_candidates(extra, folders.root, folders.listed, library_dirs):
            if not path.is_symlink() and not path.exists():
                continue
            source = examine(folders.root, path)
            reason = unfit_extra(source.path, folders.machine) if isinstance(source, Source) else ""
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
    missing[Capability.DISPLAY] = tuple(name for name in X_NAMES if name not in map(_file_name, native))
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
