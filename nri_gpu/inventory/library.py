"""Where NVML's library lies below a driver root."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

NVML: Final = "libnvidia-ml.so.1"
_ELF64: Final = b"\x7fELF\x02"  # magic and EI_CLASS: a 32-bit library may come first on a multilib host


def library_dirs(machine: str) -> tuple[str, ...]:
    """Folders below a driver root that may hold the driver's libraries, in the order to try them.

    The last is the root itself, for a flat one such as /usr/local/nvidia/lib64.
    Source: NVIDIA/nvidia-container-toolkit pkg/lookup/library.go.
    """
    triple = f"{machine}-linux-gnu"
    plain = ("usr/lib64", f"usr/lib/{triple}", "lib64", f"lib/{triple}")
    debian = tuple(f"{folder}/nvidia/current" for folder in plain)
    return (*plain, *debian, "usr/lib", "lib", ".")


def find_library(driver_root: Path, first: Sequence[str] = (), name: str = NVML) -> Path | None:
    """The first usable library of that name, by the path it is known by; None if there is none.

    first: folders below the root, looked into before those we know.
    """
    return next(_usable(driver_root, first, name), None)


def tried(driver_root: Path, first: Sequence[str] = ()) -> str:
    """The folders looked into, for a sentence."""
    return ", ".join(map(str, _folders(driver_root, first)))


def _folders(driver_root: Path, first: Sequence[str]) -> Iterator[Path]:
    folders = (*(folder.strip("/") for folder in first), *library_dirs(os.uname().machine))
    return (driver_root / folder for folder in folders)


def _usable(driver_root: Path, first: Sequence[str], name: str) -> Iterator[Path]:
    # An absolute link in a driver root elsewhere points out of it, at best to nothing and at worst to the library of
    # another driver; the file it means is found under a later folder (Debian's alternatives: nvidia/current).
    root = driver_root.resolve()
    for folder in _folders(driver_root, first):
        path = folder / name
        if _is_elf64(path) and path.resolve().is_relative_to(root):
            yield path


def _is_elf64(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ELF64)) == _ELF64
    except OSError:
        return False


# Return codes of nvml.h.
NO_PERMISSION: Final = 4
DRIVER_NOT_LOADED: Final = 9
FUNCTION_NOT_FOUND: Final = 13
LIB_RM_VERSION_MISMATCH: Final = 18

_VERSION: Final = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)?)$")


class Refusal(Struct, frozen=True):
    """NVML's error at start.

    error: the call and its error. library: the file loaded, links resolved.
    module: version of the kernel module that is loaded, empty when none is.
    """

    code: int
    error: str
    library: str
    module: str


def advice(refusal: Refusal) -> str:
    """One sentence: what NVML said, what it means here, what to do."""
    return _ADVICE.get(refusal.code, _unknown)(refusal)


def library_version(library: str) -> str:
    """The version in a library's file name, `580.95.05`; empty where there is none."""
    match = _VERSION.search(library)
    return match.group(1) if match else ""


def _not_loaded(refusal: Refusal) -> str:
    if refusal.module:
        return (
            f"{refusal.error}: the nvidia kernel module {refusal.module} is loaded, but /dev/nvidiactl cannot be "
            "opened: make the nodes with `nvidia-modprobe -c 255 -c 0`, or start nvidia-persistenced"
        )
    return f"{refusal.error}: the nvidia kernel module is not loaded: run `modprobe nvidia` and see `dmesg`"


def _mismatch(refusal: Refusal) -> str:
    library = library_version(refusal.library) or "of an unknown version"
    module = refusal.module or "of an unknown version"
    return (
        f"{refusal.error}: the library {refusal.library} is {library} and the loaded kernel module is {module}: "
        "stop what uses the GPUs and reload the nvidia modules, or reboot the node"
    )


def _no_permission(refusal: Refusal) -> str:
    return f"{refusal.error}: see owner and mode of /dev/nvidiactl, and what SELinux or AppArmor denied"


def _too_old(refusal: Refusal) -> str:
    return f"{refusal.error}: {refusal.library} lacks a function that every current driver has: update the driver"


def _unknown(refusal: Refusal) -> str:
    return f"{refusal.error}: NVML from {refusal.library} did not start: see `nvidia-smi` and `dmesg | grep NVRM`"


_ADVICE: Final[Mapping[int, Callable[[Refusal], str]]] = {
    NO_PERMISSION: _no_permission,
    DRIVER_NOT_LOADED: _not_loaded,
    FUNCTION_NOT_FOUND: _too_old,
    LIB_RM_VERSION_MISMATCH: _mismatch,
}
