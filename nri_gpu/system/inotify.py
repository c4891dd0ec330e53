"""Wakes when something appears in a folder: inotify(7), by ctypes, imported only where something is watched."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

# sys/inotify.h
IN_CREATE: Final = 0x100
IN_MOVED_TO: Final = 0x80
IN_ATTRIB: Final = 0x4
IN_MOVED_FROM: Final = 0x40
IN_DELETE: Final = 0x200
READ_BYTES: Final = 1 << 14
IN_NONBLOCK: Final = os.O_NONBLOCK
IN_CLOEXEC: Final = os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


async def folder_changed(folder: Path, limit_s: float) -> None:
    """Return when an entry appears in a folder, or after limit_s. A missing folder is one more reason to wait."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    try:
        fd = _inotify_init()
    except OSError:  # a node has few of these (fs.inotify.max_user_instances), and others may have them all
        await asyncio.sleep(limit_s)
        return
    try:
        _inotify_add_watch(fd, nearest(folder), IN_CREATE | IN_MOVED_TO | IN_ATTRIB)
        loop.add_reader(fd, woken.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await woken.wait()
    except OSError:
        await asyncio.sleep(limit_s)
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def nearest(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def _inotify_init() -> int:
    return _checked(_libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC))


def _inotify_add_watch(fd: int, path: Path, mask: int) -> int:
    return _checked(_libc.inotify_add_watch(fd, os.fsencode(path), mask))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class FolderWatch:
    """Calls `changed` each time that an entry of some folders comes, goes or gets other rights, until closed."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._fd = -1

    def open(self, folders: Iterable[Path]) -> None:
        """Begin, with those of the folders that are there. Raises: OSError: the node has no inotify left."""
        self._fd = _inotify_init()
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        self.add(folders)

    def add(self, folders: Iterable[Path]) -> None:
        """These too; one that is watched already is left as it is, one that is not there is passed over."""
        if self._fd < 0:
            return
        for folder in folders:
            with contextlib.suppress(OSError):
                _inotify_add_watch(self._fd, folder, IN_CREATE | IN_MOVED_TO | IN_ATTRIB | IN_DELETE | IN_MOVED_FROM)

    def close(self) -> None:
        """Watch no more."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, READ_BYTES):
                pass
        self._changed()
