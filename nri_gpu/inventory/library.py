"""NVML's library: the search for it below a driver root, its only load, and advice if NVML does not start."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import DriverError, fault_of
from nri_gpu.domain.names import INSTALL, NOT_FOUND, SOUGHT
from nri_gpu.driver.manifest import staged_library
from nri_gpu.driver.search import DriverSearch, machine_of
from nri_gpu.host.modules import SYSFS, module_version

NVML: Final = "libnvidia-ml.so.1"
_VERSION: Final = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)?)$")

# Return codes of nvml.h.
NO_PERMISSION: Final = 4
DRIVER_NOT_LOADED: Final = 9
FUNCTION_NOT_FOUND: Final = 13
LIB_RM_VERSION_MISMATCH: Final = 18

Fingerprint = tuple[str, int, int, int]


class LibraryError(Exception):
    """NVML's library is missing, cannot be loaded, or does not start: one sentence."""


class Library:
    """NVML's library, loaded at most once: pynvml would not find a second copy in the same process.

    stage_dir: of staged drivers, whose library serves while the driver root has none of the module's version.
    """

    def __init__(
        self,
        driver_root: Path,
        library_dirs: Sequence[str] = (),
        sysfs: Path = SYSFS,
        stage_dir: Path | None = None,
    ) -> None:
        self._driver_root = driver_root
        self._library_dirs = library_dirs
        self._sysfs = sysfs
        self._stage_dir = stage_dir
        self._loaded: ctypes.CDLL | None = None
        self._fingerprint: Fingerprint | None = None

    def find(self) -> Path:
        """Return the library's current path. Raises: LibraryError."""
        module = module_version(self._sysfs)
        try:
            search = DriverSearch.below(self._driver_root, machine_of(), self._library_dirs)
            path = search.nvml(module)
            fault = f"{search.unusable}{SOUGHT}{search.places}"
        except (DriverError, OSError) as error:
            path, fault = None, fault_of(error)
        if module and self._stage_dir and (path is None or library_version(str(path)) not in ("", module)):
            path = staged_library(self._stage_dir, module, NVML) or path
        if path is None:
            raise LibraryError(f"{NOT_FOUND}: {fault}{INSTALL}, or set the driver root to where it is")
        return path

    def is_stale(self, path: Path) -> bool:
        """Return whether the file at `path` is not the one that was loaded."""
        return self._fingerprint not in (None, _fingerprint(path))

    def load(self, path: Path) -> None:
        """Load the library by path, so that pynvml, which asks for it by name, gets this one.

        Raises: LibraryError.
        """
        if self._loaded is not None:
            return
        try:
            self._loaded, self._fingerprint = ctypes.CDLL(str(path)), _fingerprint(path)
            by_name = ctypes.CDLL(NVML)
        except OSError as error:
            raise LibraryError(f"cannot load {path}: {fault_of(error)}") from error
        if by_name._handle != self._loaded._handle:
            raise LibraryError(f"the SONAME of {path} is not {NVML}: NVML of another driver root was loaded instead")


def _fingerprint(path: Path) -> Fingerprint:
    real = path.resolve()
    stat = real.stat()
    return str(real), stat.st_dev, stat.st_ino, stat.st_mtime_ns


class StartFailure(Struct, frozen=True):
    """A failed start of NVML."""

    code: int
    error: str  # the call and its error
    library: str  # the file that was loaded, symlinks resolved
    module: str  # the version of the loaded kernel module, or empty if none is loaded


def library_version(library: str) -> str:
    """Return the version in a library's file name, `580.95.05`, or empty if it has none."""
    match = _VERSION.search(library)
    return match.group(1) if match else ""


def advice(failure: StartFailure) -> str:
    """Return one sentence: NVML's error, what it means on this node, and what to do."""
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
            "end what `nri-gpu blockers` lists and reload the nvidia modules, or reboot the node"
        )
    if failure.code == NO_PERMISSION:
        return f"{error}: check the owner and mode of /dev/nvidiactl, and what SELinux or AppArmor denied"
    if failure.code == FUNCTION_NOT_FOUND:
        return f"{error}: {library} lacks a function that every current driver has: update the driver"
    return f"{error}: NVML from {library} did not start: see `nvidia-smi` and `dmesg | grep NVRM`"
