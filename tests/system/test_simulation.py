"""A simulated node beside the real one: it joins no runtime and writes to no folder of the node's, unless told to."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nri_gpu.cli.ask_daemon import ask
from nri_gpu.cli.render import Times
from nri_gpu.cli.status_page import faults, to_mend
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.names import CONTROL_SOCKET
from tests.support.daemon import ENVIRONMENT, Launch, Simulation
from tests.support.errors import HarnessError
from tests.support.scripted_runtime import Listener
from tests.support.waiting import aside


def files(folder: Path) -> set[Path]:
    return {*folder.rglob("*")}


def nodes_own_policy(folder: Path) -> Path:
    """What the node's own daemon goes by, with all that it serves."""
    policy = folder / "policy.toml"
    for name in ("kubelet", "audit", "labels"):
        (folder / name).mkdir()
    policy.write_text(f"""
[plugin]
socket = "{folder}/nri.sock"
[driver]
stage_dir = "{folder}/drivers"
[kubelet]
enabled = true
dir = "{folder}/kubelet"
podresources = "{folder}/podresources.sock"
cdi_dir = "{folder}/cdi"
pool = "counted"
[dra]
enabled = true
dir = "{folder}/dra"
pool = "claims"
[labels]
file = "{folder}/labels/gpus"
[metrics]
listen = "{folder}/metrics.sock"
[audit]
dir = "{folder}/audit"
[mps]
enabled = true
[stray]
enabled = true
[[pool]]
name = "counted"
device = ["0", "1"]
[[pool]]
name = "claims"
device = ["2", "3"]
""")
    return policy


async def test_it_joins_no_runtime_and_leaves_the_node_alone(folder: Path) -> None:
    launch = Launch(folder / "d", folder / "nri.sock", default_policy=nodes_own_policy(folder))
    daemon = Simulation(launch, "--socket", "--stage-dir", "--state-dir")
    before = files(folder)
    async with Listener(launch.socket) as listener:
        with daemon:
            await aside(daemon.wait_ready)
            private = daemon.private
            assert private.stat().st_mode & 0o777 == 0o700
            status = await aside(ask, private / CONTROL_SOCKET, "status", DaemonStatus)
            assert (status.runtime.joined, status.node.simulated, len(status.gpus)) == (False, True, 4)
            assert (faults(status, Times(0.0)), to_mend(status), status.runtime.cri_fault) == ([], [], "")
            assert (status.kubelet.enabled, status.dra.enabled) == (False, False)
            assert daemon.terminate() == Exit.OK
        with pytest.raises(HarnessError):
            await listener.accept(0.2)
    assert "SIMULATED node, which joins no runtime" in daemon.log().splitlines()[0]
    assert not private.exists()
    made = {path for path in files(folder) - before if not path.is_relative_to(launch.base)}
    assert made == {launch.socket}


@pytest.mark.parametrize("says", ["--socket", "--policy"])
async def test_it_joins_the_runtime_that_an_option_names(folder: Path, says: str) -> None:
    """A policy says so if `--policy` names it, and it is not the default."""
    socket, policy = folder / "nri.sock", folder / "policy.toml"
    policy.write_text(f'[plugin]\nsocket = "{socket}"\n')
    launch = Launch(folder / "d", socket, policy=policy if says == "--policy" else None)
    async with Listener(socket) as listener:
        with Simulation(launch, *({"--socket"} - {says})) as daemon:
            runtime = await listener.accept(20)
            await runtime.register()
            await runtime.synchronize()
            await aside(daemon.wait_ready)
            status = await aside(ask, launch.state / CONTROL_SOCKET, "status", DaemonStatus)
            assert (status.runtime.joined, status.node.simulated) == (True, True)


def test_a_state_folder_that_is_named_stays(folder: Path) -> None:
    launch = Launch(folder / "d", folder / "nri.sock")
    with Simulation(launch, "--socket") as daemon:
        daemon.wait_ready()
        assert not ask(launch.state / CONTROL_SOCKET, "status", DaemonStatus).runtime.joined
        assert daemon.terminate() == Exit.OK
    assert (launch.state / "key").exists()
    assert not (launch.base / "drivers").exists()


@pytest.mark.parametrize("part", ["kubelet", "dra"])
def test_it_serves_nobody_who_is_the_nodes(folder: Path, part: str) -> None:
    command = [*Simulation(Launch(folder / "d", folder / "nri.sock"), "--socket").program(), f"--{part}"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == Exit.USAGE
    assert f"--{part} with --gpus needs --socket" in done.stderr
