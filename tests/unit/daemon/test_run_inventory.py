"""The daemon's own process, without a runtime: what it believes of a node that changes, and after a restart."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.cli.client import ask
from nri_gpu.cli.status import to_text
from nri_gpu.daemon.snapshot import SNAPSHOT_FILE
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.simulation.scenario import LOST
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure
from tests.support.nvml.build import LIB_DIR
from tests.support.waiting import wait_for

DRIVER = "580.95.05"
GPUS = [FakeGpu(minor=n, uuid=f"GPU-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(2)]
# The kernel module's version is the one thing that no option says: /sys is the machine's.
PROGRAM = """
import sys
from pathlib import Path
from nri_gpu.system.kernel_modules import module_version
module_version.__defaults__ = (Path(sys.argv.pop(1)), Path("/nonexistent"))
from nri_gpu.cli.main import main
sys.exit(main())
"""


class OnDriver(NriGpu):
    """On a made-up driver whose module is loaded."""

    def program(self) -> list[str]:
        sysfs = self.launch.base / "sys"
        (sysfs / "module/nvidia").mkdir(parents=True)
        (sysfs / "module/nvidia/version").write_text(DRIVER)
        return [sys.executable, "-c", PROGRAM, str(sysfs), "run", *self.launch.arguments()]


def status(daemon: NriGpu) -> Mapping[str, Any]:
    return ask(daemon.launch.state / CONTROL_SOCKET, "status")


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
        assert "5 changes since 20" in to_text(said, 0.0)
        launch.topology.write_text("schema = 1\n[node]\ndriver = 5\n")
        assert "node.driver: must be text" in daemon.wait_logged("inventory not refreshed")
        assert unavailable(daemon) == [""] * 4
        wait_for("the fault's time", lambda: bool(status(daemon)["node"]["inventory_fault_since_s"]), 10)
        assert daemon.terminate() == 0


def machine(base: Path) -> Path:
    """A driver root that NVML's library finds its notes in already: a new file would make it another folder."""
    root = build_fake_nvml(make_driver_root(base / "root", DRIVER), GPUS, driver=DRIVER)
    for name in ("calls", "environ", "status"):
        (root / LIB_DIR / f"fake-nvml.{name}").touch()
    return root


def test_a_restart_serves_the_last_snapshot_and_says_that_it_is_unconfirmed(launch: Launch) -> None:
    root = machine(launch.base.parent)
    with OnDriver(replace(launch, topology=None, driver_root=root)) as daemon:
        wait_for("a snapshot", (launch.state / SNAPSHOT_FILE).exists, 20)
        daemon.terminate()
        configure(root, GPUS, [Act("nvmlInitWithFlags", "hang")], driver=DRIVER)
        daemon.start()
        daemon.wait_logged("serving the last snapshot until the driver answers")
        wait_for("its control socket", lambda: answers(daemon), 10)
        said = status(daemon)
        assert (said["node"]["inventory_confirmed"], unavailable(daemon)) == (False, ["", ""])
        assert "from the last snapshot, " in to_text(said, 0.0)


def answers(daemon: NriGpu) -> bool:
    try:
        return bool(status(daemon))
    except OSError:
        return False
