"""Profiles on the node_state are those on the disk, for the GPUs that are there."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nri_gpu.driver.profiles import ProfileController
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.scripted_runtime import until


def test_they_follow_the_gpus(tmp_path: Path) -> None:
    node_state = NodeState(make.inventory(()))
    keeper = ProfileController(tmp_path, node_state)
    assert asyncio.run(keeper.look())
    assert node_state.node.profiles is None
    for found in (make.gpus(2), make.gpus(3)):
        node_state.put_inventory(make.inventory(found))
        assert asyncio.run(keeper.look())
        profiles = node_state.node.profiles
        assert profiles is not None
        assert profiles.minors == {gpu.minor_number for gpu in found}
        assert Path(profiles.path(profiles.minors)).is_file()
    number = node_state.node.number
    assert asyncio.run(keeper.look())
    node_state.put_inventory(make.inventory(()))  # a driver is being replaced
    assert asyncio.run(keeper.look())
    assert (node_state.node.profiles, node_state.node.number) == (profiles, number + 1)


def test_a_disk_that_refuses_is_said_and_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        blocker = tmp_path / "profiles"
        blocker.write_text("a file")
        node_state = NodeState(make.inventory())
        keeper = ProfileController(tmp_path, node_state, retry_s=0.01)
        running = asyncio.create_task(keeper.run())
        keeper.look_again()
        await until("the fault", lambda: bool((known := node_state.node.profiles) and known.fault))
        blocker.unlink()
        await until("the files", lambda: bool((known := node_state.node.profiles) and known.minors))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
