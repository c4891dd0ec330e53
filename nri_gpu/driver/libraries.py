"""The driver's libraries below a driver root: which there are, which are usable, and of which driver version."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import join
from typing import Final, Self

from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver import table
from nri_gpu.driver.elf import Elf, read_elf
from nri_gpu.driver.host_file import HostFile, LeftOut, check_folder, distinct_folders, examine, resolve

LIBRARY_FILE: Final = re.compile(rf"(?P<name>lib[\w+-]+)\.so\.(?P<version>{table.VERSION})")
PATTERNS: Final = ("lib*", "vdpau/lib*")


class FoundLibrary(Struct, frozen=True):
    """A library that containers may have.

    name: of the entry below its library folder, which may be a link to `source`.
    """

    name: str
    source: HostFile
    elf: Elf


class LibraryFolders(Struct):
    """The folders below one root that may hold libraries. Each library is examined once.

    tried: every folder looked for, for messages. listed: those that exist, in the order in which they win.
    entries: path below a library folder -> its paths, in that order.
    """

    root: Path
    machine: table.Machine
    tried: tuple[Path, ...]
    listed: tuple[Path, ...]
    entries: Mapping[str, tuple[Path, ...]]
    _examined: dict[Path, FoundLibrary | LeftOut] = field(default_factory=dict)

    @classmethod
    def below(cls, driver_root: Path, machine: table.Machine, first: Sequence[str] = ()) -> Self:
        """Lists the folders of `driver_root`, `first` before the well-known ones.

        Raises: DriverError: it is not a directory, or others than root can put files there; OSError.
        """
        root = Path(os.path.realpath(driver_root))  # Path.resolve raises on a circle of links
        if not root.is_dir():
            raise DriverError(f"driver root {driver_root} is not a directory")
        tried = tuple(root / folder for folder in (*first, *machine.folders))
        entries: dict[str, list[Path]] = defaultdict(list)
        listed = tuple(distinct_folders(root, tried))
        for folder in (root, *listed):
            # Files are examined too, but in an unsafe folder another could take a file's place.
            check_folder(folder)
        for folder in listed:
            for pattern in PATTERNS:
                for path in sorted(folder.glob(pattern)):
                    entries[str(path.relative_to(folder))].append(path)
        return cls(root, machine, tried, listed, {name: tuple(paths) for name, paths in entries.items()})

    def version(self) -> str:
        """The version in the names of libcuda and libnvidia-ml. Raises: DriverError: none, or they disagree."""
        found = {name: version for name in table.VERSION_LIBRARIES if (version := self._version_of(name))}
        if not found:
            raise DriverError(self._no_driver())
        if len(set(found.values())) > 1:
            versions = " but ".join(f"{name} of {version}" for name, version in found.items())
            raise DriverError(f"driver root {self.root} holds {versions}: finish or repair the driver's installation")
        return next(iter(found.values()))

    def first(self, names: tuple[str, ...]) -> FoundLibrary | None:
        """The first usable library with one of these names."""
        for name in names:
            for path in self.entries.get(name, ()):
                if found := self._usable(path):
                    return replace(found, name=name)
        return None

    def aliases(self, library: table.DriverLibrary, source: HostFile) -> tuple[str, ...]:
        """The names `<library>.so` and `<library>.so.*` that lead to the file on the host, with its own."""
        form = re.compile(rf"{re.escape(join(library.folder, library.name))}\.so(?:\.[\w.]+)?")
        names = sorted(name for name in self.entries if form.fullmatch(name))
        return tuple(
            name for name in names if any(resolve(self.root, path) == source.path for path in self.entries[name])
        )

    def unknown(self, version: str) -> tuple[str, ...]:
        """Files of this driver version that our table does not name."""
        known = {library.name for library in table.LIBRARIES} | table.OTHERS
        matches = (match for name in sorted(self.entries) if (match := LIBRARY_FILE.fullmatch(name)))
        return tuple(match[0] for match in matches if match["version"] == version and match["name"] not in known)

    def left_out(self) -> tuple[LeftOut, ...]:
        """Every library that was examined and refused; 32-bit folders may hold 64-bit libraries, which do not count."""
        refused = (found for found in self._examined.values() if isinstance(found, LeftOut))
        return tuple(each for each in refused if self.machine.bits == 64 or each.reason != self.machine.wrong_class)

    def _version_of(self, library: str) -> str:
        for group in self._by_folder(library):
            usable = {version: found for version, path in group.items() if (found := self._usable(path))}
            if len(usable) > 1:  # leftovers of an old driver
                usable = {version: found for version, found in usable.items() if self._is_current(found)}
                if len(usable) != 1:
                    raise DriverError(self._several(library, group))
            if usable:
                return next(iter(usable))
        return ""

    def _by_folder(self, library: str) -> Iterator[dict[str, Path]]:
        """Version -> path of the library's files, folder by folder, best first."""
        groups: dict[Path, dict[str, Path]] = {folder: {} for folder in self.listed}
        for name, paths in self.entries.items():
            match = LIBRARY_FILE.fullmatch(name)
            if match and match["name"] == library:
                for path in paths:
                    groups[path.parent][match["version"]] = path
        return (group for group in groups.values() if group)

    def _usable(self, path: Path) -> FoundLibrary | None:
        if path not in self._examined:
            self._examined[path] = self._examine(path)
        found = self._examined[path]
        return found if isinstance(found, FoundLibrary) else None

    def _is_current(self, found: FoundLibrary) -> bool:
        """Whether the SONAME link beside it, by which programs load it, leads to it."""
        links = self.entries.get(found.elf.soname, ())
        return any(resolve(self.root, link) == found.source.path for link in links)

    def _examine(self, path: Path) -> FoundLibrary | LeftOut:
        source = examine(self.root, path)
        if isinstance(source, LeftOut):
            return source
        elf = read_elf(source.path)
        if elf is None:
            return LeftOut(source.relative, "not an ELF file")
        if not self.machine.runs(elf):
            return LeftOut(source.relative, self.machine.wrong_class)
        return FoundLibrary(path.name, source, elf)

    def _no_driver(self) -> str:
        places = ", ".join(str(folder) for folder in self.tried)
        refused = self.left_out()
        # The folders are the long part and come last: a refusal that is too long is cut.
        unusable = f"found but not usable: {', '.join(map(str, refused))}; " if refused else ""
        other = "other " if refused else ""
        return f"{unusable}no {other}libcuda.so.V or libnvidia-ml.so.V of a driver in any of {places}"

    def _several(self, library: str, group: Mapping[str, Path]) -> str:
        folder = next(iter(group.values())).parent
        return f"{folder} holds {library} of {' and '.join(sorted(group))}, and no link says which: remove the old one"
