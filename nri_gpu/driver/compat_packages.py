"""CUDA's forward-compatibility packages that an administrator put on the host: one folder for each CUDA version.

A folder is named `13.0` and holds `libcuda.so.580.65.06` and its other libraries, as NVIDIA's package
`cuda-compat-13-0` has them below /usr/local/cuda-13.0/compat. A package that cannot be used does not affect the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from loguru import logger
from msgspec import Meta, Struct, field

from nri_gpu.domain.errors import DriverError, cause_of, fault_of
from nri_gpu.domain.gpu import Capability
from nri_gpu.domain.node import CompatPackage, CudaVersion
from nri_gpu.driver import table
from nri_gpu.driver.elf import Elf, MalformedError, parse_note, read_elf
from nri_gpu.driver.host_files import PLAIN_NAME, HostFile, LeftOut, check_folder, examine
from nri_gpu.driver.stage import stage_plan
from nri_gpu.driver.stage_owner import StageOwner
from nri_gpu.system.state import NodeState
from nri_gpu.system.storage import why_untrusted
from nri_gpu.system.tasks import LogOnce

# NVIDIA/nvidia-container-toolkit: cmd/nvidia-cdi-hook/cudacompat/cuda-elf-header.go.
NOTE_SECTION: Final = ".note.cuda.fwd_compatibility"
NOTE_OWNER: Final = "NVIDIA Corporation"
LAYOUT: Final = 1  # part of every generation's name: raise it when the same files are to be staged differently
FOLDER_NAME: Final = re.compile(r"([1-9]\d{0,2})\.(0|[1-9]\d?)")
LIBRARY_FILE: Final = re.compile(r"lib[\w+-]+\.so(?:\.[\d.]+)?")
CUDA_FILE: Final = re.compile(rf"libcuda\.so\.({table.VERSION})")
DRIVERS_MAX: Final = 256  # majors in a note; today's have six
# Libraries that must be of the kernel module's own version.
_OF_THE_DRIVER: Final = table.OTHERS | {
    each.name for each in table.LIBRARIES if Capability.COMPUTE not in each.capabilities
}
_UNVERSIONED: Final = {each.name for each in table.LIBRARIES if each.suffixes == table.SO4}


class FoundCompat(Struct, frozen=True):
    """A package that containers may have. files: name -> the host's file, or the target of a symlink."""

    cuda: CudaVersion
    version: str
    drivers: frozenset[int] | None
    files: Mapping[str, HostFile | str]

    @property
    def generation(self) -> str:
        """Return a name that is safe as a file name and changes whenever a file does."""
        facts = [
            (name, each if isinstance(each, str) else each.content_facts) for name, each in sorted(self.files.items())
        ]
        digest = hashlib.sha256(json.dumps([LAYOUT, facts]).encode()).hexdigest()[:8]
        return "compat{}.{}-{}-{}".format(*self.cuda, self.version, digest)

    def at(self, folder: Path) -> CompatPackage:
        """Return what containers get of the package, staged at `folder`."""
        return CompatPackage(
            cuda=self.cuda,
            version=self.version,
            drivers=self.drivers,
            generation=folder.name,
            path=str(folder),
        )


class FoundPackages(Struct, frozen=True):
    """The content of a folder of packages: the usable ones, the lowest CUDA version first, and what is left out."""

    packages: tuple[FoundCompat, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def scan_compat(folder: Path) -> FoundPackages:
    """Return the packages in `folder`.

    Raises: DriverError, if the folder cannot be read, is no directory, or can be changed by users other than root.
    """
    machine = table.MACHINES.get(platform.machine())
    if machine is None:
        return FoundPackages()
    try:
        check_folder(folder)
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise DriverError(f"compatibility packages in {folder} cannot be read: {cause_of(error)}") from error
    left_out: list[LeftOut] = []
    packages = [found for entry in entries if (found := _package(entry, machine, left_out))]
    return FoundPackages(tuple(sorted(packages, key=lambda each: each.cuda)), tuple(left_out))


def folder_signature(folder: Path) -> tuple[tuple[object, ...], ...]:
    """Return a value that changes when anything in a folder of packages does. Stat each file, and read none."""
    found: list[tuple[object, ...]] = []
    with contextlib.suppress(OSError):
        for path in (folder, *sorted(folder.iterdir()), *sorted(folder.glob("*/*"))):
            with contextlib.suppress(OSError):  # a link to nothing
                now = path.stat()
                # Not the ctime, which our own hard links change.
                found.append((str(path), now.st_dev, now.st_ino, now.st_mode, now.st_uid, now.st_size, now.st_mtime_ns))
    return tuple(found)


def _package(folder: Path, machine: table.Machine, left_out: list[LeftOut]) -> FoundCompat | None:
    """Return the package in a folder, or None if it is unusable. Add to `left_out` what containers do not get."""
    named = FOLDER_NAME.fullmatch(folder.name)
    if named is None:
        left_out.append(LeftOut(folder.name, "not named for a CUDA version such as 13.0"))
        return None
    try:
        files = _files(folder, machine, left_out)
        version, drivers = _identity(folder.name, files)
    except (DriverError, OSError) as error:
        reason = cause_of(error) if isinstance(error, OSError) else fault_of(error)
        left_out.append(LeftOut(folder.name, reason))
        return None
    reasons = {name: _why_left_out(name, version) for name in files}
    left_out += [LeftOut(f"{folder.name}/{name}", reason) for name, reason in reasons.items() if reason]
    kept = {name: each for name, each in files.items() if not reasons[name]}
    plan: dict[str, HostFile | str] = {**dict(_links(kept)), **{name: source for name, (source, _) in kept.items()}}
    return FoundCompat((int(named[1]), int(named[2])), version, drivers, MappingProxyType(plan))


def _files(folder: Path, machine: table.Machine, left_out: list[LeftOut]) -> dict[str, tuple[HostFile, Elf]]:
    """Return the libraries in a folder, by the files' own names. Raises: DriverError, OSError."""
    root = Path(os.path.realpath(folder))
    if why := why_untrusted(root.stat(), root):
        raise DriverError(why)
    found: dict[str, tuple[HostFile, Elf]] = {}
    for path in sorted(each for each in root.iterdir() if LIBRARY_FILE.fullmatch(each.name)):
        source = examine(root, path)
        if isinstance(source, LeftOut):
            reason = "leads out of the package" if path.is_symlink() else source.reason
            left_out.append(LeftOut(f"{folder.name}/{path.name}", reason))
        elif source.path == path:  # our own links replace the host's
            elf = read_elf(path)
            if elf and machine.runs(elf):
                found[path.name] = source, elf
            else:
                left_out.append(LeftOut(f"{folder.name}/{path.name}", machine.wrong_class))
    return found


def _identity(folder: str, files: Mapping[str, tuple[HostFile, Elf]]) -> tuple[str, frozenset[int] | None]:
    """Return version and host drivers of the only libcuda among the files. Raises: DriverError."""
    matches = [match for name in files if (match := CUDA_FILE.fullmatch(name))]
    if len(matches) != 1:
        names = ", ".join(match[0] for match in matches)
        raise DriverError(f"holds several: {names}" if names else "holds no usable libcuda.so.V")
    source, elf = files[matches[0][0]]
    if elf.soname != "libcuda.so.1":
        raise DriverError(f"the SONAME of its {matches[0][0]} is not libcuda.so.1")
    return matches[0][1], _drivers(source.path, folder)


def _drivers(libcuda: Path, folder: str) -> frozenset[int] | None:
    """Return the majors of host drivers in the library's note, or None without a note or list.

    Raises: DriverError, OSError.
    """
    try:
        with libcuda.open("rb") as file:
            text = parse_note(file, NOTE_SECTION, NOTE_OWNER)
        if text is None:
            return None
        cuda, drivers = read_note(text)
    except MalformedError:
        raise DriverError(f"the note {NOTE_SECTION} of its libcuda is malformed") from None
    if cuda and cuda != folder:
        raise DriverError(f"its libcuda is for CUDA {cuda}, which the folder is not named for")
    return drivers or None


class _Note(Struct):
    cuda: Annotated[str, Meta(pattern=rf"\A(?:{FOLDER_NAME.pattern})?\Z")] = field(name="CUDA Version", default="")
    drivers: Annotated[tuple[int, ...], Meta(max_length=DRIVERS_MAX)] | None = field(name="Driver", default=None)


def read_note(text: bytes) -> tuple[str, frozenset[int]]:
    """Return the CUDA version and the majors of host drivers in a note's text, each empty if the note has none.

    Raises: MalformedError: not JSON, or another format than the one we know.
    """
    try:
        note = msgspec.json.decode(text, type=_Note)
    except (ValueError, RecursionError):
        raise MalformedError from None
    return note.cuda, frozenset(note.drivers or ())


def _why_left_out(name: str, version: str) -> str:
    """Return a clause that says why a library is no part of this version's package, or empty if it is a part."""
    library, _, own_version = name.partition(".so")
    if own_version == f".{version}":
        return "must be the driver's own" if library in _OF_THE_DRIVER else ""
    return "" if library in _UNVERSIONED else f"not of version {version}, as its libcuda is"


def _links(files: Mapping[str, tuple[HostFile, Elf]]) -> Iterator[tuple[str, str]]:
    """Yield a link by each SONAME, as programs load it, and for libcuda also by the name without a version."""
    for name, (_, elf) in sorted(files.items()):
        if PLAIN_NAME.fullmatch(elf.soname) and elf.soname != name:
            yield elf.soname, name
        if elf.soname == "libcuda.so.1":
            yield "libcuda.so", elf.soname


SHOWN: Final = 20  # left-out files in a log line


class CompatController:
    """The stager of the packages: it works when asked to, or when something in their folder changed."""

    def __init__(self, folder: Path, owner: StageOwner, node_state: NodeState) -> None:
        self._folder = folder
        self._owner = owner
        self._node_state = node_state
        self._signature: object = None
        self._log = LogOnce()

    async def look(self, *, asked: bool) -> None:
        """Look once. asked: scan even if nothing changed."""
        seen = await asyncio.to_thread(folder_signature, self._folder)
        if not asked and seen == self._signature:
            return
        found, packages, faults = await asyncio.to_thread(self._take)
        self._signature = None if faults else seen  # after a fault the next look scans again
        if packages != self._node_state.node.compat:
            self._node_state.put_compat(packages)
            versions = ", ".join(f"{each.cuda_version} ({each.version})" for each in packages)
            logger.bind(name=versions or "-").info("CUDA compatibility packages staged")
        fault = "; ".join((*faults, *map(str, found.left_out[:SHOWN])))
        self._log.warning("CUDA compatibility packages left out", fault, path=str(self._folder))

    def _take(self) -> tuple[FoundPackages, tuple[CompatPackage, ...], list[str]]:
        """Return what was found, the packages that are staged now, and why the rest is not staged."""
        try:
            found = scan_compat(self._folder)
        except DriverError as error:
            return FoundPackages(), (), [str(error)]
        packages, faults = [], []
        for each in found.packages:
            try:
                self._owner.take()
                packages.append(each.at(stage_plan(each.files, each.generation, self._owner.base)))
            except (DriverError, OSError) as error:
                faults.append(f"{each.generation} cannot be staged: {fault_of(error)}")
        return found, tuple(packages), faults
