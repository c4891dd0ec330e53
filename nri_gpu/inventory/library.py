"""Where NVML's library lies below a driver root."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

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
