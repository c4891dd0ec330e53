"""Stages a driver: a folder for each generation, with a tree of files for each set of capabilities, mounted whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.gpu import Capabilities, Capability, closed_sets
from nri_gpu.domain.node import DriverFiles, DriverTree
from nri_gpu.driver.copy_file import FROM_HOST, WITHIN_GENERATION, CopyMethod, place
from nri_gpu.driver.host_file import HostFile, check_folder
from nri_gpu.driver.scan import DriverFile, FoundDriver
from nri_gpu.system.storage import lock_holder, open_lock, try_lock

LIBRARIES, SINGLES = "lib64", "extra"
LIBRARIES_32, BINARIES = (f"{LIBRARIES}/{part}" for part in ("lib32", "bin"))
FOLDER_MODE: Final = 0o755
# After so many damaged folders something must be writing below the base, and each new one may cost a copy.
ATTEMPTS: Final = 5
GENERATION: Final = re.compile(r"(?:compat[0-9.]+-)?[0-9.]+-[0-9a-f]{8}(?:\.\d+)?")
NS_PER_S: Final = 10**9
LOCK_FILE: Final = ".lock"
# A daemon that stops waits for its threads, and has 10 s for all (systemd/nri-gpu.service).
LOCK_WAIT_S: Final = 3.0
LOCK_LOOK_S: Final = 0.02

# Path below the generation's folder -> the host's file, or the target of a symlink. It is complete, so a staged folder
# is also checked against it.
Plan = Mapping[str, HostFile | str]
Row = tuple[str, tuple[str, ...]]  # a library's path in a tree, and its names


def stage(
    found: FoundDriver, base: Path, methods: Sequence[CopyMethod] = FROM_HOST, *, wait_s: float = LOCK_WAIT_S
) -> DriverFiles:
    """Makes the folder of a generation unless it exists. Safe to repeat and to run in parallel.

    base: of all generations; made when missing. methods: how host files get there, best first. wait_s: for another
    process that stages there.
    Blocks for milliseconds when the folder exists, or by reflink or hard link; for a copy as long as the disk takes for
    some 500 MB.

    Raises: DriverError: no space, no permission, a host file changed meanwhile, a base that others can write to or
    that another process keeps locked.
    """
    try:
        folder = stage_plan(_plan(found), found.generation, base, methods, wait_s)
    except OSError as error:
        raise DriverError(f"the driver's files cannot be staged in {base}: {_explain(error, found)}") from error
    return planned(found, folder)


def stage_plan(
    plan: Plan, generation: str, base: Path, methods: Sequence[CopyMethod] = FROM_HOST, wait_s: float = LOCK_WAIT_S
) -> Path:
    """The folder that holds a plan's files, made unless it exists and is complete. Raises: DriverError, OSError."""
    folder = private_folder(base)
    name, made = _slot(folder, generation, plan)
    if not made:
        with _locked(folder, wait_s):
            # Again: another process may have made it while we waited for the lock.
            name, made = _slot(folder, generation, plan)
            if not made:
                _make(folder, name, plan, methods)
    return folder / name


def prune(base: Path, keep: AbstractSet[str]) -> tuple[str, ...]:
    """Removes all generations but those in `keep`. Returns what was removed.

    keep: the current one and all that live grants name. A container with a removed one mounted would lose its files.

    Raises: DriverError: one could not be removed.
    """
    return prune_where(base, lambda folder: folder.name not in keep)


def prune_where(base: Path, unwanted: Callable[[Path], bool]) -> tuple[str, ...]:
    """Removes the generations for which `unwanted` returns true, under the lock."""
    if not base.is_dir():
        return ()
    try:
        folder = private_folder(base)
        with _locked(folder, LOCK_WAIT_S):
            _sweep(folder)
            names = sorted(p.name for p in folder.iterdir() if GENERATION.fullmatch(p.name) and unwanted(p))
            for name in names:
                # Renamed first, so that an incomplete one is never seen under its name.
                (folder / name).rename(_temporary(folder, name))
                _sweep(folder)
    except OSError as error:
        raise DriverError(f"old driver files cannot be removed from {base}: {error}") from error
    return tuple(names)


def tree_name(capabilities: Capabilities) -> str:
    """The folder of a set of capabilities: `compute+utility`."""
    return "+".join(capability for capability in Capability if capability in capabilities)


def _explain(error: OSError, found: FoundDriver) -> str:
    if error.errno != errno.ENOSPC:
        return str(error)
    needed = sum(source.size_bytes for source in {file.source for _, file in _parts(found)})
    return f"no space left; a copy takes {needed / 2**20:.0f} MiB, less where hard links or reflinks are possible"


def planned(found: FoundDriver, folder: Path) -> DriverFiles:
    """What containers get of a generation staged at `folder`. Does not read the disk."""
    names = _tree_names(found)
    # Some 70 trees share the rows, one for each file.
    rows = {(part, file.name): _row(part, file) for part, file in _parts(found)}
    made: dict[str, DriverTree] = {}
    for capabilities, name in names.items():
        if name not in made:
            made[name] = _tree(str(folder / name), tuple(_content(found, capabilities)), rows)
    trees = {capabilities: made[name] for capabilities, name in names.items()}
    return DriverFiles(found.version, folder.name, MappingProxyType(trees), found.missing)


def _row(part: str, file: DriverFile) -> Row:
    return f"{part}/{file.name}", (file.name, *(name for name, _ in file.links))


def _tree(path: str, content: Sequence[tuple[str, DriverFile]], rows: Mapping[tuple[str, str], Row]) -> DriverTree:
    return DriverTree(
        path=path,
        binaries=tuple(file.name for part, file in content if part == BINARIES),
        files=tuple((place, f"{part}/{file.name}") for part, file in content for place in file.places),
        libraries=tuple(rows[part, file.name] for part, file in content if part == LIBRARIES),
        libraries_32=tuple(rows[part, file.name] for part, file in content if part == LIBRARIES_32),
    )


def _parts(found: FoundDriver) -> Iterator[tuple[str, DriverFile]]:
    """Every file, and the part of a tree it belongs to."""
    parts = (LIBRARIES, found.libraries), (LIBRARIES_32, found.libraries_32), (BINARIES, found.binaries)
    return ((part, file) for part, files in (*parts, (SINGLES, found.singles)) for file in files)


def _content(found: FoundDriver, capabilities: Capabilities) -> Iterator[tuple[str, DriverFile]]:
    """The files that a set of capabilities gets, each with its part of a tree."""
    compat = frozenset({Capability.COMPAT32})
    for part, file in _parts(found):
        if part == LIBRARIES_32:
            wanted = compat <= capabilities and (file.capabilities - compat) & capabilities
        else:
            wanted = file.capabilities & capabilities
        if wanted:
            yield part, file


def _tree_names(found: FoundDriver) -> Mapping[Capabilities, str]:
    """The tree of every closed set of capabilities that this driver has files for.

    Sets with the same files share the tree of the smallest, so a driver without 32-bit libraries or an X server has a
    quarter of the trees.
    """
    # A file of two capabilities proves neither: a server's driver has the compiler for both, and no graphics.
    have = {next(iter(file.capabilities)) for file in found.libraries if len(file.capabilities) == 1}
    have |= {Capability.COMPAT32} if found.libraries_32 else set()
    if Capability.GRAPHICS in have:
        have.add(Capability.DISPLAY)  # a display works without an X server
    names: dict[Capabilities, str] = {}
    firsts: dict[tuple[tuple[str, str], ...], str] = {}
    for capabilities in closed_sets():
        if capabilities <= have:
            content = tuple((part, file.name) for part, file in _content(found, capabilities))
            if content:  # compat32 alone has no files
                names[capabilities] = firsts.setdefault(content, tree_name(capabilities))
    return names


def _plan(found: FoundDriver) -> Plan:
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
    return MappingProxyType(plan)


def _slot(base: Path, generation: str, plan: Plan) -> tuple[str, bool]:
    """The folder name to use for a generation, and whether it exists and is complete."""
    names = (generation, *(f"{generation}.{number}" for number in range(1, ATTEMPTS)))
    for name in names:
        if not (base / name).exists():
            return name, False
        if _is_complete(base / name, plan):
            return name, True
    raise DriverError(
        f"the staged driver files {base / generation} were changed {ATTEMPTS} times: something writes there"
    )


def _is_complete(folder: Path, plan: Plan) -> bool:
    return all(_matches(folder / path, entry) for path, entry in plan.items())


def _matches(path: Path, entry: HostFile | str) -> bool:
    try:
        if isinstance(entry, str):
            return os.fspath(path.readlink()) == entry
        found = path.lstat()
    except OSError:
        return False
    # Seconds: not every file system keeps a finer time.
    same_time = found.st_mtime_ns // NS_PER_S == entry.mtime_ns // NS_PER_S
    return stat.S_ISREG(found.st_mode) and found.st_size == entry.size_bytes and same_time


def _make(base: Path, name: str, plan: Plan, methods: Sequence[CopyMethod]) -> None:
    _sweep(base)
    temporary = _temporary(base, name)
    try:
        _fill(temporary, plan, methods)
        temporary.rename(base / name)
        _sync_folder(base)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fill(folder: Path, plan: Plan, methods: Sequence[CopyMethod]) -> None:
    for path in sorted(_folders(plan)):
        _make_folder(folder / path)
    placed: dict[Path, Path] = {}
    for path, entry in plan.items():
        target = folder / path
        if isinstance(entry, str):
            target.symlink_to(entry)
        elif first := placed.get(entry.path):
            place(first, target, WITHIN_GENERATION)
        else:
            _place_from_host(entry, target, methods)
            placed[entry.path] = target


def _folders(plan: Plan) -> set[str]:
    """Every folder of a generation, itself as `.`; all trees have the two that are mounted or searched by name."""
    parents = {str(parent) for path in plan for parent in PurePosixPath(path).parents}
    trees = {path.partition("/")[0] for path in plan if "/" in path}
    return parents | {f"{tree}/{part}" for tree in trees for part in (LIBRARIES, BINARIES)}


def _place_from_host(source: HostFile, target: Path, methods: Sequence[CopyMethod]) -> None:
    place(source.path, target, methods)
    # Checked afterwards, so that no change can come between check and copy.
    if not source.unchanged():
        raise DriverError(f"{source.path} changed while it was staged: a driver is being installed; try again later")


def _make_folder(path: Path) -> None:
    path.mkdir(exist_ok=True)
    path.chmod(FOLDER_MODE)  # whatever the umask


def private_folder(base: Path) -> Path:
    """`base` without symlinks, made when missing. Raises: DriverError: others could put files there."""
    base.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    folder = base.resolve()
    check_folder(folder)
    return folder


@contextmanager
def _locked(base: Path, wait_s: float) -> Iterator[None]:
    """Holds the lock of `base`, which no process outlives. Raises: DriverError, OSError."""
    lock, deadline = open_lock(base / LOCK_FILE), time.monotonic() + wait_s
    try:
        while not try_lock(lock):
            if time.monotonic() > deadline:
                raise DriverError(
                    f"another process{lock_holder(lock)} has {base / LOCK_FILE} locked: wait until it has staged its "
                    "files, or end it"
                )
            time.sleep(LOCK_LOOK_S)
        yield
    finally:
        os.close(lock)


def _temporary(base: Path, name: str) -> Path:
    return base / f".{name}.tmp"


def _sweep(base: Path) -> None:
    # We hold the lock, so a process that died left these.
    for leftover in base.glob(".*.tmp"):
        shutil.rmtree(leftover)


def _sync_folder(base: Path) -> None:
    handle = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
