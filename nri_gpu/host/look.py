"""One look at the host: reads what planning needs, opens no device, follows no link below /dev, changes nothing."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from nri_gpu.domain.gpu import Majors
from nri_gpu.host.facts import CAPS, CHAR, DevPath, Entry, Facts, Finding, Folder, Link, Module, Node, Other, Places
from nri_gpu.host.modules import is_loaded
from nri_gpu.host.texts import CAPABILITY

_VENDOR: Final = "0x10de"
_DISPLAY: Final = re.compile(r"0x03[0-9a-f]{4}")  # PCI base class of VGA (0x0300) and 3D (0x0302) controllers
_ADDRESS: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_NUMBER: Final = re.compile(r"[0-9]+:[0-9]+")
_TEXT_MAX: Final = 1 << 20  # bytes; the longest of these files is mig-minors, some 100 KB
_KINDS: Final = ((stat.S_ISREG, "a regular file"), (stat.S_ISBLK, "a block device"), (stat.S_ISFIFO, "a pipe"))


def look(places: Places, read_majors: Callable[[str], Majors]) -> Facts:
    """Look once.

    read_majors: understands /proc/devices. It is another room's.
    """
    reader = _Reader(places)
    driver = places.proc / "driver" / "nvidia"
    return Facts(
        devices=tuple(reader.devices()),
        modules=frozenset(module for module in Module if is_loaded(places.sys, module)),
        majors=read_majors(reader.text(places.proc / "devices")),
        params=reader.text(driver / "params"),
        gpus=reader.gpus(driver / "gpus"),
        capabilities=reader.capabilities(driver / "capabilities"),
        mig_minors=reader.text(places.proc / "driver" / "nvidia-caps" / "mig-minors"),
        entries=dict(reader.entries()),
        unreadable=tuple(reader.unreadable),
    )


class _Reader(Struct):
    """Remembers what it could not read; what is not there is simply empty."""

    places: Places
    unreadable: list[Finding] = field(default_factory=list)

    def text(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                return file.read(_TEXT_MAX).decode("utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""  # and an instance may go while we look
        except OSError as error:
            self._cannot(path, error)
            return ""

    def names(self, folder: Path) -> list[str]:
        try:
            return sorted(path.name for path in folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._cannot(folder, error)
            return []

    def devices(self) -> Iterator[str]:
        """PCI addresses of NVIDIA's display devices, whoever drives them."""
        folder = self.places.sys / "bus" / "pci" / "devices"
        for address in self.names(folder):
            vendor = self.text(folder / address / "vendor").strip()
            if vendor == _VENDOR and _DISPLAY.fullmatch(self.text(folder / address / "class").strip()):
                yield address

    def gpus(self, folder: Path) -> Mapping[str, str]:
        addresses = (name for name in self.names(folder) if _ADDRESS.fullmatch(name))
        texts = {address: self.text(folder / address / "information") for address in addresses}
        return {address: text for address, text in texts.items() if text}

    def capabilities(self, folder: Path) -> Mapping[str, str]:
        paths = [*folder.glob("gpu*/mig/gi*/access"), *folder.glob("gpu*/mig/gi*/ci*/access")]
        names = sorted(path.relative_to(folder).as_posix() for path in paths)
        texts = {name: self.text(folder / name) for name in names if CAPABILITY.fullmatch(name)}
        return {name: text for name, text in texts.items() if text}

    def entries(self) -> Iterator[tuple[DevPath, Entry]]:
        """What is below /dev that is ours to know of: nvidia*, and the links by number."""
        yield from self._entries("", lambda name: name.startswith("nvidia") or name == CHAR)
        for folder, matches in ((CAPS, lambda name: True), (CHAR, _NUMBER.fullmatch)):
            if isinstance(self._entry(self.places.dev / folder), Folder):
                yield from self._entries(f"{folder}/", matches)

    def _entries(self, prefix: str, matches: Callable[[str], object]) -> Iterator[tuple[DevPath, Entry]]:
        folder = self.places.dev / prefix
        for name in filter(matches, self.names(folder)):
            entry = self._entry(folder / name)
            if entry is not None:
                yield DevPath(f"{prefix}{name}"), entry

    def _entry(self, path: Path) -> Entry | None:
        try:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                return Link(os.fspath(path.readlink()))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._cannot(path, error)
            return None
        if stat.S_ISDIR(status.st_mode):
            return Folder()
        if stat.S_ISCHR(status.st_mode):
            return node_of(status)
        return Other(next((kind for test, kind in _KINDS if test(status.st_mode)), "no device node"))

    def _cannot(self, path: Path, error: OSError) -> None:
        self.unreadable.append(Finding(self._shown(path), f"cannot be read: {error.strerror}"))

    def _shown(self, path: Path) -> str:
        """The path as people know it, wherever the trees are."""
        trees = ((self.places.dev, "/dev"), (self.places.proc, "/proc"), (self.places.sys, "/sys"))
        for tree, name in trees:
            if path.is_relative_to(tree):
                return f"{name}/{path.relative_to(tree)}"
        return str(path)


def node_of(status: os.stat_result) -> Node:
    """A character device's status in our words."""
    number = status.st_rdev  # majors and minors have more than 8 bits each
    return Node(os.major(number), os.minor(number), stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
