"""Verbs show the node of the daemon that runs, by its policy and options, unless options say otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nri_gpu.daemon.answers import PolicyStatus
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.inventory.topology_file import load_topology
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.driver_root import make_driver_root
from tests.support.views import status_json, view
from tests.unit.cli.conftest import Done, NriGpuCall, daemon

POD = """
apiVersion: v1
kind: Pod
metadata: {name: train, namespace: ml, annotations: {gpu.nri.io: "1"}}
spec: {containers: [{name: main}]}
"""
MIG = TOPOLOGIES / "mig-a100.toml"
Beside = Callable[..., Done]


@pytest.fixture
def beside(tmp_path: Path, nri_gpu: NriGpuCall) -> Beside:
    """Calls a verb beside a daemon with these options, whose policy allows ml."""
    policy = tmp_path / "daemons.toml"
    policy.write_text('[namespaces]\nallow = ["ml"]\n')
    (tmp_path / "pod.yaml").write_text(POD)

    def call(options: dict[str, Any], *words: object) -> Done:
        node = make.node(simulated="topology" in options)
        said = status_json(view(node=node, options=options, policy=PolicyStatus(str(policy), "")))
        (tmp_path / CONTROL_SOCKET).unlink(missing_ok=True)
        with daemon(tmp_path, json.dumps(said).encode()):
            return nri_gpu(*words, "--state-dir", tmp_path)

    return call


def test_gpus_are_those_of_a_node_that_the_daemon_simulates(beside: Beside) -> None:
    done = beside({"topology": str(MIG)}, "gpus")
    assert (done.code, done.out.partition(" GPUs")[0]) == (Exit.OK, f"SIMULATED: {len(load_topology(MIG).gpus)}")
    done = beside({"topology": str(MIG)}, "gpus", "--gpus", FOUR_GPUS)
    assert done.out.startswith("SIMULATED: 4 GPUs")


def test_a_pod_gets_what_the_daemon_would_grant(beside: Beside, tmp_path: Path) -> None:
    pod = tmp_path / "pod.yaml"
    done = beside({"topology": str(FOUR_GPUS), "driver.root": str(tmp_path)}, "explain", pod)
    assert done.code == Exit.OK
    assert done.out.startswith("SIMULATED: ")
    assert "granted GPU 0" in done.out
    (tmp_path / "mine.toml").write_text('[namespaces]\nallow = ["prod"]\n')
    mine = ("--policy", tmp_path / "mine.toml")
    assert "REFUSED" in beside({"topology": str(FOUR_GPUS)}, "explain", pod, *mine).out


def test_the_driver_is_where_the_daemon_has_it(beside: Beside, tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "root", everything=True)
    for options in ({"driver.root": str(root)}, {"driver.root": "/none", "driver.host_root": str(root)}):
        done = beside(options, "driver")
        assert f"below {root}, " in done.out.splitlines()[0]
    assert "/none" in beside({"driver.root": str(root)}, "driver", "--driver-root", "/none").err
    done = beside({"driver.root": str(root), "topology": str(FOUR_GPUS)}, "driver")
    assert done.out.startswith("SIMULATED: driver ")


def test_check_says_for_which_node_a_policy_is_good(beside: Beside, tmp_path: Path) -> None:
    for options, simulated in (({}, False), ({"topology": str(FOUR_GPUS)}, True)):
        done = beside(options, "check", tmp_path / "daemons.toml")
        assert (done.code, done.out.startswith("SIMULATED: ")) == (Exit.OK, simulated)
