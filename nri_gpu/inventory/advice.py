"""What to do when NVML does not start, in one sentence for an operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

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
