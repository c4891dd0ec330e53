"""Mounts: the staged driver tree, where the container's loader finds it without a hook.

One folder, mounted whole, costs the same for five libraries as for fifty; a mount per file would cost about 0.4 ms
of container start each. See ADR 6 for what each destination serves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from posixpath import normpath
from typing import Final

from nri_gpu.domain.edits import Mount
from nri_gpu.domain.gpu import DriverTree

# NVIDIA's own images have the first on PATH and LD_LIBRARY_PATH. The others serve pods with a volume of theirs there.
TREE_PLACES: Final = ("/usr/local/nvidia", "/opt/nri-gpu/nvidia", "/run/nri-gpu/nvidia")

# glibc 2.33 and newer look here with neither cache nor environment: Debian-like and RHEL-like default directories.
# The levels exist on x86-64 only (glibc: sysdeps/x86_64/dl-hwcaps-subdirs.c).
HWCAPS_PLACES: Final[tuple[str, ...]] = (
    (
        "/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2",
        "/usr/lib64/glibc-hwcaps/x86-64-v2",
    )
    if os.uname().machine == "x86_64"
    else ()
)
SMI: Final = "nvidia-smi"
# Above all of our places; most mounts of a container are elsewhere and need no closer look.
ROOTS: Final = ("/usr", "/opt", "/run", "/etc")


@dataclass(frozen=True, slots=True)
class Places:
    """Where the driver's files can go in a container without touching a mount of its own.

    smi: in /usr/bin. refused: places of a tree's single files that are taken; mostly empty.
    """

    tree: str
    hwcaps: tuple[str, ...]
    smi: bool
    refused: tuple[str, ...] = ()


def free_places(taken: Iterable[str], tree: DriverTree | None = None) -> Places:
    """The places left for a tree by these mount destinations of a container."""
    others = [other for other in map(_plain, taken) if other.startswith(ROOTS) or other == "/"]
    return Places(
        tree=next((place for place in TREE_PLACES if not _touches(place, others)), TREE_PLACES[-1]),
        hwcaps=tuple(place for place in HWCAPS_PLACES if not _touches(place, others)),
        smi=not _touches(f"/usr/bin/{SMI}", others),
        refused=tuple(place for place, _ in tree.files if _touches(place, others)) if tree and others else (),
    )


def tree_mounts(tree: DriverTree, places: Places) -> tuple[Mount, ...]:
    """The tree at its place, its libraries in the default loader folders, nvidia-smi on every PATH, single files."""
    libraries = f"{tree.path}/lib64"
    mounts = [Mount(places.tree, tree.path)]
    mounts += [Mount(place, libraries) for place in places.hwcaps]
    if places.smi and SMI in tree.binaries:
        mounts.append(Mount(f"/usr/bin/{SMI}", f"{tree.path}/bin/{SMI}"))
    mounts += [Mount(place, f"{tree.path}/{file}") for place, file in tree.files if place not in places.refused]
    return tuple(mounts)


def _touches(place: str, others: Iterable[str]) -> bool:
    """Whether a mount of the container is at, below or above a place: ours would hide it, or not fit into it."""
    return any(_within(place, other) or _within(other, place) for other in others)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _plain(destination: str) -> str:
    """As the runtime's runc will read it: absolute, without `//`, `.` and `..`."""
    odd = "/." in destination or "//" in destination or not destination.startswith("/") or destination.endswith("/")
    return normpath(f"/./{destination}") if odd else destination
