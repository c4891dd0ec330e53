"""The one search for the driver below a root, which NVML, the staged files and the change signatures share.

The driver is where `libcuda.so.1` and `libnvidia-ml.so.1` lead. A root can hold several: leftovers of an old driver, a
package of CUDA's forward compatibility, Debian's versions side by side.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from posixpath import dirname
from typing import Final, Self

from msgspec import Struct

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver import table
from nri_gpu.driver.elf import read_elf
from nri_gpu.driver.host_files import (
    LIBRARY_FILE,
    HostFile,
    LeftOut,
    distinct_folders,
    driver_root,
    examine,
    resolve,
    resolve_text,
)
from nri_gpu.system.storage import text_of

CUDA, NVML = "libcuda", "libnvidia-ml"
SONAMES: Final = {CUDA: "libcuda.so.1", NVML: "libnvidia-ml.so.1"}
LOADER_CONFIGURATION: Final = "etc/ld.so.conf"
CONF_BYTES_MAX, CONF_FILES_MAX = 64 * 1024, 256
# Debian keeps a version's programs and X modules in `usr/lib/nvidia/tesla-535`.
_DEBIAN: Final = re.compile(r"(?:usr/)?lib/[\w-]+-linux-gnu/(nvidia/[^/]+)")


class Lead(Struct, frozen=True):
    """A library that tells where a driver is."""

    library: str
    version: str  # in the name of the file that a link leads to, or empty
    folder: Path  # of the search; the file may lie in another
    file: HostFile


class OtherDriver(Struct, frozen=True):
    """A driver, or a part of one, that is not used. folder: below the driver root."""

    version: str
    folder: str

    def __str__(self) -> str:
        return f"{self.version} in {self.folder or 'the driver root itself'}"


class DriverSearch(Struct, frozen=True):
    """The leads below one root, in the order in which they win."""

    root: Path
    machine: table.Machine
    tried: tuple[Path, ...]  # every folder looked for, for messages
    known: tuple[Path, ...]  # of these, the configured and the well-known ones
    leads: tuple[Lead, ...]
    refused: tuple[LeftOut, ...]  # libraries that containers may not have

    @property
    def places(self) -> str:
        """Return the folders, for messages. They are long and come last, since a refusal that is too long is cut."""
        return ", ".join(map(str, self.tried))

    @property
    def unusable(self) -> str:
        """Return a clause with the refused libraries, for messages, or empty."""
        return f"found but not usable: {', '.join(map(str, self.refused))}; " if self.refused else ""

    @classmethod
    def below(cls, path: Path, machine: table.Machine, first: Sequence[str] = ()) -> Self:
        """Search the driver root at `path`. first: configured folders below it.

        Raises: DriverError, if `path` is not a directory, or a library cannot be read; OSError.
        """
        root = driver_root(path)
        configured, known = _places(root, first), _places(root, machine.folders)
        tried = tuple(dict.fromkeys((*configured, *loader_folders(root), *known)))
        leads: list[Lead] = []
        refused: list[LeftOut] = []
        for each in distinct_folders(root, tried):
            folder = resolve(root, each) or each  # `usr/lib64` rather than `lib64`
            for library in SONAMES:
                leads += _leads(root, machine, folder, library, refused)
        return cls(root, machine, tried, (*configured, *known), tuple(leads), tuple(dict.fromkeys(refused)))

    def chosen(self, module: str) -> str:
        """Return the driver's version: the loaded module's if it is there, else the first, or empty if there is none.

        module: the version of the loaded kernel module, or empty.
        """
        versions = self._whole()
        return module if module in versions else next(iter(versions), "")

    def version(self, module: str) -> str:
        """Return the `chosen` version.

        Raises: DriverError: there is no driver, or what there is does not say its version.
        """
        version = self.chosen(module)
        if not version:
            raise DriverError(self._disagreement() or self._no_driver())
        lead = next(lead for lead in self.leads if lead.version == version)
        beside = {each.version for each in self.leads if (each.library, each.folder) == (lead.library, lead.folder)}
        if version != module and len(beside) > 1:  # leftovers of an old driver, and no link
            raise DriverError(
                f"{lead.folder} holds {lead.library} of {' and '.join(sorted(beside))}, and no link says which: remove "
                "the old one"
            )
        return version

    def nvml(self, module: str) -> Path | None:
        """Return NVML's library of the driver, or any if no driver is whole, or None if there is none."""
        leads = [lead for lead in self.leads if lead.library == NVML]
        ours = [lead for lead in leads if lead.version in ("", self.chosen(module))]
        return next((lead.file.path for lead in (*ours, *leads)), None)

    def own_folders(self, version: str) -> tuple[Path, ...]:
        """Return the folders that hold the two libraries of a driver, and those that lead there."""
        own = [lead for lead in self.leads if lead.version == version]
        return tuple(dict.fromkeys((*(lead.file.path.parent for lead in own), *(lead.folder for lead in own))))

    def folders(self, version: str) -> tuple[Path, ...]:
        """Return where the driver's other libraries may be: beside the two, then in the known folders."""
        return tuple(distinct_folders(self.root, (*self.own_folders(version), *self.known)))

    def beside(self, version: str) -> Iterator[str]:
        """Yield folders below the root whose files belong to the driver alone, however the system's links are set."""
        for folder in self.own_folders(version):
            if debian := _DEBIAN.fullmatch(str(folder.relative_to(self.root))):
                yield f"usr/lib/{debian[1]}"

    def parents(self, version: str) -> Iterator[str]:
        """Return folders below the root whose `bin`, `share` and `etc` may be the driver's, not just the system's."""
        system = {self.root / folder for folder in self.machine.folders}
        own = (folder for folder in self.own_folders(version) if folder not in system)
        configured = self.known[: -len(self.machine.folders)]
        return (dirname(str(folder.relative_to(self.root))) for folder in dict.fromkeys((*configured, *own)))

    def others(self, version: str) -> tuple[OtherDriver, ...]:
        """Return the drivers of other versions."""
        found = (lead for lead in self.leads if lead.version not in ("", version))
        named = (OtherDriver(lead.version, _relative(self.root, lead.file.path.parent)) for lead in found)
        return tuple(dict.fromkeys(named))

    def _whole(self) -> tuple[str, ...]:
        """Return the versions that have both libraries, or any version if no folder has the other library."""
        found: dict[str, set[str]] = {}
        for lead in self.leads:
            if lead.version:
                found.setdefault(lead.version, set()).add(lead.library)
        every = set[str]().union(*found.values())
        return tuple(version for version, libraries in found.items() if libraries == every)

    def _disagreement(self) -> str:
        first = {lead.library: lead.version for lead in reversed(self.leads) if lead.version}
        versions = " but ".join(f"{name} of {first[name]}" for name in SONAMES if name in first)
        return f"driver root {self.root} holds {versions}: finish or repair the driver's installation" if first else ""

    def _no_driver(self) -> str:
        other = "other " if self.refused else ""
        return f"{self.unusable}no {other}libcuda.so.V or libnvidia-ml.so.V of a driver in any of {self.places}"


def machine_of(name: str = "") -> table.Machine:
    """Return the machine of this name, or this machine if it is empty.

    Raises: DriverError: there is no driver for it.
    """
    name = name or platform.machine()
    if machine := table.MACHINES.get(name):
        return machine
    raise DriverError(f"there is no NVIDIA driver for {name}, only for {', '.join(table.MACHINES)}")


def search_paths(folder: Path, machines: Iterable[table.Machine], first: Sequence[str] = ()) -> Iterator[str | None]:
    """Yield every path that a search depends on, and None for a link that leads nowhere. Read no library."""
    root = Path(os.path.realpath(folder))
    configuration = tuple(_configuration(root, root / LOADER_CONFIGURATION, set()))
    yield from dict.fromkeys(str(file) for file, _ in configuration)
    top = os.fspath(root).rstrip("/")
    yield resolve_text(top, f"{top}/{LOADER_CONFIGURATION}.d")
    well_known = (folder for machine in machines for folder in machine.folders)
    for each in dict.fromkeys(folder.strip("/") for folder in (*first, *_named(configuration), *well_known)):
        yield f"{top}/{each}"
        for soname in SONAMES.values():
            found = resolve_text(top, f"{top}/{each}/{soname}")
            yield from (found, found and dirname(found))


def loader_folders(root: Path) -> tuple[Path, ...]:
    """Return the folders that ld.so.conf of a root names, in its order, as ldconfig reads them inside a chroot.

    Source: ldconfig(8); glibc elf/ldconfig.c (parse_conf).
    """
    return _places(root, _named(_configuration(root, root / LOADER_CONFIGURATION, set())))


def _named(configuration: Iterable[tuple[Path, str]]) -> tuple[str, ...]:
    # A type may follow, as in `/lib=libc6`.
    folders = (line.partition("=")[0].strip().strip("/") for _, line in configuration)
    return tuple(dict.fromkeys(folder for folder in folders if folder))


def _configuration(root: Path, file: Path, read: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each line that names a folder, with its file, and each file also with an empty line.

    read: files, to be read once.
    """
    found = resolve(root, file)
    if found is None or found in read or len(read) == CONF_FILES_MAX:
        return
    read.add(found)
    yield found, ""
    for line in (text_of(found, CONF_BYTES_MAX, "utf-8") or "").splitlines():
        keyword, *patterns = line.partition("#")[0].split() or [""]
        if keyword == "include":
            for each in (each for pattern in patterns for each in _matching(root, file.parent, pattern)):
                yield from _configuration(root, each, read)
        elif keyword != "hwcap":  # which the loader no longer knows
            yield found, line.partition("#")[0].strip()


def _matching(root: Path, beside: Path, pattern: str) -> list[Path]:
    """Return the files below a root that a pattern in a file's folder means, by name.

    Only its last part can be a pattern.
    """
    parent, _, last = pattern.rpartition("/")
    folder = resolve(root, root / parent.strip("/") if pattern.startswith("/") else beside / parent)
    entries = sorted(folder.glob("*")) if folder else []
    return [each for each in entries if fnmatchcase(each.name, last) and not each.name.startswith(".")]


def _places(root: Path, folders: Sequence[str]) -> tuple[Path, ...]:
    return tuple(root / folder.strip("/") for folder in folders)


def _relative(root: Path, folder: Path) -> str:
    return "" if folder == root else str(folder.relative_to(root))


def _leads(root: Path, machine: table.Machine, folder: Path, library: str, refused: list[LeftOut]) -> Iterator[Lead]:
    """Yield where a folder leads to: by the link that programs load, or by files with a version. Add to `refused`."""
    link = folder / SONAMES[library]
    paths = [resolve(root, link) or link] if link.is_symlink() or link.exists() else []
    by_link = [lead for path in paths if (lead := _lead(root, machine, path, library, folder, refused))]
    yield from by_link
    if not any(lead.version for lead in by_link):
        for path in sorted(folder.glob(f"{library}.so.*")):
            match = LIBRARY_FILE.fullmatch(path.name)
            if match and (lead := _lead(root, machine, path, library, folder, refused)):
                yield lead


def _lead(
    root: Path, machine: table.Machine, path: Path, library: str, folder: Path, refused: list[LeftOut]
) -> Lead | None:
    source = examine(root, path)
    if isinstance(source, HostFile):
        elf = read_elf(source.path)
        if elf and machine.runs(elf):
            names = (LIBRARY_FILE.fullmatch(name) for name in (source.path.name, path.name))
            versions = (match["version"] for match in names if match and match["name"] == library)
            return Lead(library, next(versions, ""), folder, source)
        source = LeftOut(source.relative, machine.wrong_class if elf else "not an ELF file")
    refused.append(source)
    return None
