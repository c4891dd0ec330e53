"""Profiles on the board are those on the disk, for the GPUs that are there."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nri_gpu.driver.profiles import ProfileKeeper
from nri_gpu.system.state import Board
from tests.support import builders as make
from tests.support.scripted_runtime import until


def test_they_follow_the_gpus(tmp_path: Path) -> None:
    board = Board(make.inventory(()))
    keeper = ProfileKeeper(tmp_path, board)
    assert asyncio.run(keeper.look())
    assert board.snapshot().profiles is None
    for found in (make.gpus(2), make.gpus(3)):
        board.put_inventory(make.inventory(found))
        assert asyncio.run(keeper.look())
        profiles = board.snapshot().profiles
        assert profiles is not None
        assert profiles.minors == {gpu.minor_number for gpu in found}
        assert Path(profiles.path(profiles.minors)).is_file()
    number = board.snapshot().number
    assert asyncio.run(keeper.look())
    board.put_inventory(make.inventory(()))  # a driver is being replaced
    assert asyncio.run(keeper.look())
    assert (board.snapshot().profiles, board.snapshot().number) == (profiles, number + 1)


def test_a_disk_that_refuses_is_said_and_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        blocker = tmp_path / "profiles"
        blocker.write_text("a file")
        board = Board(make.inventory())
        keeper = ProfileKeeper(tmp_path, board, retry_s=0.01)
        running = asyncio.create_task(keeper.run())
        keeper.look_again()
        await until("the fault", lambda: bool((known := board.snapshot().profiles) and known.fault))
        blocker.unlink()
        await until("the files", lambda: bool((known := board.snapshot().profiles) and known.minors))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
