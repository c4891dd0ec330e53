"""Waking when something appears in a folder, or when the time is up."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.system.folder_watch import folder_changed, nearest

LONG_S = 10.0


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a new entry": ("in", lambda folder: (folder / "in/nri.sock").touch()),
    "an entry moved in": ("in", lambda folder: (folder / "other").rename(folder / "in/nri.sock")),
    "a missing folder, from above": ("run/nri", lambda folder: (folder / "run").mkdir()),
}


@pytest.mark.parametrize(("watched", "change"), CHANGES.values(), ids=CHANGES)
async def test_what_wakes(folder: Path, watched: str, change: Callable[[Path], object]) -> None:
    (folder / "in").mkdir()
    (folder / "other").touch()
    waiting = asyncio.create_task(folder_changed(folder / watched, LONG_S))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    change(folder)
    await asyncio.wait_for(waiting, LONG_S / 2)


async def test_the_limit(folder: Path) -> None:
    began = time.monotonic()
    await folder_changed(folder, 0.05)
    assert 0.04 < time.monotonic() - began < LONG_S


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - proc has no use for Path


async def test_no_descriptor_is_left_even_when_cancelled(folder: Path) -> None:
    before = descriptors()
    await folder_changed(folder, 0.001)
    waiting = asyncio.create_task(folder_changed(folder, LONG_S))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert descriptors() == before


@pytest.mark.parametrize(("asked", "found"), [("", ""), ("a", "a"), ("a/b/c", "a"), ("file/x", "")])
def test_nearest(tmp_path: Path, asked: str, found: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    assert nearest(tmp_path / asked) == tmp_path / found
