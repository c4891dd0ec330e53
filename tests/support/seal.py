"""What a folder of the host looks like, byte for byte: taken before and after, it shows whether anybody touched it."""

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

Seal = Mapping[str, tuple[object, ...]]


def seal(folders: Iterable[Path]) -> Seal:
    """Path -> kind, mode, owner, number, and content or target; of everything below these folders, and of themselves.

    Times of change are left out for files (reading makes none), and kept for folders: a name that came and went shows.
    """
    return {str(path): _facts(path) for folder in folders for path in (folder, *sorted(folder.rglob("*")))}


def _facts(path: Path) -> tuple[object, ...]:
    found = path.lstat()
    common = (oct(found.st_mode), found.st_uid, found.st_gid, found.st_rdev)
    if stat.S_ISLNK(found.st_mode):
        return (*common, os.fspath(path.readlink()))
    if stat.S_ISREG(found.st_mode):
        return (*common, hashlib.sha256(path.read_bytes()).hexdigest())
    return (*common, found.st_mtime_ns)
