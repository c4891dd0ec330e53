"""The user namespace of a machine that is an unprivileged container (LXC, LXD, Proxmox), and its host's files there.

Users that the namespace does not have show as the overflow user, 65534, whoever they are on the host. LXC's usual map
has that id, too: then a file of that user can be one of this machine's own nobody. Source: user_namespaces(7), proc(5).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

_PROC: Final = Path("/proc")  # ids are as this process sees them, wherever files are
_OVERFLOW: Final = 65534
_WHOLE: Final = ((0, 4294967295),)
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")  # blanks in mountinfo

# First id and number of ids, of each range that the namespace has.
_Ids = tuple[tuple[int, int], ...]


class _Mount(Struct, frozen=True):
    """The place of a path. file: below the root of the file system on that device."""

    device: str
    file: Path
    read_only: bool


def in_user_namespace() -> bool:
    """Return whether this machine has users of its own, and no rights over the host's. False if it cannot be seen."""
    return _ids("self") not in ((), _WHOLE)


def is_the_hosts(uid: int, path: Path | None) -> bool:
    """Return whether a file belongs to a user of the host alone, so that nobody on this machine can be its owner.

    uid: its owner, as stat(2) shows it. path: where it is; None takes the id's word alone.
    """
    if uid != _overflow() or not in_user_namespace():
        return False
    mapped = any(first <= uid < first + count for first, count in _ids("self"))
    return not mapped or (path is not None and _is_read_only(Path(os.path.realpath(path))))


def _is_read_only(path: Path) -> bool:
    """Return whether this machine cannot write to the path, not only this process.

    A unit's ProtectSystem= makes mounts read-only in its own mount namespace, so the machine's first process is asked.
    If that is the host's, our own view counts, unless even our `/` is read-only; if it is hidden, nothing is proven.
    """
    here, root = _mount("self", path), _mount("self", Path("/"))
    if not here or not here.read_only:
        return False
    if (first := _ids("1")) == _ids("self"):
        return _mount("1", path) == here
    return bool(first) and root is not None and not root.read_only


def _mount(process: str, path: Path) -> _Mount | None:
    """Return the last of the innermost mounts of a path, or None if the process's mounts cannot be seen."""
    found, innermost = None, ""
    for fields in map(str.split, _text(f"{process}/mountinfo").splitlines()):
        root, point = (_ESCAPED.sub(lambda match: chr(int(match[1], 8)), field) for field in fields[3:5])
        if len(point) >= len(innermost) and path.is_relative_to(point):
            innermost = point
            read_only = "ro" in (*fields[5].split(","), *fields[-1].split(","))
            found = _Mount(fields[2], Path(root) / path.relative_to(point), read_only)
    return found


def _ids(process: str) -> _Ids:
    """Return the ids that a process's namespace has, or none if they cannot be seen."""
    rows = (row.split() for row in _text(f"{process}/uid_map").splitlines())
    return tuple((int(first), int(count)) for first, _, count in rows)


def _overflow() -> int:
    text = _text("sys/kernel/overflowuid").strip()
    return int(text) if text.isdecimal() else _OVERFLOW


def _text(name: str) -> str:
    with suppress(OSError):
        return (_PROC / name).read_text(encoding="utf-8", errors="surrogateescape")
    return ""
