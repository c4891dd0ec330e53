"""One file of the host: where it really lies, and whether we may hand it to containers."""

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

LINKS_MAX: Final = 40  # as the kernel follows: MAXSYMLINKS, include/linux/namei.h


class Source(Struct, frozen=True):
    """A regular file of the host that containers may have, and what tells it from a later one at its path.

    path: without any symlink. relative: below the driver root, for people. mode: permission bits.
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
        """From what lstat(2) said of `path`."""
        identity = (found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)
        return cls(path, relative, *identity, stat.S_IMODE(found.st_mode))

    def unchanged(self) -> bool:
        """Whether the same file, with the same content as far as the kernel tells, is still there."""
        try:
            return Source.of(self.path, self.relative, self.path.lstat()) == self
        except OSError:
            return False


class LeftOut(Struct, frozen=True):
    """A file of the driver that is not given to containers. path: below the driver root. reason: a clause."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


def examine(root: Path, path: Path) -> Source | LeftOut:
    """Whether containers may have the file that `path`, below `root`, leads to. root: without symlinks."""
    relative = str(path.relative_to(root))
    real = resolve(root, path)
    if real is None:
        return LeftOut(relative, "leads to nothing below the driver root")
    try:
        found = real.lstat()
    except OSError as error:
        return LeftOut(relative, f"cannot be looked at: {error.strerror}")
    reason = _distrust(found)
    return LeftOut(relative, reason) if reason else Source.of(real, relative, found)


def resolve(root: Path, path: Path) -> Path | None:
    """Where `path` really leads, below `root`; None when that is nowhere.

    An absolute link counts as it is while it stays below the root, else as it would inside a chroot: the root of a
    driver container links to /etc/alternatives and means its own.
    """
    plain = Path(os.path.realpath(path))
    if plain.is_relative_to(root) and plain.exists():
        return plain
    inside = _resolve_inside(root, path)
    return inside if inside is not None and inside.exists() else None


def distinct_folders(root: Path, folders: Iterable[Path]) -> Iterator[Path]:
    """Those that exist, each once: `lib64` is often a link to `usr/lib64`.

    By the name given, or where that leads out of the root, by the one it has inside.
    """
    seen = set()
    for folder in folders:
        real = resolve(root, folder)
        if real is not None and real.is_dir() and real not in seen:
            seen.add(real)
            yield folder if os.path.realpath(folder) == str(real) else real


def trusted(found: os.stat_result) -> bool:
    """Whether nobody but root and ourselves can change it.

    Ourselves is root where it matters; elsewhere (tests, a dry run) we could change our own files anyway.
    """
    return found.st_uid in {0, os.geteuid()} and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


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


def changeable(found: os.stat_result) -> str:
    """Why it is not `trusted`: a clause."""
    return f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: others than root can change it"


def _distrust(found: os.stat_result) -> str:
    """Why not, empty when there is no reason."""
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
        return "setuid or setgid"
    return "" if trusted(found) else changeable(found)


LIBRARY_FILE: Final = re.compile(rf"(?P<name>lib[\w+-]+)\.so\.(?P<version>{table.VERSION})")
PATTERNS: Final = ("lib*", "vdpau/lib*")


class FoundLibrary(Struct, frozen=True):
    """A library containers may have, with its ELF identity.

    name: of the entry, which may be a link to `source`; below its library folder.
    """

    name: str
    source: Source
    elf: Elf


class Folders(Struct):
    """The folders below one root that may hold libraries; reads of files are remembered while it lives.

    tried: every folder looked for, for the sentence that says where no driver was. entries: path below a library
    folder -> its paths, in the order in which they win. listed: the folders that exist, in that order.
    """

    root: Path
    machine: table.Machine
    tried: tuple[Path, ...]
    listed: tuple[Path, ...]
    entries: Mapping[str, tuple[Path, ...]]
    _verdicts: dict[Path, FoundLibrary | LeftOut] = field(default_factory=dict)

    @classmethod
    def below(cls, driver_root: Path, machine: table.Machine, first: Sequence[str] = ()) -> Self:
        """List the folders of `driver_root`, `first` before those we know.

        Raises: DriverError: it is no directory, or others than root can put files there; OSError.
        """
        root = Path(os.path.realpath(driver_root))  # Path.resolve raises on a circle of links
        if not root.is_dir():
            raise DriverError(f"driver root {driver_root} is not a directory")
        tried = tuple(root / folder for folder in (*first, *machine.folders))
        entries: dict[str, list[Path]] = defaultdict(list)
        listed = tuple(distinct_folders(root, tried))
        for folder in (root, *listed):
            _check_folder(folder)
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
        """The first usable library of any of these names."""
        for name in names:
            for path in self.entries.get(name, ()):
                found = self._examine(path)
                if isinstance(found, FoundLibrary):
                    return replace(found, name=name)
        return None

    def aliases(self, library: table.Library, source: Source) -> tuple[str, ...]:
        """The names, `<library>.so` and `<library>.so.*`, that lead to the file on the host; its own among them."""
        form = re.compile(rf"{re.escape(join(library.folder, library.name))}\.so(?:\.[\w.]+)?")
        names = sorted(name for name in self.entries if form.fullmatch(name))
        return tuple(
            name for name in names if any(resolve(self.root, path) == source.path for path in self.entries[name])
        )

    def unknown(self, version: str) -> tuple[str, ...]:
        """Files of this driver version that no table of ours names."""
        known = {library.name for library in table.LIBRARIES} | table.OTHERS
        matches = (match for name in sorted(self.entries) if (match := LIBRARY_FILE.fullmatch(name)))
        return tuple(match[0] for match in matches if match["version"] == version and match["name"] not in known)

    def left_out(self) -> tuple[LeftOut, ...]:
        """Every library looked at and refused so far; in 32-bit folders those of other classes are none of ours."""
        refused = (verdict for verdict in self._verdicts.values() if isinstance(verdict, LeftOut))
        return tuple(each for each in refused if self.machine.bits == 64 or each.reason != self._other_class())

    def _version_of(self, library: str) -> str:
        for group in self._by_folder(library):
            usable = {version: found for version, path in group.items() if (found := self._usable(path))}
            if len(usable) > 1:  # an old driver's leftovers beside the new one
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
        verdict = self._examine(path)
        return verdict if isinstance(verdict, FoundLibrary) else None

    def _is_current(self, found: FoundLibrary) -> bool:
        """Whether the SONAME link beside it, which is what programs load by, leads to it."""
        links = self.entries.get(found.elf.soname, ())
        return any(resolve(self.root, link) == found.source.path for link in links)

    def _examine(self, path: Path) -> FoundLibrary | LeftOut:
        if path not in self._verdicts:
            self._verdicts[path] = self._judge(path)
        return self._verdicts[path]

    def _judge(self, path: Path) -> FoundLibrary | LeftOut:
        source = examine(self.root, path)
        if isinstance(source, LeftOut):
            return source
        elf = read_elf(source.path)
        if elf is None:
            return LeftOut(source.relative, "no ELF file")
        if (elf.bits, elf.machine) != (self.machine.bits, self.machine.elf):
            return LeftOut(source.relative, self._other_class())
        return FoundLibrary(path.name, source, elf)

    def _other_class(self) -> str:
        return f"not a {self.machine.bits}-bit {self.machine.name} library"

    def _no_driver(self) -> str:
        places = ", ".join(str(folder) for folder in self.tried)
        refused = self.left_out()
        # First, because a refusal is cut where it is too long, and the folders are the long part.
        but = f"found but not usable: {', '.join(map(str, refused))}; " if refused else ""
        return f"{but}no {'other ' if but else ''}libcuda.so.V or libnvidia-ml.so.V of a driver in any of {places}"

    def _several(self, library: str, group: Mapping[str, Path]) -> str:
        folder = next(iter(group.values())).parent
        return f"{folder} holds {library} of {' and '.join(sorted(group))}, and no link says which: remove the old one"


def _check_folder(folder: Path) -> None:
    """Each file is looked at too, but in such a folder the next one may be another under the same name."""
    found = folder.stat()
    if not trusted(found):
        raise DriverError(f"driver folder {folder} is not safe ({changeable(found)}): chown root and chmod go-w it")
