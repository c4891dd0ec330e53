"""NVML's library: finds it below a driver root, loads it once, and explains why NVML does not start."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

NVML: Final = "libnvidia-ml.so.1"
_ELF64: Final = b"\x7fELF\x02"  # magic and EI_CLASS: a 32-bit library may come first on a multilib host
_VERSION: Final = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)?)$")

# Return codes of nvml.h.
NO_PERMISSION: Final = 4
DRIVER_NOT_LOADED: Final = 9
FUNCTION_NOT_FOUND: Final = 13
LIB_RM_VERSION_MISMATCH: Final = 18

Fingerprint = tuple[str, int, int, int]


class LibraryError(Exception):
    """NVML's library is missing, cannot be loaded, or does not start: one sentence."""


def library_dirs(machine: str) -> tuple[str, ...]:
    """Folders below a driver root that may hold the driver's libraries, in the order to try them.

    The last is the root itself, for a flat one such as /usr/local/nvidia/lib64.
    Source: NVIDIA/nvidia-container-toolkit pkg/lookup/library.go.
    """
    triple = f"{machine}-linux-gnu"
    plain = ("usr/lib64", f"usr/lib/{triple}", "lib64", f"lib/{triple}")
    debian = tuple(f"{folder}/nvidia/current" for folder in plain)
    return (*plain, *debian, "usr/lib", "lib", ".")


def search_folders(driver_root: Path, first: Sequence[str] = ()) -> tuple[Path, ...]:
    """Where the library is looked for. first: folders below the root that come before the well-known ones."""
    folders = (*(folder.strip("/") for folder in first), *library_dirs(os.uname().machine))
    return tuple(driver_root / folder for folder in folders)


def find_library(driver_root: Path, first: Sequence[str] = ()) -> Path | None:
    """The first usable library, as found below the root; None if there is none."""
    # In a driver root other than `/`, an absolute link leads to nothing, or to the library of another driver. The file
    # that it means is found in a later folder (Debian's alternatives: nvidia/current).
    root = driver_root.resolve()
    for folder in search_folders(driver_root, first):
        path = folder / NVML
        if _is_elf64(path) and path.resolve().is_relative_to(root):
            return path
    return None


def _is_elf64(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ELF64)) == _ELF64
    except OSError:
        return False


class Library:
    """NVML's library, loaded at most once: pynvml would not find a second copy in the same process."""

    def __init__(self, driver_root: Path, library_dirs: Sequence[str] = ()) -> None:
        self._driver_root = driver_root
        self._library_dirs = library_dirs
        self._loaded: ctypes.CDLL | None = None
        self._fingerprint: Fingerprint | None = None

    def find(self) -> Path:
        """The library's path now. Raises: LibraryError."""
        path = find_library(self._driver_root, self._library_dirs)
        if path is None:
            folders = ", ".join(map(str, search_folders(self._driver_root, self._library_dirs)))
            raise LibraryError(
                f"{NVML} was not found below the driver root {self._driver_root}: looked in {folders}; "
                "install the driver, or set the driver root to where it is"
            )
        return path

    def is_stale(self, path: Path) -> bool:
        """Whether the file at `path` is not the one that was loaded."""
        return self._fingerprint not in (None, _fingerprint(path))

    def load(self, path: Path) -> None:
        """Loads the library by path, so that pynvml, which asks for it by name, gets this one.

        Raises: LibraryError.
        """
        if self._loaded is not None:
            return
        try:
            self._loaded, self._fingerprint = ctypes.CDLL(str(path)), _fingerprint(path)
            by_name = ctypes.CDLL(NVML)
        except OSError as error:
            raise LibraryError(f"cannot load {path}: {error}") from error
        if by_name._handle != self._loaded._handle:
            raise LibraryError(f"the SONAME of {path} is not {NVML}: NVML of another driver root was loaded instead")


def _fingerprint(path: Path) -> Fingerprint:
    real = path.resolve()
    stat = real.stat()
    return str(real), stat.st_dev, stat.st_ino, stat.st_mtime_ns


class StartFailure(Struct, frozen=True):
    """Why NVML did not start.

    error: the call and its error. library: the file that was loaded, symlinks resolved.
    module: the version of the loaded kernel module, empty when none is loaded.
    """

    code: int
    error: str
    library: str
    module: str


def library_version(library: str) -> str:
    """The version in a library's file name, `580.95.05`; empty where it has none."""
    match = _VERSION.search(library)
    return match.group(1) if match else ""


def advice(failure: StartFailure) -> str:
    """One sentence: NVML's error, what it means on this node, and what to do."""
    error, library, module = failure.error, failure.library, failure.module
    if failure.code == DRIVER_NOT_LOADED and module:
        return (
            f"{error}: the nvidia kernel module {module} is loaded, but /dev/nvidiactl cannot be opened: "
            "make the nodes with `nvidia-modprobe -c 255 -c 0`, or start nvidia-persistenced"
        )
    if failure.code == DRIVER_NOT_LOADED:
        return f"{error}: the nvidia kernel module is not loaded: run `modprobe nvidia` and see `dmesg`"
    if failure.code == LIB_RM_VERSION_MISMATCH:
        version, loaded = library_version(library) or "of an unknown version", module or "of an unknown version"
        return (
            f"{error}: the library {library} is {version} and the loaded kernel module is {loaded}: "
            "stop what uses the GPUs and reload the nvidia modules, or reboot the node"
        )
    if failure.code == NO_PERMISSION:
        return f"{error}: check the owner and mode of /dev/nvidiactl, and what SELinux or AppArmor denied"
    if failure.code == FUNCTION_NOT_FOUND:
        return f"{error}: {library} lacks a function that every current driver has: update the driver"
    return f"{error}: NVML from {library} did not start: see `nvidia-smi` and `dmesg | grep NVRM`"
