"""`nri-gpu status` tells of a running daemon what the runtime and the ledger know."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.containerd import Containerd
from tests.support.daemon import ENVIRONMENT, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec

pytestmark = on_newest


def asked(daemon: NriGpu, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "nri_gpu", "status", "--state-dir", str(daemon.launch.state), *options]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_status_names_the_holder(node: Containerd, daemon: NriGpu) -> None:
    pod = node.cri.asking("device=1", "trainer")
    container = node.cri.run(pod, ContainerSpec(command=("/bin/sleep", "600")))
    code, text = asked(daemon, "-o", "json")
    said: dict[str, Any] = json.loads(text)
    assert code == 0
    assert said["runtime"]["ready"]
    assert said["runtime"]["name"] == "containerd"
    held = {gpu["place"]: [each["container_id"] for each in gpu["holders"]] for gpu in said["gpus"]}
    assert held == {"0": [], "1": [container], "2": [], "3": []}
    assert "default/trainer" in asked(daemon)[1]
    node.cri.stop(container)
    assert not any(gpu["holders"] for gpu in json.loads(asked(daemon, "-o", "json")[1])["gpus"])


def test_a_daemon_that_lost_its_runtime_is_a_finding(fresh_node: Containerd, tmp_path: Path) -> None:
    launch = Launch(tmp_path / "d", fresh_node.nri_socket, driver_root=make_driver_root(tmp_path / "driver"))
    with NriGpu(launch) as daemon:
        daemon.wait_ready()
        fresh_node.kill()
        daemon.wait_logged("connection ended")
        code, text = asked(daemon)
    assert code == 1
    assert "not connected to the runtime" in text
