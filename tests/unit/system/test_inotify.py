"""Waking when something appears in a folder, or when the time is up."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from nri_gpu.system.inotify import folder_changed, nearest

LONG_S = 10.0


async def woken_by(folder: Path, change: object) -> float:
    began = time.monotonic()
    waiting = asyncio.create_task(folder_changed(folder, LONG_S))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert callable(change)
    change()
    await asyncio.wait_for(waiting, 2)
    return time.monotonic() - began


async def test_a_new_entry(folder: Path) -> None:
    assert await woken_by(folder, lambda: (folder / "nri.sock").touch()) < 0.5


async def test_an_entry_moved_in(folder: Path) -> None:
    (folder / "in").mkdir()
    (folder / "nri.sock").touch()
    assert await woken_by(folder / "in", lambda: (folder / "nri.sock").rename(folder / "in" / "nri.sock")) < 0.5


async def test_a_missing_folder_is_watched_for_from_above(folder: Path) -> None:
    assert await woken_by(folder / "run" / "nri", lambda: (folder / "run").mkdir()) < 0.5


async def test_the_limit(folder: Path) -> None:
    began = time.monotonic()
    await folder_changed(folder, 0.05)
    assert 0.04 < time.monotonic() - began < 1


async def test_leaves_no_descriptor(folder: Path) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - proc has no use for Path
    for _ in range(5):
        await folder_changed(folder, 0.001)
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208 - as above


async def test_cancelled_leaves_no_descriptor(folder: Path) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - as above
    waiting = asyncio.create_task(folder_changed(folder, LONG_S))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208 - as above


@pytest.mark.parametrize(("asked", "found"), [("", ""), ("a", "a"), ("a/b/c", "a"), ("file/x", "")])
def test_nearest(tmp_path: Path, asked: str, found: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    assert nearest(tmp_path / asked) == tmp_path / found
