"""What a daemon recorded while it served a real containerd is decided again to the byte."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.daemon import ENVIRONMENT, NriGpu
from tests.support.marks import on_newest
from tests.support.pods import PodSpec
from tests.support.schemas import conforming
from tests.support.waiting import wait_for

pytestmark = on_newest


def replayed(daemon: NriGpu, *options: str) -> tuple[int, Any]:
    command = [sys.executable, "-m", "nri_gpu", "replay", str(daemon.launch.state / "audit.jsonl"), "-o", "json"]
    done = subprocess.run([*command, *options], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, conforming(json.loads(done.stdout))


def decisions(daemon: NriGpu) -> int:
    log = daemon.launch.state / "audit.jsonl"
    return log.read_text().count('"kind":"decision"') if log.exists() else 0


def ask(node: Containerd, name: str, claim: str, *command: str) -> None:
    """A pod with a container that asks; it may be refused."""
    try:
        node.cri.run_asking(claim, name, command=command)
    except CriError as error:
        assert "nri-gpu [" in str(error)


def test_it_replays_to_the_byte_over_a_kill(node: Containerd, daemon: NriGpu, tmp_path: Path) -> None:
    for name, claim in {"a": "device=0", "b": "device=0", "c": "2; mode=shared", "d": "nonsense", "e": "none"}.items():
        ask(node, name, claim)
    ask(node, "f", "1", "/bin/true")
    wait_for("six records", lambda: decisions(daemon) == 6, 10)
    daemon.restart(kill=True)
    daemon.wait_logged("driver files staged")
    ask(node, "g", "device=0; mode=shared")
    ask(node, "h", "all")
    assert daemon.terminate() == 0
    assert replayed(daemon) == (
        0,
        {"schema": "nri-gpu/replay/v1", "decisions": 8, "unreadable_lines": 0, "different": []},
    )
    policy = tmp_path / "policy.toml"
    policy.write_text('[namespaces]\nallow = []\n[[rule]]\npod = "c"\nallow = true\n')
    code, said = replayed(daemon, "--policy", str(policy))
    assert code == 1
    now = {each["pod"]: each["now"]["decision"] for each in said["different"]}
    assert (now["a"], now["b"], now["c"]) == ("refuse", "refuse", "inject")


def test_a_pod_with_large_annotations_pushes_nothing_out(node: Containerd, daemon: NriGpu) -> None:
    """It is refused as often as a kubelet would create it; of the first grant the log still tells."""
    ask(node, "a", "device=0")
    large = {f"gpu.nri.io/container.c{number}": "x" * 225 for number in range(950)}
    pod = node.cri.run_pod(PodSpec("hoard", annotations={**large, "gpu.nri.io": "nonsense"}))
    for _ in range(40):
        with pytest.raises(CriError, match=r"nri-gpu \[bad-request\]"):
            node.cri.create(pod)
    log = daemon.launch.state / "audit.jsonl"
    wait_for("40 records", lambda: log.read_text().count('"kind":"cut"') == 40, 10)
    assert daemon.terminate() == 0
    assert not log.with_name("audit.1.jsonl").exists()
    code, said = replayed(daemon)
    assert (code, said["decisions"], said["different"]) == (0, 1, [])
    assert [each["pod"] for each in said["passed_over"]] == ["hoard"] * 40
