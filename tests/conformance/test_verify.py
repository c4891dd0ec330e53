"""`nri-gpu verify` against real containers: its answer is held against opening every NVIDIA number from inside."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conformance.conftest import launch_on
from tests.support import packages
from tests.support.cgroup import Cgroup, device_programs
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import UUIDS, NriGpu
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Opened, open_numbers

pytestmark = pytest.mark.containerd

CTL, MODESET, UVM, UVM_TOOLS = (195, 255), (195, 254), (1510, 0), (1510, 1)  # of config/topologies/four-gpus.toml
EVERY: Final = [*((195, minor) for minor in range(6)), CTL, MODESET, UVM, UVM_TOOLS]


@pytest.fixture
def serving(cgroup_node: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    with NriGpu(launch_on(cgroup_node, tmp_path)) as daemon:
        daemon.wait_staged()
        yield daemon


def verified(node: Containerd, daemon: NriGpu, *options: str) -> subprocess.CompletedProcess[str]:
    return daemon.verb("verify", "--containerd-state", str(node.base / "state"), *options)


def reported(node: Containerd, daemon: NriGpu, code: int) -> dict[ContainerId, Any]:
    """What it says of each container, whose NVIDIA numbers are opened from inside at once."""
    done = verified(node, daemon, "-o", "json")
    assert done.returncode == code, done
    found = {ContainerId(each["id"]): each for each in json.loads(done.stdout)["containers"]}
    for container, each in found.items():
        if each["container"] == "(sandbox)":
            continue
        said = {(number["major"], number["minor"]) for number in each["opens"]}
        opened = open_numbers(node.cri, container, EVERY)
        assert {number for number, answer in opened.items() if answer is not Opened.DENIED} == said & {*EVERY}, each
    return found


def widen(node: Containerd, container: ContainerId, like: ContainerId) -> None:
    """Let a container open what another may, behind its runtime's back."""
    cgroup = node.container_cgroup(container)
    if node.cgroup is Cgroup.V1:
        (cgroup / "devices.allow").write_text("c 195:2 rw")
        return
    [own], [wide] = device_programs(cgroup), device_programs(node.container_cgroup(like))
    bpftool(cgroup, "attach", wide, "multi")
    bpftool(cgroup, "detach", own)  # beside it the second one would only narrow


def bpftool(cgroup: Path, verb: str, program: int, *flags: str) -> None:
    command = [str(packages.bpftool()), "cgroup", verb, str(cgroup), "device", "id", str(program), *flags]
    subprocess.run(command, check=True, capture_output=True)


def test_each_container_has_what_it_was_granted(cgroup_node: Containerd, serving: NriGpu) -> None:
    one = cgroup_node.cri.run_asking("device=1", "train")
    two = cgroup_node.cri.run_asking("device=0,2; mode=shared", "serve")
    none = cgroup_node.cri.run_asking("none", "idle")
    bystander = cgroup_node.cri.run(cgroup_node.cri.run_pod(PodSpec(name="web")), ContainerSpec())

    found = reported(cgroup_node, serving, 0)
    assert {id_: found[id_]["verdict"] for id_ in (one, two, none, bystander)} == {
        **{one: "ok", two: "ok"},
        **{none: "no GPU", bystander: "no GPU"},
    }
    assert (found[one]["mode"], found[one]["gpu_uuids"]) == ("exclusive", [UUIDS[1]])
    shown = verified(cgroup_node, serving)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["default/serve", "main", "0,2", "shared", "ok"] in lines


@on_newest
def test_widened_rules_and_a_privileged_pod_are_named(cgroup_node: Containerd, serving: NriGpu) -> None:
    granted = cgroup_node.cri.run_asking("device=1", "train")
    bystander = cgroup_node.cri.run(cgroup_node.cri.run_pod(PodSpec(name="web")), ContainerSpec())
    pod = cgroup_node.cri.run_pod(PodSpec(name="agent", privileged=True))
    agent = cgroup_node.cri.run(pod, ContainerSpec(privileged=True))
    found = reported(cgroup_node, serving, 0)
    assert (found[agent]["verdict"], found[agent]["privileged"]) == ("privileged", True)

    for container in (granted, bystander):
        widen(cgroup_node, container, agent)
    found = reported(cgroup_node, serving, 1)
    for container in (granted, bystander):
        assert found[container]["verdict"] == "differs"
        [said] = found[container]["differences"]
        assert f"/dev/nvidia2 (195:2, GPU 2, {UUIDS[2]})" in said
        assert "its device rules were widened after it was created" in said
    assert found[agent]["verdict"] == "privileged"
