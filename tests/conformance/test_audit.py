"""What a daemon recorded while it served a real containerd is decided again to the byte."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.daemon import ENVIRONMENT, NriGpu
from tests.support.marks import on_newest
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
