"""The driver's libraries by name, whatever folder each is in."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from posixpath import dirname, join
from typing import Final, Self

from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.driver import table
from nri_gpu.driver.elf import Elf, read_elf
from nri_gpu.driver.host_files import LIBRARY_FILE, HostFile, LeftOut, check_folder, examine, resolve
from nri_gpu.driver.search import DriverSearch

PATTERNS: Final = ("lib*", "vdpau/lib*")


class FoundLibrary(Struct, frozen=True):
    """A library that containers may have.

    name: of the entry below its library folder, which may be a link to `source`.
    """

    name: str
    source: HostFile
    elf: Elf


class LibraryFolders(Struct):
    """The folders that may hold one driver's libraries. Each library is examined once."""

    search: DriverSearch
    version: str
    listed: tuple[Path, ...]  # those that exist, in the order in which they win
    entries: Mapping[str, tuple[Path, ...]]  # path below a library folder -> its paths, in that order
    _examined: dict[Path, FoundLibrary | LeftOut] = field(default_factory=dict)

    @classmethod
    def of(cls, search: DriverSearch, version: str) -> Self:
        """Return the folders of the driver of this version.

        Raises: DriverError: users other than root can put files there; OSError.
        """
        entries: dict[str, list[Path]] = defaultdict(list)
        listed = search.folders(version)
        for folder in (search.root, *listed):
            # Files are examined too, but in an unsafe folder another could take a file's place.
            check_folder(folder)
        for folder in listed:
            for pattern in PATTERNS:
                for path in sorted(folder.glob(pattern)):
                    entries[str(path.relative_to(folder))].append(path)
        return cls(search, version, listed, {name: tuple(paths) for name, paths in entries.items()})

    def first(self, names: tuple[str, ...]) -> FoundLibrary | None:
        """Return the first usable library with one of these names."""
        for name in names:
            for path in self.entries.get(name, ()):
                if found := self._usable(path):
                    return replace(found, name=name)
        return None

    def aliases(self, library: table.DriverLibrary, source: HostFile) -> tuple[str, ...]:
        """Return the names `<library>.so` and `<library>.so.*` that lead to the file on the host, with its own."""
        form = re.compile(rf"{re.escape(join(library.folder, library.name))}\.so(?:\.[\w.]+)?")
        names = sorted(name for name in self.entries if form.fullmatch(name))
        return tuple(
            name for name in names if any(resolve(self.search.root, path) == source.path for path in self.entries[name])
        )

    def unknown(self) -> tuple[str, ...]:
        """Return the files of this driver that our table does not name."""
        known = {library.name for library in table.LIBRARIES} | table.OTHERS
        matches = (match for name in sorted(self.entries) if (match := LIBRARY_FILE.fullmatch(name)))
        return tuple(match[0] for match in matches if match["version"] == self.version and match["name"] not in known)

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return each library that was examined and refused; another machine's only beside the driver itself."""
        refused = (*self.search.refused, *(each for each in self._examined.values() if isinstance(each, LeftOut)))
        own = {str(folder.relative_to(self.search.root)) for folder in self.search.own_folders(self.version)}
        wrong = self.search.machine.wrong_class
        return tuple(each for each in refused if each.reason != wrong or (dirname(each.path) or ".") in own)

    def _usable(self, path: Path) -> FoundLibrary | None:
        if path not in self._examined:
            self._examined[path] = self._examine(path)
        found = self._examined[path]
        return found if isinstance(found, FoundLibrary) else None

    def _examine(self, path: Path) -> FoundLibrary | LeftOut:
        source = examine(self.search.root, path)
        if isinstance(source, LeftOut):
            return source
        elf = read_elf(source.path)
        if elf is None:
            return LeftOut(source.relative, "not an ELF file")
        if not self.search.machine.runs(elf):
            return LeftOut(source.relative, self.search.machine.wrong_class)
        return FoundLibrary(path.name, source, elf)
