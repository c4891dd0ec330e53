"""`nri-gpu status` tells of a running daemon what the runtime and the ledger know."""

from tests.support.containerd import Containerd
from tests.support.daemon import NriGpu
from tests.support.marks import on_newest
from tests.support.waiting import wait_for

pytestmark = on_newest


def test_status_names_the_holder(node: Containerd, daemon: NriGpu) -> None:
    container = node.cri.run_asking("device=1", "trainer")
    said = daemon.status()
    assert said["runtime"]["ready"]
    assert said["runtime"]["name"] == "containerd"
    assert said["runtime"]["synchronize"]["whole"]
    assert said["runtime"]["since_s"] - 60 < said["runtime"]["answered_s"]
    held = {gpu["place"]: [each["container_id"] for each in gpu["holders"]] for gpu in said["gpus"]}
    assert held == {"0": [], "1": [container], "2": [], "3": []}
    table = daemon.verb("status")
    assert (table.returncode, "default/trainer" in table.stdout) == (0, True)
    node.cri.stop(container)
    assert not any(gpu["holders"] for gpu in daemon.status()["gpus"])


def test_status_names_the_last_refusals(node: Containerd, daemon: NriGpu) -> None:
    node.cri.refused("count=9", "greedy")
    wait_for("the refusal", lambda: bool(daemon.status()["refusals"]), 10)
    refusal = daemon.status()["refusals"][-1]
    assert (refusal["pod"], refusal["container"], refusal["code"]) == ("greedy", "main", "no-such-gpu")
    words = f"default/greedy, container main: container refused [no-such-gpu]: {refusal['reason']}"
    assert words in daemon.verb("status").stdout


def test_a_daemon_that_lost_its_runtime_is_a_finding(fresh_node: Containerd, fresh_daemon: NriGpu) -> None:
    fresh_node.kill()
    fresh_daemon.wait_logged("connection ended")
    said = fresh_daemon.verb("status")
    assert (said.returncode, "not connected to the runtime" in said.stdout) == (1, True)
