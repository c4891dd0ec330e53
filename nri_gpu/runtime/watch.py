"""Wakes when something appears in a folder: inotify(7), by ctypes, imported only while there is no socket."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path
from typing import Final

# sys/inotify.h
IN_CREATE: Final = 0x100
IN_MOVED_TO: Final = 0x80
IN_ATTRIB: Final = 0x4
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
        _inotify_add_watch(fd, nearest(folder))
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


def _inotify_add_watch(fd: int, path: Path) -> int:
    return _checked(_libc.inotify_add_watch(fd, os.fsencode(path), IN_CREATE | IN_MOVED_TO | IN_ATTRIB))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
