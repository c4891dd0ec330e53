"""Watching folders with inotify(7), by ctypes; imported only where something is watched."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from nri_gpu.system.tasks import set_within

# sys/inotify.h
IN_MODIFY: Final = 0x2
IN_CLOSE_WRITE: Final = 0x8
IN_CREATE: Final = 0x100
IN_MOVED_TO: Final = 0x80
IN_ATTRIB: Final = 0x4
IN_MOVED_FROM: Final = 0x40
IN_DELETE: Final = 0x200
IN_NONBLOCK: Final = os.O_NONBLOCK
IN_CLOEXEC: Final = os.O_CLOEXEC
ENTRIES: Final = IN_CREATE | IN_MOVED_TO | IN_ATTRIB | IN_DELETE | IN_MOVED_FROM
READ_BYTES: Final = 1 << 14

_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """A watch that calls `changed` when an entry of some folders appears, goes or gets other rights, until closed.

    events: the events of inotify to watch for instead.
    """

    def __init__(self, changed: Callable[[], None], events: int = ENTRIES) -> None:
        self._changed = changed
        self._events = events
        self._fd = -1

    def open(self, folders: Iterable[Path]) -> bool:
        """Begin, as `add` has it. Raises: OSError, if the node has no inotify instance left."""
        self._fd = _inotify_init()
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self.add(folders)

    def add(self, folders: Iterable[Path]) -> bool:
        """Watch these folders too. Return whether all are watched that exist: a node has so many watches."""
        return self._fd >= 0 and all([self._watches(each) for each in folders])

    def _watches(self, folder: Path) -> bool:
        added = _libc.inotify_add_watch(self._fd, os.fsencode(folder), self._events)
        return added >= 0 or ctypes.get_errno() == errno.ENOENT

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, READ_BYTES):
                pass
        self._changed()


async def folder_changed(folder: Path, limit_s: float, events: int = ENTRIES) -> None:
    """Return when an entry of a folder, or of the nearest one above if it is missing, changes, or after limit_s.

    events: as FolderWatch has them.
    """
    changed = asyncio.Event()
    with folder_watched(folder, changed.set, events):
        await set_within(changed, limit_s)


@contextlib.contextmanager
def folder_watched(folder: Path, changed: Callable[[], None], events: int = ENTRIES) -> Iterator[None]:
    """Call `changed` when an entry of a folder, or of the nearest one above if it is missing, changes.

    It is never called where the node has no inotify instance left. events: as FolderWatch has them.
    """
    watch = FolderWatch(changed, events)
    with contextlib.suppress(OSError):  # a node has few (fs.inotify.max_user_instances), and others may use them all
        watch.open([nearest(folder)])
    try:
        yield
    finally:
        watch.close()


def nearest(folder: Path) -> Path:
    """Return the folder, or the closest one above it that exists."""
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def _inotify_init() -> int:
    return _checked(_libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
