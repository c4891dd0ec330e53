"""The trees of a driver's files, one for each set of capabilities, mounted whole into containers. Opens nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

from nri_gpu.domain.gpu import Capabilities, Capability, closed_sets
from nri_gpu.domain.node import DriverFiles, DriverTree
from nri_gpu.driver.driver_scan import DriverFile, FoundDriver
from nri_gpu.driver.host_files import HostFile

LIBRARIES, SINGLES = "lib64", "extra"
LIBRARIES_32, BINARIES = (f"{LIBRARIES}/{part}" for part in ("lib32", "bin"))

HOST_BINARIES: Final = f"host/{BINARIES}"  # in the generation, beside the trees

# Path below the generation's folder -> the host's file, or the target of a symlink. It is complete, so a staged folder
# is also checked against it.
Plan = Mapping[str, HostFile | str]


def planned(found: FoundDriver, folder: Path) -> DriverFiles:
    """Return what containers get of a generation staged at `folder`."""
    names = _tree_names(found)
    # Some 70 trees share the rows, one for each file: its path in a tree, and its names.
    rows = {
        (part, file.name): (f"{part}/{file.name}", (file.name, *(name for name, _ in file.links)))
        for part, file in _parts(found)
    }
    made: dict[str, DriverTree] = {}
    for capabilities, name in names.items():
        if name not in made:
            content = tuple(_content(found, capabilities))
            made[name] = DriverTree(
                path=str(folder / name),
                binaries=tuple(file.name for part, file in content if part == BINARIES),
                files=tuple((place, f"{part}/{file.name}") for part, file in content for place in file.places),
                libraries=tuple(rows[part, file.name] for part, file in content if part == LIBRARIES),
                libraries_32=tuple(rows[part, file.name] for part, file in content if part == LIBRARIES_32),
            )
    trees = {capabilities: made[name] for capabilities, name in names.items()}
    return DriverFiles(
        found.version,
        folder.name,
        MappingProxyType(trees),
        found.missing,
        found.lacks,
        tuple(file.name for file in found.host_binaries),
    )


def plan_of(found: FoundDriver) -> Plan:
    """Return the files and links of a generation."""
    plan: dict[str, HostFile | str] = {}
    for capabilities, tree in _tree_names(found).items():
        if tree != tree_name(capabilities):
            continue
        for part, file in _content(found, capabilities):
            plan[f"{tree}/{part}/{file.name}"] = file.source
            plan.update({f"{tree}/{part}/{name}": target for name, target in file.links})
            if part == LIBRARIES_32:
                plan[f"{tree}/{PurePosixPath(part).name}"] = part
        plan[f"{tree}/{PurePosixPath(BINARIES).name}"] = BINARIES
    plan |= {f"{HOST_BINARIES}/{file.name}": file.source for file in found.host_binaries}
    return MappingProxyType(plan)


def tree_name(capabilities: Capabilities) -> str:
    """Return the folder of a set of capabilities: `compute+utility`."""
    return "+".join(capability for capability in Capability if capability in capabilities)


def copied_bytes(found: FoundDriver) -> int:
    """Return the bytes that a generation takes if every file is copied; each is copied once."""
    return sum(source.size_bytes for source in {file.source for file in found.files})


def _parts(found: FoundDriver) -> Iterator[tuple[str, DriverFile]]:
    """Return every file, and the part of a tree it belongs to."""
    parts = (LIBRARIES, found.libraries), (LIBRARIES_32, found.libraries_32), (BINARIES, found.binaries)
    return ((part, file) for part, files in (*parts, (SINGLES, found.singles)) for file in files)


def _content(found: FoundDriver, capabilities: Capabilities) -> Iterator[tuple[str, DriverFile]]:
    """Yield the files that a set of capabilities gets, each with its part of a tree."""
    compat = frozenset({Capability.COMPAT32})
    for part, file in _parts(found):
        if part == LIBRARIES_32:
            wanted = compat <= capabilities and (file.capabilities - compat) & capabilities
        else:
            wanted = file.capabilities & capabilities
        if wanted:
            yield part, file


def _tree_names(found: FoundDriver) -> Mapping[Capabilities, str]:
    """Return the tree of every closed set of capabilities that this driver has files for.

    Sets with the same files share the tree of the smallest, so a driver without 32-bit libraries or an X server has a
    quarter of the trees.
    """
    # Compute without libcuda is for containers that get one from a compatibility package.
    without = found.lacks.keys() - {Capability.COMPUTE} | (set() if found.libraries_32 else {Capability.COMPAT32})
    names: dict[Capabilities, str] = {}
    firsts: dict[tuple[tuple[str, str], ...], str] = {}
    for capabilities in closed_sets():
        if capabilities.isdisjoint(without):
            content = tuple((part, file.name) for part, file in _content(found, capabilities))
            if content:  # compat32 alone has no files
                names[capabilities] = firsts.setdefault(content, tree_name(capabilities))
    return names
