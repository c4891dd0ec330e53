"""The file of labels follows GPUs and policy, whole at any moment."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

from nri_gpu.kubelet.labels import LabelController
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.scripted_runtime import until

OFF = KubeletSettings()


def count(file: Path) -> str:
    lines = dict(line.split("=", 1) for line in file.read_text().splitlines())
    return lines["nvidia.com/gpu.count"]


def test_it_follows_the_gpus(tmp_path: Path) -> None:
    file = tmp_path / "nri-gpu"
    node_state = NodeState(make.inventory(make.gpus(2)))
    keeper = LabelController(node_state, lambda: str(file), OFF, machine="")
    before = os.umask(0o077)  # as the unit has it
    try:
        assert asyncio.run(keeper.look())
    finally:
        os.umask(before)
    assert count(file) == "2"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    node_state.put_inventory(make.inventory(make.gpus(3)))
    assert asyncio.run(keeper.look())
    assert count(file) == "3"
    assert [path.name for path in tmp_path.iterdir()] == ["nri-gpu"]


def test_the_same_again_is_not_written_again(tmp_path: Path) -> None:
    file = tmp_path / "nri-gpu"
    node_state = NodeState(make.inventory())
    keeper = LabelController(node_state, lambda: str(file), OFF, machine="")
    assert asyncio.run(keeper.look())
    inode = file.stat().st_ino
    node_state.put_inventory(make.inventory(taken_at=99.0))
    assert asyncio.run(keeper.look())
    assert file.stat().st_ino == inode


def test_while_nothing_is_known_it_stays(tmp_path: Path) -> None:
    file = tmp_path / "nri-gpu"
    node_state = NodeState(make.inventory(make.gpus(2)))
    keeper = LabelController(node_state, lambda: str(file), OFF, machine="")
    assert asyncio.run(keeper.look())
    node_state.put_inventory(make.inventory((), fault="the driver is being replaced"))
    assert asyncio.run(keeper.look())
    assert count(file) == "2"


def test_another_place_and_none(tmp_path: Path) -> None:
    wanted = [str(tmp_path / "one")]
    keeper = LabelController(NodeState(make.inventory()), lambda: wanted[0], OFF, machine="")
    for name in ("one", "two"):
        wanted[0] = str(tmp_path / name)
        assert asyncio.run(keeper.look())
        assert [path.name for path in tmp_path.iterdir()] == [name]
    wanted[0] = ""
    assert asyncio.run(keeper.look())
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_said_and_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "features.d"

    async def scenario() -> None:
        keeper = LabelController(
            NodeState(make.inventory()), lambda: str(folder / "nri-gpu"), OFF, retry_s=0.01, machine=""
        )
        assert not await keeper.look()
        running = asyncio.create_task(keeper.run())
        keeper.look_again()
        folder.mkdir()
        await until("the file", (folder / "nri-gpu").is_file)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_a_link_in_the_place_of_the_draft_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".nri-gpu.new").symlink_to(victim)
    keeper = LabelController(NodeState(make.inventory()), lambda: str(tmp_path / "nri-gpu"), OFF, machine="")
    assert asyncio.run(keeper.look())
    assert victim.read_text() == "precious"


def test_the_kubelets_half_is_told_of_as_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "nri-gpu"
    shared = KubeletSettings(enabled=True, replicas=4)
    keeper = LabelController(NodeState(make.inventory()), lambda: str(file), shared, machine="")
    assert asyncio.run(keeper.look())
    assert "nvidia.com/gpu.replicas=4\n" in file.read_text()
