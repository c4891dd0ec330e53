"""The places where the driver's files, and those of a compatibility package, are mounted in a container.

A compatibility package is one folder, first in the loader's path. The driver's own libraries stay where they are, so
what the package lacks is found there. A program that clears its environment finds only the driver's libcuda.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from posixpath import normpath
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import Edits, Mount
from nri_gpu.domain.node import CompatPackage, DriverTree, Loader

LIBRARY_PATH: Final = "LD_LIBRARY_PATH"
PLACE: Final = "/opt/nri-gpu/compat"


def driver_edits(tree: DriverTree, loader: Loader, container: Container, *, hwcaps: bool, compatible: bool) -> Edits:
    """Return the mounts of a driver's files, and the path where the container's loader finds them.

    hwcaps: as in `free_places`. compatible: as in `DriverPlaces.search`.
    """
    places = free_places(loader, container.mounts, tree, hwcaps=hwcaps)
    path = library_path(places.search(compatible=compatible), container.env.get(LIBRARY_PATH, ""))
    return Edits.of(mounts=tree_mounts(tree, places), env=path)


def compat_edits(package: CompatPackage, driver: Edits, container: Container) -> Edits:
    """Put a package before the driver's folders in the path: glibc takes the first library of a name.

    driver: the edits of the driver's files.
    """
    path = compat_folder_edits(PLACE, driver, container).env
    return Edits.of(mounts=(Mount(PLACE, package.path),), env=path)


def compat_folder_edits(folder: str, driver: Edits, container: Container) -> Edits:
    """Put a folder of the container before the driver's in the path. driver: the edits of the driver's files."""
    behind = driver.env.get(LIBRARY_PATH, container.env.get(LIBRARY_PATH, ""))
    return Edits.of(env=library_path([folder], behind))


def compat_hindrance(container: Container, *, of_image: bool = False) -> str:
    """Return why a package could not come before the driver's libraries in this container, a clause, or empty.

    of_image: the package is the image's own, and needs no mount.
    """
    if LIBRARY_PATH in container.env_twice:
        return f"image and pod both set {LIBRARY_PATH}, and NRI reaches only the one that is not used"
    if not of_image and _touches(PLACE, map(_plain, container.mounts)):
        return f"the pod mounts a volume at {PLACE}"
    return ""


def library_path(folders: Sequence[str], present: str) -> Mapping[str, str]:
    """Return the loader's path with these folders before the container's own, or nothing if they are first already.

    An empty element is never added: to the loader that is the current directory.
    """
    if not folders or present.split(":")[: len(folders)] == list(folders):
        return {}
    return {LIBRARY_PATH: ":".join((*folders, present) if present else folders)}


# NVIDIA's images have the first on PATH and LD_LIBRARY_PATH. The others serve pods that mount a volume there.
TREE_PLACES: Final = ("/usr/local/nvidia", "/opt/nri-gpu/nvidia", "/run/nri-gpu/nvidia")

# Folders that a loader searches without cache and environment, on Debian-like and RHEL-like systems.
MACHINE: Final = os.uname().machine
DEFAULT_PLACES: Final = (f"/usr/lib/{MACHINE}-linux-gnu", "/usr/lib64")
DEFAULT_PLACES_32: Final = ("/usr/lib/i386-linux-gnu", "/usr/lib")

# glibc 2.33 and newer look here before the default folders themselves. The levels exist on x86-64 only
# (glibc: sysdeps/x86_64/dl-hwcaps-subdirs.c).
HWCAPS_PLACES: Final[tuple[str, ...]] = (
    tuple(f"{place}/glibc-hwcaps/x86-64-v2" for place in DEFAULT_PLACES) if MACHINE == "x86_64" else ()
)
LIBRARIES, LIBRARIES_32, PROGRAMS = "lib64", "lib32", "bin"  # in a tree; the last two in the first as well
PROGRAM_PLACE: Final = "/usr/bin"
SMI: Final = "nvidia-smi"
# All our places are below these; most mounts of a container are elsewhere and need no check.
ROOTS: Final = ("/usr", "/opt", "/run", "/etc")


class DriverPlaces(Struct, frozen=True):
    """The places of the driver's files in a container, which leave its own mounts untouched."""

    tree: str = ""  # of the whole tree; empty: nowhere
    folders: tuple[str, ...] = ()  # the folder of libraries is mounted at each of these
    files: tuple[str, ...] = ()  # each has a mount for every name of every library
    files_32: tuple[str, ...] = ()  # the same for 32-bit libraries
    programs: tuple[str, ...] = ()  # those that go to /usr/bin, by name
    variable: bool = False  # LD_LIBRARY_PATH is set to the libraries
    refused: tuple[str, ...] = ()  # places of single files that are taken; mostly empty

    def search(self, *, compatible: bool) -> tuple[str, ...]:
        """Return the folders for LD_LIBRARY_PATH. compatible: 32-bit programs are to be served too.

        No strategy makes the 32-bit loader search our folders without the variable: glibc has no hwcaps level for
        32-bit libraries. Each of the two loaders skips the other's libraries.
        """
        folder = f"{self.tree}/{LIBRARIES}" if self.tree else next(iter(self.folders), "")
        native = (folder,) if folder and self.variable else ()
        return (*native, f"{folder}/{LIBRARIES_32}") if folder and compatible else native


def free_places(loader: Loader, taken: Iterable[str], tree: DriverTree | None, *, hwcaps: bool = True) -> DriverPlaces:
    """Return the places of a strategy that these mounts of a container leave free, else a place of the whole tree.

    On a machine without hwcaps levels, or whose CPU has not reached that level (hwcaps), two of the strategies have
    none: a container always gets libraries that its loader finds.
    """
    others = [other for other in map(_plain, taken) if other.startswith(ROOTS) or other == "/"]
    by_folder = hwcaps and loader in (Loader.FOLDERS, Loader.HWCAPS)
    folders = tuple(place for place in HWCAPS_PLACES if not _touches(place, others)) if by_folder else ()
    files = _uncovered(DEFAULT_PLACES, others) if loader is Loader.FILES else ()
    whole = "" if folders or files else next((p for p in TREE_PLACES if not _touches(p, others)), TREE_PLACES[-1])
    files_32 = _uncovered(DEFAULT_PLACES_32, others) if files and tree and tree.libraries_32 else ()
    return DriverPlaces(
        tree=whole,
        folders=folders,
        files=files,
        files_32=files_32,
        programs=_programs(loader, others, tree) if tree else (),
        variable=bool(whole) or loader is Loader.FOLDERS,
        refused=_refused(tree, files, files_32, others) if tree and others else (),
    )


def tree_mounts(tree: DriverTree, places: DriverPlaces) -> tuple[Mount, ...]:
    """Return all mounts of a driver's files: whole folders first, then single files."""
    mounts = [Mount(places.tree, tree.path)] if places.tree else []
    mounts += [Mount(place, f"{tree.path}/{LIBRARIES}") for place in places.folders]
    mounts += [
        Mount(f"{PROGRAM_PLACE}/{name}", f"{tree.path}/{LIBRARIES}/{PROGRAMS}/{name}") for name in places.programs
    ]
    singles = (*_library_files(tree, places.files, places.files_32), *tree.files)
    mounts += [Mount(place, f"{tree.path}/{file}") for place, file in singles if place not in places.refused]
    return tuple(mounts)


def _programs(loader: Loader, others: Sequence[str], tree: DriverTree) -> tuple[str, ...]:
    """Return the programs for /usr/bin: none if the whole tree is the strategy, as it has its own folder for PATH."""
    wanted = {Loader.TREE: (), Loader.FILES: tree.binaries}.get(loader, (SMI,))
    return tuple(n for n in wanted if n in tree.binaries and not _touches(f"{PROGRAM_PLACE}/{n}", others))


def _library_files(tree: DriverTree, files: Sequence[str], files_32: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (place, path in the tree): the same file under each of its names, which a loader takes for one."""
    for folders, libraries in ((files, tree.libraries), (files_32, tree.libraries_32)):
        for folder in folders:
            yield from ((f"{folder}/{name}", path) for path, names in libraries for name in names)


def _refused(tree: DriverTree, files: Sequence[str], files_32: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    singles = [place for place, _ in tree.files]
    if any(_within(other, folder) for folder in (*files, *files_32) for other in others):
        singles += [place for place, _ in _library_files(tree, files, files_32)]
    return tuple(place for place in singles if _touches(place, others))


def _uncovered(places: Iterable[str], others: Sequence[str]) -> tuple[str, ...]:
    """Return the folders that no mount of the container covers, so that our files can go into them."""
    return tuple(place for place in places if not any(_within(place, other) for other in others))


def _touches(place: str, others: Iterable[str]) -> bool:
    """Return whether a mount of the container is at, below or above a place: ours would hide it, or not fit into it."""
    return any(_within(place, other) or _within(other, place) for other in others)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _plain(destination: str) -> str:
    """Return the path as runc reads it: absolute, without `//`, `.` and `..`."""
    odd = "/." in destination or "//" in destination or not destination.startswith("/") or destination.endswith("/")
    return normpath(f"/./{destination}") if odd else destination
