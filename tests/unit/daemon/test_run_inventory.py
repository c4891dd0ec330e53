"""The daemon's own process, without a runtime: what it believes of a node that changes, and after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace

from nri_gpu.cli.client import ask
from nri_gpu.cli.status import to_text
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.simulation.scenario import LOST
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.waiting import wait_for


def status(daemon: NriGpu) -> Mapping[str, Any]:
    return ask(daemon.launch.state / CONTROL_SOCKET, "status", dict)


def unavailable(daemon: NriGpu) -> list[str]:
    return [gpu["unavailable"] for gpu in status(daemon)["gpus"]]


@pytest.fixture
def launch(folder: Path) -> Launch:
    return Launch(folder / "d", socket=folder / "none.sock", topology=folder / "node.toml")


def test_a_topology_plays_and_an_edit_is_seen(launch: Launch) -> None:
    """A lost GPU is a bad one, here as on a real driver: back, it has to do without trouble for the hold-down first."""
    assert launch.topology
    whole = FOUR_GPUS.read_text()
    launch.topology.write_text(f"{whole}\n[[change]]\nat_s = 0.5\ngpu = 1\nlost = true\n")
    policy = launch.base.parent / "policy.toml"
    policy.write_text("schema = 1\n[health]\nhold_down_s = 2\nreprobe_s = 1\n")
    with NriGpu(replace(launch, policy=policy)) as daemon:
        daemon.wait_logged("inventory changed gpus=4")
        wait_for("its control socket", lambda: answers(daemon), 10)
        wait_for("its loss", lambda: unavailable(daemon)[1].startswith("bad since "), 10)
        assert "is lost" in unavailable(daemon)[1]
        launch.topology.write_text(whole)
        wait_for("its return", lambda: unavailable(daemon) == [""] * 4, 20)
        said = status(daemon)
        assert said["transitions"]["counts"] == {"health": 3, "sign": 2}
        assert [each["what"].partition(") ")[2] for each in said["transitions"]["last"]] == [
            "shows lost",
            f"is bad, because of: {LOST}",
            "no longer shows lost",
            f"is recovering from: {LOST}",
            f"is healthy, recovered from: {LOST}",
        ]
        assert "5 changes since 20" in to_text(convert(said, DaemonStatus), 0.0)
        launch.topology.write_text("schema = 1\n[node]\ndriver = 5\n")
        assert "node.driver: 5 is not a version" in daemon.wait_logged("inventory not refreshed")
        assert unavailable(daemon) == [""] * 4
        wait_for("the fault's time", lambda: bool(status(daemon)["node"]["inventory_fault_since_s"]), 10)
        assert daemon.terminate() == 0


def answers(daemon: NriGpu) -> bool:
    try:
        return bool(status(daemon))
    except OSError:
        return False
