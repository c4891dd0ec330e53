"""Files that never answer: one thread is lost to them, and no more."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.inventory.source import FileReader


def threads() -> int:
    return sum(thread.name == "nri-gpu-files" for thread in threading.enumerate())


async def test_what_comes_back_and_what_is_raised() -> None:
    reader = FileReader(5.0)
    assert await reader.run("adding", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        await reader.run("dividing", lambda: 1 // 0)
    assert await reader.run("again", threading.get_ident) != threading.get_ident()


async def test_a_thread_that_hangs_is_left_alone_and_not_doubled(tmp_path: Path) -> None:
    file, reader = tmp_path / "access", FileReader(0.05)
    os.mkfifo(file)
    with pytest.raises(InventoryError, match=r"reading it did not finish within 0\.05 s"):
        await reader.run("reading it", file.read_text)
    for _ in range(3):
        with pytest.raises(InventoryError, match="reading it has not finished yet"):
            await reader.run("something else", file.read_text)
    assert threads() == 1
    file.write_text("at last")  # as a driver that comes to itself
    async with asyncio.timeout(10):
        while threads():  # noqa: ASYNC110 - a thread's end sets no event
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)  # its last word is in the loop
    assert await reader.run("another", lambda: "well") == "well"


def test_a_loop_ends_without_its_thread(tmp_path: Path) -> None:
    file = tmp_path / "access"
    os.mkfifo(file)

    async def asked_and_cancelled() -> None:
        task = asyncio.create_task(FileReader(60.0).run("reading it", file.read_text))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asked_and_cancelled())
    assert threads() == 1
    file.write_text("too late")  # nobody waits, and nothing is said of it
    for thread in threading.enumerate():
        if thread.name == "nri-gpu-files":
            thread.join(10)
    assert threads() == 0
