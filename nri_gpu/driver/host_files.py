"""The host driver's files below a driver root: where each really is, whether containers may have it, its libraries."""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import join
from typing import Final, Self

from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver import table
from nri_gpu.driver.elf import Elf, read_elf
from nri_gpu.system.storage import why_untrusted

LINKS_MAX: Final = 40  # as the kernel follows: MAXSYMLINKS, include/linux/namei.h
LIBRARY_FILE: Final = re.compile(rf"(?P<name>lib[\w+-]+)\.so\.(?P<version>{table.VERSION})")
PATTERNS: Final = ("lib*", "vdpau/lib*")
# A SONAME becomes a file name in the staged folder.
PLAIN_NAME: Final = re.compile(r"lib[\w+.-]+")


class HostFile(Struct, frozen=True):
    """A regular file of the host that containers may have, and what tells it from a later one at the same path.

    path: without any symlink. relative: below the driver root, for messages. mode: permission bits.
    """

    path: Path
    relative: str
    size_bytes: int
    mtime_ns: int
    device: int
    inode: int
    mode: int

    @classmethod
    def of(cls, path: Path, relative: str, found: os.stat_result) -> Self:
        """From the lstat(2) of `path`."""
        identity = (found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)
        return cls(path, relative, *identity, stat.S_IMODE(found.st_mode))

    @property
    def content_facts(self) -> tuple[str, int, int, int]:
        """What a generation's name depends on: another value means another file or content."""
        return self.relative, self.size_bytes, self.mtime_ns, self.inode

    def unchanged(self) -> bool:
        """Whether the same file, with the same content as far as the kernel shows, is still there."""
        try:
            return HostFile.of(self.path, self.relative, self.path.lstat()) == self
        except OSError:
            return False


class LeftOut(Struct, frozen=True):
    """A file of the driver that containers do not get. path: below the driver root. reason: a clause."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


def examine(root: Path, path: Path) -> HostFile | LeftOut:
    """The file that `path`, below `root`, leads to, if containers may have it. root: without symlinks."""
    relative = str(path.relative_to(root))
    real = resolve(root, path)
    if real is None:
        return LeftOut(relative, "leads to nothing below the driver root")
    try:
        found = real.lstat()
    except OSError as error:
        return LeftOut(relative, f"cannot be read: {error.strerror}")
    if not stat.S_ISREG(found.st_mode):
        reason = "not a regular file"
    elif found.st_mode & (stat.S_ISUID | stat.S_ISGID):
        reason = "setuid or setgid"
    else:
        reason = why_untrusted(found)
    return LeftOut(relative, reason) if reason else HostFile.of(real, relative, found)


def check_folder(folder: Path, *, follow: bool = True) -> None:
    """Raises: DriverError: others than root can put files there; OSError. follow: symlinks."""
    if why := why_untrusted(folder.stat(follow_symlinks=follow)):
        raise DriverError(f"folder {folder} is not safe ({why}): chown root and chmod go-w it")


def resolve(root: Path, path: Path) -> Path | None:
    """Where `path` really leads below `root`; None when it leads nowhere.

    An absolute link counts as it is while it stays below the root, else as inside a chroot: the root of a driver
    container links to /etc/alternatives and means its own.
    """
    plain = Path(os.path.realpath(path))
    if plain.is_relative_to(root) and plain.exists():
        return plain
    inside = _resolve_inside(root, path)
    return inside if inside is not None and inside.exists() else None


def _resolve_inside(root: Path, path: Path) -> Path | None:
    parts, here, links = deque(path.relative_to(root).parts), root, 0
    while parts:
        part = parts.popleft()
        step = here / part
        if part == "..":
            here = root if here == root else here.parent
        elif step.is_symlink():
            links += 1
            if links > LINKS_MAX:
                return None
            target = step.readlink()
            here = root if target.is_absolute() else here
            parts.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
        else:
            here = step
    return here


def distinct_folders(root: Path, folders: Iterable[Path]) -> Iterator[Path]:
    """The folders that exist, each once: `lib64` is often a link to `usr/lib64`.

    By the name given, or by the name inside the root where the given one leads out of it.
    """
    seen = set()
    for folder in folders:
        real = resolve(root, folder)
        if real is not None and real.is_dir() and real not in seen:
            seen.add(real)
            yield folder if os.path.realpath(folder) == str(real) else real


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
        """The version of a library in the first folder that has a usable one; empty: none. Raises: DriverError."""
        for folder in self.listed:
            here = (path for paths in self.entries.values() for path in paths if path.parent == folder)
            matches = ((path, match) for path in here if (match := LIBRARY_FILE.fullmatch(path.name)))
            files = {match["version"]: path for path, match in matches if match["name"] == library}
            usable = {version: found for version, path in files.items() if (found := self._usable(path))}
            if len(usable) > 1:  # leftovers of an old driver
                usable = {version: found for version, found in usable.items() if self._is_current(found)}
                if len(usable) != 1:
                    versions = " and ".join(sorted(files))
                    raise DriverError(
                        f"{folder} holds {library} of {versions}, and no link says which: remove the old one"
                    )
            if usable:
                return next(iter(usable))
        return ""

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
