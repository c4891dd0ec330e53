"""What of NVIDIA's own injection is installed on this host: found and told of, never changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.files import text_of


class Kind(StrEnum):
    """What was found. It decides the advice."""

    RUNTIME = "runtime"  # NVIDIA's runtime or its hook: obeys NVIDIA_VISIBLE_DEVICES
    SPECIFICATION = "specification"  # a CDI specification of NVIDIA devices that has hooks


class Leftover(Struct, frozen=True):
    """One of them. path: on the host, as found."""

    kind: Kind
    path: str


_FOLDERS: Final = ("usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit", "opt/nvidia/toolkit")
_PROGRAMS: Final = ("nvidia-container-runtime", "nvidia-container-runtime-hook")
_FILES: Final = (
    "etc/nvidia-container-runtime/config.toml",
    *(f"{folder}/{name}" for folder in _FOLDERS for name in _PROGRAMS),
)
# Where Podman and CRI-O look for hooks, and containerd for its runtimes (containers/common docs; containerd docs).
_HOOK_FOLDERS: Final = ("usr/share/containers/oci/hooks.d", "etc/containers/oci/hooks.d")
_CONTAINERD: Final = ("etc/containerd", "etc/containerd/conf.d")
_CDI_FOLDERS: Final = ("etc/cdi", "var/run/cdi")

_FILES_MAX: Final = 64  # of one folder
_TEXT_MAX: Final = 1 << 20  # bytes of one file: a specification for a full node has some 50 kB
_RUNTIME: Final = re.compile(r"nvidia-container-runtime|\bruntimes\.[\"']?nvidia\b")
_NVIDIA_KIND: Final = re.compile(r"""\bkind["']?\s*:\s*["']?[\w.-]*\bnvidia\.com/""")
_HOOKS: Final = re.compile(r"""\bhooks["']?\s*:\s*(?!\s*(?:\[\s*\]|null|~))""")


def leftovers(root: Path = Path("/")) -> tuple[Leftover, ...]:
    """Everything found below `root`. What cannot be read is passed over: this is advice."""
    return tuple(_runtimes(root)) + tuple(_specifications(root))


def specifications_of(root: Path, vendor: str) -> tuple[str, ...]:
    """CDI specifications of one vendor's devices, with hooks or without."""
    found = (path for path in _files(root, _CDI_FOLDERS, (".yaml", ".yml", ".json")) if vendor in _told(path))
    return tuple(_shown(root, path) for path in found)


def _runtimes(root: Path) -> Iterator[Leftover]:
    for name in _FILES:
        if _is_there(root / name):
            yield Leftover(Kind.RUNTIME, f"/{name}")
    for path in _files(root, _HOOK_FOLDERS, (".json",)):
        if "nvidia-container-" in _told(path):
            yield Leftover(Kind.RUNTIME, _shown(root, path))
    for path in _files(root, _CONTAINERD, (".toml",)):
        if _RUNTIME.search("\n".join(line.partition("#")[0] for line in _told(path).splitlines())):
            yield Leftover(Kind.RUNTIME, _shown(root, path))


def _specifications(root: Path) -> Iterator[Leftover]:
    for path in _files(root, _CDI_FOLDERS, (".yaml", ".yml", ".json")):
        text = _told(path)
        if _NVIDIA_KIND.search(text) and _HOOKS.search(text):
            yield Leftover(Kind.SPECIFICATION, _shown(root, path))


def _files(root: Path, folders: tuple[str, ...], endings: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        try:
            inside = sorted(islice((root / folder).iterdir(), _FILES_MAX))
        except OSError:
            continue
        yield from (path for path in inside if path.suffix in endings and _is_there(path))


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _told(path: Path) -> str:
    return text_of(path, _TEXT_MAX, "utf-8") or ""


def _shown(root: Path, path: Path) -> str:
    return ascii(f"/{path.relative_to(root)}")[1:-1]
