"""Looks at the host, and parses the driver's files in /proc. Their numbers are decimal, modes too: 438 is 0666."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from nri_gpu.domain.node import Majors
from nri_gpu.host.facts import (
    CAPS,
    CHAR,
    CharDevice,
    DevEntry,
    DevPath,
    Directory,
    Finding,
    HostError,
    HostFacts,
    HostPaths,
    KernelModule,
    OtherFile,
    Symlink,
)
from nri_gpu.host.modules import is_loaded

PERMISSIONS: Final = 0o777
# The last value means "unchanged" to chown(2), so it is no owner.
_MAX_ID: Final = 2**32 - 2
# 248 and above are reserved; 254 is modeset's and 255 the control node's.
# NVIDIA/open-gpu-kernel-modules kernel-open/common/inc/nv-chardev-numbers.h.
MAX_GPU_MINOR: Final = 247
# As many minors as the driver registers. kernel-open/nvidia/nv-caps.c.
MAX_CAP_MINOR: Final = 8191
CAPABILITY: Final = re.compile(r"(?P<gpu>gpu[0-9]+)/mig/(?P<instance>gi[0-9]+(?:/ci[0-9]+)?)/access")


class Ownership(Struct, frozen=True):
    """Mode and owner of nodes. modify: false where only the administrator may make and change them."""

    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    modify: bool = True


class MigCapability(Struct, frozen=True):
    """Access to one MIG instance, which is the right to open a device node."""

    minor: int
    ownership: Ownership


def params_ownership(text: str) -> Ownership:
    """Parses /proc/driver/nvidia/params. Missing values are the driver's defaults. Raises: HostError."""
    return _ownership(_fields(text), "ModifyDeviceFiles")


def gpu_minor(information: str) -> int | None:
    """The minor of a GPU's node; None for a GPU that the administrator excluded. Raises: HostError."""
    fields = _fields(information)
    if fields.get("GPU Excluded", "").lower() == "yes":
        return None
    return _bounded(fields, "Device Minor", MAX_GPU_MINOR)


def capability(text: str) -> MigCapability:
    """Parses a capability's file. Raises: HostError."""
    fields = _fields(text)
    return MigCapability(_bounded(fields, "DeviceFileMinor", MAX_CAP_MINOR), _ownership(fields, "DeviceFileModify"))


def table_name(name: str) -> str:
    """A capability's name in mig-minors: `gpu0/mig/gi1/access` is `gpu0/gi1/access` there."""
    match = CAPABILITY.fullmatch(name)
    return f"{match['gpu']}/{match['instance']}/access" if match else name


def minors_table(text: str) -> Mapping[str, int]:
    """Parses /proc/driver/nvidia-caps/mig-minors: lines of a name and a minor. Other lines are skipped."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_decimal(pair[1])}


def _fields(text: str) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def _ownership(fields: Mapping[str, str], switch: str) -> Ownership:
    default = Ownership()
    return Ownership(
        mode=_mode(fields, default.mode),
        uid=_number(fields, "DeviceFileUID", _MAX_ID, default.uid),
        gid=_number(fields, "DeviceFileGID", _MAX_ID, default.gid),
        # nvidia-modprobe takes 1 for yes and any other number for no.
        modify=_number(fields, switch, 2**32 - 1, 1) == 1,
    )


def _mode(fields: Mapping[str, str], default: int) -> int:
    mode = _number(fields, "DeviceFileMode", 2**32 - 1, default)
    if mode & ~PERMISSIONS:
        # The kernel takes NVreg_DeviceFileMode=660 as decimal, 01224, since it has no leading 0. Do not guess.
        raise HostError(
            f"DeviceFileMode is {mode}, which is {mode:#o} in octal and no mode for a device node: "
            "write the module parameter with a leading 0, as in NVreg_DeviceFileMode=0660"
        )
    return mode


def _bounded(fields: Mapping[str, str], key: str, most: int) -> int:
    if key not in fields:
        raise HostError(f"has no `{key}` line")
    return _number(fields, key, most, 0)


def _number(fields: Mapping[str, str], key: str, most: int, default: int) -> int:
    value = fields.get(key)
    if value is None:
        return default
    if not _is_decimal(value) or int(value) > most:
        raise HostError(f"{key} is `{value[:40]}`, where a decimal number up to {most} belongs")
    return int(value)


def _is_decimal(text: str) -> bool:
    # The kernel writes no leading zeros; a value with them may be octal.
    return re.fullmatch(r"0|[1-9][0-9]{0,9}", text) is not None


_VENDOR: Final = "0x10de"
_DISPLAY: Final = re.compile(r"0x03[0-9a-f]{4}")  # PCI base class of VGA (0x0300) and 3D (0x0302) controllers
_ADDRESS: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_NUMBER: Final = re.compile(r"[0-9]+:[0-9]+")
_TEXT_MAX: Final = 1 << 20  # bytes; the longest of these files is mig-minors, some 100 KB
_KINDS: Final = ((stat.S_ISREG, "a regular file"), (stat.S_ISBLK, "a block device"), (stat.S_ISFIFO, "a pipe"))


def look(places: HostPaths, read_majors: Callable[[str], Majors]) -> HostFacts:
    """Look at the host once. read_majors: parses /proc/devices."""
    reader = _Reader(places)
    driver = places.proc / "driver" / "nvidia"
    return HostFacts(
        devices=tuple(reader.devices()),
        modules=frozenset(module for module in KernelModule if is_loaded(places.sys, module)),
        majors=read_majors(reader.text(places.proc / "devices")),
        params=reader.text(driver / "params"),
        gpus=reader.gpus(driver / "gpus"),
        capabilities=reader.capabilities(driver / "capabilities"),
        mig_minors=reader.text(places.proc / "driver" / "nvidia-caps" / "mig-minors"),
        entries=dict(reader.entries()),
        unreadable=tuple(reader.unreadable),
    )


class _Reader(Struct):
    """Reads files and folders, missing ones as empty, and keeps the faults of those that cannot be read."""

    places: HostPaths
    unreadable: list[Finding] = field(default_factory=list)

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
        """PCI addresses of NVIDIA's display devices, with or without a driver."""
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

    def entries(self) -> Iterator[tuple[DevPath, DevEntry]]:
        """The entries of /dev that matter: nvidia*, and the links by device number."""
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
        self.unreadable.append(Finding(self._shown(path), f"cannot be read: {error.strerror}"))

    def _shown(self, path: Path) -> str:
        """The path as on the host, wherever the trees are."""
        trees = ((self.places.dev, "/dev"), (self.places.proc, "/proc"), (self.places.sys, "/sys"))
        for tree, name in trees:
            if path.is_relative_to(tree):
                return f"{name}/{path.relative_to(tree)}"
        return str(path)


def node_of(status: os.stat_result) -> CharDevice:
    """The node that a character device's status describes."""
    number = status.st_rdev  # majors and minors have more than 8 bits each
    return CharDevice(os.major(number), os.minor(number), stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
