"""`nri-gpu verify` against real containers: its answer is held against opening every NVIDIA number from inside."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conformance.conftest import launch_on
from tests.support import cdi, packages
from tests.support.cgroup import Cgroup, device_programs
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import UUIDS, NriGpu, staged
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Number, Opened, open_numbers
from tests.support.schemas import conforming

pytestmark = pytest.mark.containerd

CTL, MODESET, UVM, UVM_TOOLS = (195, 255), (195, 254), (1510, 0), (1510, 1)  # of config/topologies/four-gpus.toml
EVERY: Final = [*((195, minor) for minor in range(32)), CTL, MODESET, UVM, UVM_TOOLS]


@pytest.fixture
def serving(cgroup_node: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    with staged(launch_on(cgroup_node, tmp_path)) as daemon:
        yield daemon


def verified(node: Containerd, daemon: NriGpu, *options: str) -> subprocess.CompletedProcess[str]:
    return daemon.verb("verify", "--containerd-state", str(node.base / "state"), *options)


def reported(node: Containerd, daemon: NriGpu, code: int, numbers: Sequence[Number] = EVERY) -> dict[ContainerId, Any]:
    """What it says of each container, whose NVIDIA numbers are opened from inside at once."""
    done = verified(node, daemon, "-o", "json")
    assert done.returncode == code, done
    found = {ContainerId(each["id"]): each for each in conforming(json.loads(done.stdout))["containers"]}
    for container, each in found.items():
        said = {(number["major"], number["minor"]) for number in each["opens"]}
        opened = open_numbers(node.cri, container, numbers)
        assert {number for number, answer in opened.items() if answer is not Opened.DENIED} == said & {*numbers}, each
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
    command = [*packages.command("bpftool"), "cgroup", verb, str(cgroup), "device", "id", str(program), *flags]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.short
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


@on_newest
def test_rules_that_were_taken_away(cgroup_node: Containerd, serving: NriGpu) -> None:
    """As systemd's daemon-reload does; on v2 by a program of an ancestor, which has to agree too."""
    granted = cgroup_node.cri.run_asking("device=1", "train")
    bystander = cgroup_node.cri.run(cgroup_node.cri.run_pod(PodSpec(name="web")), ContainerSpec())
    cgroup = cgroup_node.container_cgroup(granted)
    if cgroup_node.cgroup is Cgroup.V1:
        (cgroup / "devices.deny").write_text("c 195:1 rw")
        found = reported(cgroup_node, serving, 1)
    else:
        [narrow] = device_programs(cgroup_node.container_cgroup(bystander))
        bpftool(cgroup.parent, "attach", narrow, "multi")
        try:
            found = reported(cgroup_node, serving, 1)
        finally:
            bpftool(cgroup.parent, "detach", narrow)
    assert found[granted]["verdict"] == "differs"
    said = next(each for each in found[granted]["differences"] if "/dev/nvidia1" in each)
    assert said.startswith(f"cannot open /dev/nvidia1 (195:1, GPU 1, {UUIDS[1]}) any more")
    assert found[bystander]["verdict"] == "no GPU"


@on_newest
def test_an_external_allocation_and_a_mount_that_is_gone(
    cgroup_node: Containerd, serving: NriGpu, tmp_path: Path
) -> None:
    granted = cgroup_node.cri.run_asking("device=1", "train")
    with cdi.specification(cgroup_node.layout.cdi, make_driver_root(tmp_path / "cdi"), tmp_path / "stage"):
        by_cdi = cgroup_node.cri.run(
            cgroup_node.cri.run_pod(PodSpec(name="by-cdi")), ContainerSpec(cdi_devices=["nvidia.com/gpu=0"])
        )
    pid = str(cgroup_node.cri.status(granted).pid)
    folder = next(each for each in cgroup_node.cri.status(granted).oci["mounts"] if each["source"].endswith("lib64"))
    subprocess.run(["nsenter", "-t", pid, "-m", "umount", "-l", folder["destination"]], check=True)

    found = reported(cgroup_node, serving, 1)
    assert [found[each]["verdict"] for each in (granted, by_cdi)] == ["ok", "differs"]  # mounted at a second place
    assert "an external allocation" in found[by_cdi]["differences"][0]
    for each in cgroup_node.cri.status(granted).oci["mounts"]:
        if str(serving.launch.base) in each["source"] and each != folder:
            subprocess.run(["nsenter", "-t", pid, "-m", "umount", "-l", each["destination"]], check=True)
    [said] = reported(cgroup_node, serving, 1)[granted]["differences"]
    assert said.endswith("the kernel does not show it: it was unmounted")
