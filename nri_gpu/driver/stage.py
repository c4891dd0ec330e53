"""The staging of a driver: a folder for each generation, in which no file changes once it is there.

A file of the host gets there by reflink, hard link or copy, whichever works first.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

from nri_gpu.domain.errors import DriverError, fault_of
from nri_gpu.domain.node import CompatPackage, DriverFiles
from nri_gpu.driver.driver_scan import FoundDriver, Signatures, signatures
from nri_gpu.driver.host_files import HostFile, check_folder
from nri_gpu.driver.manifest import MANIFEST, manifest_text, read_manifest
from nri_gpu.driver.trees import BINARIES, LIBRARIES, LIBRARIES_32, Plan, copied_bytes, plan_of, planned
from nri_gpu.system.selinux import READ_ONLY, label_if_enabled, set_label
from nri_gpu.system.storage import lock_holder, open_lock, try_lock, write_whole

FOLDER_MODE: Final = 0o755
# After so many damaged folders something must be writing below the base, and each new one may cost a copy.
ATTEMPTS: Final = 5
GENERATION: Final = re.compile(r"(?:compat[0-9.]+-)?[0-9.]+-[0-9a-f]{8}(?:\.\d+)?")
NS_PER_S: Final = 10**9
LOCK_FILE: Final = ".lock"
# A daemon that stops waits for its threads, and has 10 s for all (systemd/nri-gpu.service).
LOCK_WAIT_S: Final = 3.0
LOCK_LOOK_S: Final = 0.02

FICLONE: Final = 0x40049409  # _IOW(0x94, 9, int), linux/fs.h
CHUNK_BYTES: Final = 1 << 26
READABLE: Final = 0o444
FILE_MODE: Final = 0o555  # libraries too: distributions differ, and the loader does not mind

# Makes the manifest of a generation, to be written into this folder.
ManifestText = Callable[[Path], bytes]
# Puts the file of the first path at the second, which does not exist yet; or raises OSError and leaves nothing there.
CopyMethod = Callable[[Path, Path], None]


def reflink(original: Path, target: Path) -> None:
    """Make a file that shares blocks with the original: on XFS, btrfs and bcachefs; EOPNOTSUPP elsewhere."""

    def clone(source: int, new: int) -> None:
        fcntl.ioctl(new, FICLONE, source)

    _new_file(original, target, clone)


def hard_link(original: Path, target: Path) -> None:
    """Give the original a second name: no space, no time, and no mode of its own.

    If something wrote into the original in place, the file would change under a running container. Package managers do
    not: dpkg, rpm and NVIDIA's installer put a new file at the name, and our link keeps the old one.
    Where SELinux labels files it is not used: the label would be the host's file's, too.
    A hardened unit gets EXDEV: each of its writable paths is a mount of its own, and link(2) does not cross mounts.
    """
    if original.lstat().st_mode & READABLE != READABLE:
        raise PermissionError(f"{original} is not readable by everyone, and a link cannot change that")
    os.link(original, target, follow_symlinks=False)


def copy(original: Path, target: Path) -> None:
    """Copy the file, to disk before this returns."""

    def transfer(source: int, new: int) -> None:
        while os.sendfile(new, source, None, CHUNK_BYTES):  # None: from where it is
            pass

    _new_file(original, target, transfer)


# A reflink is as cheap as a hard link, and does not change when something writes into the original.
FROM_HOST: Final[Sequence[CopyMethod]] = (reflink, hard_link, copy)
# Between the trees of one generation both names are ours, so one inode, and one place in the page cache, is best.
WITHIN_GENERATION: Final[Sequence[CopyMethod]] = (hard_link, reflink, copy)


def place(original: Path, target: Path, methods: Sequence[CopyMethod]) -> None:
    """Put `original` at `target` by the first method that works. Raises: OSError: of the last one."""
    *others, last = methods
    for method in others:
        try:
            return method(original, target)
        except OSError:
            continue  # EXDEV, EPERM, EOPNOTSUPP, EMLINK ...: the error of the last one says what is really wrong
    return last(original, target)


def _write(content: bytes, original: Path, target: Path) -> None:
    """Make a file with this content, and with the original's times."""

    def fill(_: int, new: int) -> None:
        with open(new, "wb", closefd=False) as file:
            file.write(content)

    _new_file(original, target, fill)


def _new_file(original: Path, target: Path, fill: Callable[[int, int], None]) -> None:
    source = os.open(original, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(source)
        new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fill(source, new)
            os.fchmod(new, FILE_MODE)  # whatever the umask
            os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(new)
        except OSError:
            target.unlink()
            raise
        finally:
            os.close(new)
    finally:
        os.close(source)


def stage(
    found: FoundDriver,
    base: Path,
    methods: Sequence[CopyMethod] = FROM_HOST,
    *,
    wait_s: float = LOCK_WAIT_S,
    label: str | None = None,
) -> DriverFiles:
    """Make the folder of a generation unless it exists. It is safe to repeat and to run in parallel.

    base: of all generations; made when missing. methods: how host files get there, best first. wait_s: for another
    process that stages there. label: of SELinux; None: what this host needs.
    Blocks for milliseconds when the folder exists, or by reflink or hard link; for a copy as long as the disk takes for
    some 500 MB.

    Raises: DriverError: no space, no permission, a host file changed meanwhile, a base that others can write to or
    that another process keeps locked.
    """
    plan = plan_of(found)
    try:
        folder = stage_plan(
            plan,
            found.generation,
            base,
            methods,
            wait_s,
            label=label,
            manifest=lambda folder: manifest_text(planned(found, folder), plan),
        )
    except OSError as error:
        why = fault_of(error)
        if error.errno == errno.ENOSPC:
            needed = f"{copied_bytes(found) / 2**20:.0f} MiB"
            why = f"no space left; a copy takes {needed}, less where hard links or reflinks are possible"
        raise DriverError(f"the driver's files cannot be staged in {base}: {why}") from error
    return planned(found, folder)


def stage_plan(
    plan: Plan,
    generation: str,
    base: Path,
    methods: Sequence[CopyMethod] = FROM_HOST,
    wait_s: float = LOCK_WAIT_S,
    *,
    label: str | None = None,
    manifest: ManifestText | None = None,
) -> Path:
    """Return the folder that holds a plan's files, made unless it exists and is complete.

    manifest: of the folder; None: it has none.

    Raises: DriverError, OSError.
    """
    if label is None:
        label = label_if_enabled(READ_ONLY)
    if label:
        # Another folder than an older version made, which hard-linked the host's files: those must not be labelled.
        generation = _labelled(generation, label)
        methods = [method for method in methods if method is not hard_link]
    folder = private_folder(base)
    name, made = _slot(folder, generation, plan, manifest)
    if not made:
        with _locked(folder, wait_s):
            # Again: another process may have made it while we waited for the lock.
            name, made = _slot(folder, generation, plan, manifest)
            if not made:
                _make(folder, name, plan, methods, label, manifest)
    return folder / name


def _labelled(generation: str, label: str) -> str:
    """Return a name of the same form for the same files with a label."""
    version, _, digest = generation.rpartition("-")
    return f"{version}-{hashlib.sha256(f'{digest} {label}'.encode()).hexdigest()[:8]}"


def prune(base: Path, unwanted: Callable[[Path], bool]) -> tuple[str, ...]:
    """Remove the generations for which `unwanted` returns true, under the lock. Return what was removed.

    A container with a removed generation mounted would lose its files.

    Raises: DriverError, if a generation cannot be removed.
    """
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
        raise DriverError(f"old driver files cannot be removed from {base}: {fault_of(error)}") from error
    return tuple(names)


def staged_signatures(files: DriverFiles) -> Signatures:
    """Return signatures of the folders that containers get, some hundred. A folder that loses a file changes."""
    trees = sorted({tree.path for tree in files.trees.values()})
    return signatures(f"{tree}/{part}" for tree in trees for part in ("", LIBRARIES, LIBRARIES_32, BINARIES))


def staged_evidence(files: DriverFiles, compat: Iterable[CompatPackage] = ()) -> Signatures:
    """Return signatures of the containers' folders and of every file: a hard link changes when the host's file does.

    compat: the packages that are staged beside the driver.

    A file of several trees is the same file, or a copy of our own.
    """
    parts: dict[str, str] = {}
    for tree in sorted(files.trees.values(), key=lambda tree: tree.path):
        names = [part for part, _ in (*tree.libraries, *tree.libraries_32)] + [part for _, part in tree.files]
        for part in (*names, *(f"{BINARIES}/{name}" for name in tree.binaries)):
            parts.setdefault(part, tree.path)
    paths = [f"{tree}/{part}" for part, tree in sorted(parts.items())]
    for package in compat:
        paths += (package.path, *sorted(map(str, Path(package.path).glob("*"))))
    return staged_signatures(files) + signatures(paths)


def private_folder(base: Path) -> Path:
    """Return `base` without symlinks, made when missing.

    Raises: DriverError: users other than root could put files there.
    """
    base.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    folder = base.resolve()
    check_folder(folder)
    return folder


def _slot(base: Path, generation: str, plan: Plan, manifest: ManifestText | None) -> tuple[str, bool]:
    """Return the folder name to use for a generation, and whether the folder exists and is complete."""
    names = (generation, *(f"{generation}.{number}" for number in range(1, ATTEMPTS)))
    for name in names:
        if not (base / name).exists():
            return name, False
        whole = all(_matches(base / name / path, entry) for path, entry in plan.items())
        if whole and (manifest is None or read_manifest(base / name)):
            return name, True
    raise DriverError(
        f"the staged driver files {base / generation} were changed {ATTEMPTS} times: something writes there"
    )


def _matches(path: Path, entry: HostFile | str) -> bool:
    try:
        if isinstance(entry, str):
            return os.fspath(path.readlink()) == entry
        found = path.lstat()
    except OSError:
        return False
    # Seconds: not every file system keeps a finer time.
    same_time = found.st_mtime_ns // NS_PER_S == entry.mtime_ns // NS_PER_S
    return stat.S_ISREG(found.st_mode) and found.st_size == entry.staged_bytes and same_time


def _make(
    base: Path, name: str, plan: Plan, methods: Sequence[CopyMethod], label: str, manifest: ManifestText | None
) -> None:
    _sweep(base)
    temporary = _temporary(base, name)
    try:
        _fill(temporary, plan, methods)
        if manifest:
            write_whole(temporary / MANIFEST, manifest(base / name), sync=True)
        for path in (temporary, *temporary.rglob("*")) if label else ():
            set_label(path, label)
        temporary.rename(base / name)
        folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fill(folder: Path, plan: Plan, methods: Sequence[CopyMethod]) -> None:
    for path in sorted(_folders(plan)):
        (folder / path).mkdir(exist_ok=True)
        (folder / path).chmod(FOLDER_MODE)  # whatever the umask
    placed: dict[Path, Path] = {}
    for path, entry in plan.items():
        target = folder / path
        if isinstance(entry, str):
            target.symlink_to(entry)
        elif first := placed.get(entry.path):
            place(first, target, WITHIN_GENERATION)
        else:
            place(entry.path, target, methods if entry.content is None else (partial(_write, entry.content),))
            # Checked afterwards, so that no change can come between check and copy.
            if not entry.unchanged():
                raise DriverError(
                    f"{entry.path} changed while it was staged: a driver is being installed; try again later"
                )
            placed[entry.path] = target


def _folders(plan: Plan) -> set[str]:
    """Return every folder of a generation, itself as `.`; each tree has the two mounted or searched by name."""
    parents = {str(parent) for path in plan for parent in PurePosixPath(path).parents}
    trees = {path.partition("/")[0] for path in plan if "/" in path}
    return parents | {f"{tree}/{part}" for tree in trees for part in (LIBRARIES, BINARIES)}


@contextmanager
def _locked(base: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock of `base`, which no process outlives. Raises: DriverError, OSError."""
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
