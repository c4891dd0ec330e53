"""The facts of the host: PCI devices, kernel modules, the driver's files in /proc, the entries of /dev."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, NewType

from msgspec import Struct, field

from nri_gpu.domain.bounds import BUS_ID
from nri_gpu.domain.errors import NriGpuError, cause_of
from nri_gpu.domain.node import Majors
from nri_gpu.host.kernel_view import DISPLAY_CLASS, NVIDIA_VENDOR, HostFolders, gpus_on_the_bus, not_given
from nri_gpu.host.modules import read_majors
from nri_gpu.system.storage import text_of
from nri_gpu.system.user_namespace import in_user_namespace

DevPath = NewType("DevPath", str)  # below /dev: `nvidia0`, `nvidia-caps/nvidia-cap3`, `char/195:0`

CHAR: Final = DevPath("char")
CAPS: Final = DevPath("nvidia-caps")


class HostError(NriGpuError):
    """A file of the host that cannot be understood, or a change that failed. The sentence says which and why."""


class KernelModule(StrEnum):
    """The driver's kernel modules, each after those that it depends on."""

    NVIDIA = "nvidia"
    UVM = "nvidia-uvm"
    MODESET = "nvidia-modeset"


class CharDevice(Struct, frozen=True):
    """A character device node, existing or wanted. mode: permission bits only."""

    major: int
    minor: int
    mode: int
    uid: int
    gid: int

    @property
    def number(self) -> tuple[int, int]:
        return self.major, self.minor

    def __str__(self) -> str:
        return f"char {self.major}:{self.minor}, mode {self.mode:04o}, owner {self.uid}:{self.gid}"


class Symlink(Struct, frozen=True):
    """A symbolic link. target: as written, not followed."""

    target: str

    def __str__(self) -> str:
        return f"a symbolic link to {self.target}"


class Directory(Struct, frozen=True):
    """A directory, not a link to one."""

    def __str__(self) -> str:
        return "a directory"


class OtherFile(Struct, frozen=True):
    """Every other file. kind: `a regular file`, `a block device`, and so on."""

    kind: str

    def __str__(self) -> str:
        return self.kind


DevEntry = CharDevice | Symlink | Directory | OtherFile


class HostFinding(Struct, frozen=True):
    """Something for the administrator to fix. reason: what is wrong with the path, and what to do."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class HostFacts(Struct, frozen=True, kw_only=True):
    """The host at one moment. Texts are files of the kernel's, unparsed, or empty if there is no such file."""

    # PCI addresses of NVIDIA's display devices, without those that are for virtual machines.
    devices: tuple[str, ...] = ()
    of_machines: tuple[str, ...] = ()  # those
    modules: frozenset[KernelModule] = frozenset()  # those loaded
    majors: Majors = field(default_factory=Majors)
    params: str = ""  # /proc/driver/nvidia/params
    gpus: Mapping[str, str] = field(default_factory=dict)  # PCI address -> its `information` file
    # `gpu0/mig/gi1/access` -> that file, while the instance exists.
    capabilities: Mapping[str, str] = field(default_factory=dict)
    mig_minors: str = ""  # /proc/driver/nvidia-caps/mig-minors
    away: frozenset[int] = frozenset()  # minors of GPUs that are not this machine's
    entries: Mapping[DevPath, DevEntry] = field(default_factory=dict)  # what is in /dev
    hosts_nodes: bool = False  # this machine is an unprivileged container, and its nodes are its host's
    unreadable: tuple[HostFinding, ...] = ()  # files that exist and could not be read


_NUMBER: Final = re.compile(r"[0-9]+:[0-9]+")
_TEXT_MAX: Final = 1 << 20  # bytes; the longest of these files is mig-minors, some 100 KB
_KINDS: Final = ((stat.S_ISREG, "a regular file"), (stat.S_ISBLK, "a block device"), (stat.S_ISFIFO, "a pipe"))
_CAPABILITY: Final = re.compile(r"gpu[0-9]+/mig/gi[0-9]+(?:/ci[0-9]+)?/access")


def look(places: HostFolders) -> HostFacts:
    reader = _Reader(places)
    driver = places.proc / "driver" / "nvidia"
    devices = tuple(reader.devices())
    of_machines = tuple(gpu.bus_id for gpu in gpus_on_the_bus(places.sys) if gpu.of_machines)
    return HostFacts(
        devices=tuple(device for device in devices if device not in of_machines),
        of_machines=of_machines,
        modules=frozenset(module for module in KernelModule if is_loaded(places.sys, module)),
        majors=read_majors(reader.text(places.proc / "devices")),
        params=reader.text(driver / "params"),
        gpus=reader.gpus(driver / "gpus"),
        capabilities=reader.capabilities(driver / "capabilities"),
        mig_minors=reader.text(places.proc / "driver" / "nvidia-caps" / "mig-minors"),
        away=not_given(places),
        entries=dict(reader.entries()),
        hosts_nodes=in_user_namespace(),
        unreadable=tuple(reader.unreadable),
    )


class _Reader(Struct):
    """The reader of files and folders: a missing one is empty, and the faults of unreadable ones are kept."""

    places: HostFolders
    unreadable: list[HostFinding] = field(default_factory=list)

    def text(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                return file.read(_TEXT_MAX).decode("utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""  # a MIG instance can disappear while we look
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
        """Yield PCI addresses of NVIDIA's display devices, with or without a driver."""
        folder = self.places.sys / "bus" / "pci" / "devices"
        for address in self.names(folder):
            vendor = self.text(folder / address / "vendor").strip()
            if vendor == NVIDIA_VENDOR and self.text(folder / address / "class").startswith(DISPLAY_CLASS):
                yield address

    def gpus(self, folder: Path) -> Mapping[str, str]:
        addresses = (name for name in self.names(folder) if BUS_ID.matches(name.lower()))
        texts = {address: self.text(folder / address / "information") for address in addresses}
        return {address: text for address, text in texts.items() if text}

    def capabilities(self, folder: Path) -> Mapping[str, str]:
        paths = [*folder.glob("gpu*/mig/gi*/access"), *folder.glob("gpu*/mig/gi*/ci*/access")]
        names = sorted(path.relative_to(folder).as_posix() for path in paths)
        texts = {name: self.text(folder / name) for name in names if _CAPABILITY.fullmatch(name)}
        return {name: text for name, text in texts.items() if text}

    def entries(self) -> Iterator[tuple[DevPath, DevEntry]]:
        """Yield the entries of /dev that matter: nvidia*, and the links by device number."""
        yield from self._entries("", lambda name: name.startswith("nvidia") or name == CHAR)
        for folder, matches in ((CAPS, lambda name: True), (CHAR, _NUMBER.fullmatch)):
            if isinstance(self._entry(self.places.dev / folder), Directory):
                yield from self._entries(f"{folder}/", matches)

    def _entries(self, prefix: str, matches: Callable[[str], object]) -> Iterator[tuple[DevPath, DevEntry]]:
        folder = self.places.dev / prefix
        for name in filter(matches, self.names(folder)):
            entry = self._entry(folder / name)
            if entry is not None:
                yield DevPath(f"{prefix}{name}"), entry

    def _entry(self, path: Path) -> DevEntry | None:
        try:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                return Symlink(os.fspath(path.readlink()))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._cannot(path, error)
            return None
        if stat.S_ISDIR(status.st_mode):
            return Directory()
        if stat.S_ISCHR(status.st_mode):
            return node_of(status)
        return OtherFile(next((kind for test, kind in _KINDS if test(status.st_mode)), "no device node"))

    def _cannot(self, path: Path, error: OSError) -> None:
        """Keep a fault, with the path as on the host, wherever the trees are."""
        trees = ((self.places.dev, "/dev"), (self.places.proc, "/proc"), (self.places.sys, "/sys"))
        shown = next(
            (f"{name}/{path.relative_to(tree)}" for tree, name in trees if path.is_relative_to(tree)), str(path)
        )
        self.unreadable.append(HostFinding(shown, f"cannot be read: {cause_of(error)}"))


def node_of(status: os.stat_result) -> CharDevice:
    """Return the node that a character device's status describes."""
    number = status.st_rdev  # majors and minors have more than 8 bits each
    return CharDevice(os.major(number), os.minor(number), stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)


def is_loaded(sys: Path, module: KernelModule) -> bool:
    """Return whether the module is loaded and initialized. The kernel has `_` where file names have `-`."""
    return text_of(sys / "module" / module.replace("-", "_") / "initstate") == "live\n"
