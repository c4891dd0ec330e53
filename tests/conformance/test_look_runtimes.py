"""The observer's look at real runtimes: containers by CDI and a privileged one, each named as its runtime has it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest

from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.node import Majors
from nri_gpu.observe.looker import look_at_node
from nri_gpu.observe.looks import DeviceRequest, Line, SeenContainer, Unseen
from nri_gpu.observe.runtime_table import CONTAINERD, DOCKER, PODMAN
from tests.conformance.conftest import launch_on
from tests.support import cdi, packages
from tests.support.builders import inventory
from tests.support.cgroup import Cgroup
from tests.support.containerd import Containerd
from tests.support.daemon import staged
from tests.support.docker import Docker
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.podman import Podman
from tests.support.pods import ContainerSpec, PodSpec
from tests.system.test_process_scan import AS_DROP_IN

pytestmark = pytest.mark.containerd

NODE: Final = inventory(majors=Majors(nvidia=195, nvidia_uvm=1510))  # of config/topologies/four-gpus.toml
SHARED: Final = {(195, 255), (1510, 0), (1510, 1)}


def seen(root: Path = Path("/"), state: Path | None = None) -> Mapping[str, SeenContainer]:
    """What a look finds of containers, by their ids."""
    look = asyncio.run(look_at_node(NODE, processes=False, root=root, states=[str(state)] if state else []))
    assert not look.unseen
    return {each.id: each for each in look.containers}


def check_gpu(found: SeenContainer, minor: int) -> None:
    """It has this GPU by its spec and by the kernel's word, and no other."""
    numbers: set[DeviceNumber] = SHARED | {(195, minor)}
    assert {*found.nodes} == numbers
    assert {*(found.opens or ())} == {*found.allowed} == numbers
    assert (found.privileged, found.fault) == (False, "")


def check_privileged(found: SeenContainer) -> None:
    assert found.privileged
    assert {(195, 0), (195, 31), (195, 255)} <= {*(found.opens or ())} & {*found.allowed}


@pytest.mark.short
def test_containerd(runtime: packages.Runtime, cgroup: Cgroup, folder: Path) -> None:
    with Containerd(runtime, cgroup=cgroup) as node, staged(launch_on(node, folder)):
        plain = node.cri.run(node.cri.run_pod(PodSpec(name="web")), ContainerSpec())
        ids = [node.cri.run_asking(f"device={index}", f"train-{index}") for index in range(3)]
        agent = node.cri.run(node.cri.run_pod(PodSpec(name="agent", privileged=True)), ContainerSpec(privileged=True))
        found = seen(state=node.base / "state")
    assert plain not in found
    for index, id_ in enumerate(ids):
        assert (found[id_].runtime, found[id_].namespace, found[id_].pod) == (CONTAINERD, "default", f"train-{index}")
        check_gpu(found[id_], index)
    assert found[agent].pod == "agent"
    check_privileged(found[agent])


@on_newest
def test_the_rights_of_a_pod_that_is_not_privileged(runtime: packages.Runtime, cgroup: Cgroup, folder: Path) -> None:
    """Cgroup v1's list is read. Of v2 bpf(2) is refused: the spec's own rules are left, and that is said once."""
    with Containerd(runtime, cgroup=cgroup) as node, staged(launch_on(node, folder)):
        ids = [node.cri.run_asking(f"device={index}", f"train-{index}") for index in range(2)]
        wish = {"owner": 0, "majors": [195], "numbers": [(195, 0), (195, 1)], "states": [str(node.base / "state")]}
        command = [*AS_DROP_IN, sys.executable, "-I", "-m", "nri_gpu.observe.look"]
        done = subprocess.run(command, input=msgspec.json.encode(wish), stdout=subprocess.PIPE, check=True)
    lines = [msgspec.json.decode(line, type=Line) for line in done.stdout.splitlines()]
    found: Mapping[str, SeenContainer] = {each.id: each for each in lines if isinstance(each, SeenContainer)}
    unseen = [each for each in lines if isinstance(each, Unseen)]
    assert [found[id_].allowed for id_ in ids] == [((195, 0),), ((195, 1),)]
    if cgroup is Cgroup.V1:
        assert [found[id_].opens for id_ in ids] == [((195, 0),), ((195, 1),)]
        assert not unseen
    else:
        assert all(found[id_].opens is None for id_ in ids)
        assert all("cannot be read: Operation not permitted" in found[id_].fault for id_ in ids)
        [rules] = unseen
        assert rules.what == "rules"
        assert "observe.nvml=true" in rules.sentence


def test_docker(tmp_path: Path) -> None:
    """Its engine names them, and says by which devices they were asked for."""
    driver, root = make_driver_root(tmp_path / "driver"), tmp_path / "host"
    with Docker() as docker, cdi.specification(docker.cdi, driver, tmp_path / "stage"):
        docker.load()
        for usual, own in (("run/docker", docker.base / "exec"), ("var/lib/docker", docker.layout.root)):
            (root / usual).parent.mkdir(parents=True)
            (root / usual).symlink_to(f"/proc/{docker.supervisor_pid}/root{own}")  # it has mounts of its own
        devices = [f"nvidia.com/gpu={index}" for index in range(3)]
        ids = [docker.run("--name", f"job{at}", "--device", each) for at, each in enumerate(devices)]
        agent, plain = docker.run("--privileged"), docker.run()
        found = seen(root)
        name = docker.inspect(agent)["Name"]
    assert plain not in found
    for index, id_ in enumerate(ids):
        assert (found[id_].runtime, found[id_].name, found[id_].pod) == (DOCKER, f"job{index}", "")
        assert found[id_].requests == (DeviceRequest(driver="cdi", ids=(devices[index],)),)
        assert found[id_].driver_versions == ("580.95.05",)
        check_gpu(found[id_], index)
    assert f"/{found[agent].name}" == name
    check_privileged(found[agent])


@pytest.mark.parametrize(
    ("program", "suite"), [("runc", ""), ("crun", "trixie")], ids=["4.3 with runc", "5.4 with crun"]
)
def test_podman(tmp_path: Path, program: str, suite: str) -> None:
    """It tells a spec no name of a container, so its short id stands for it. What has ended is not shown."""
    if os.geteuid():
        pytest.fail("Podman as root is tried, which needs root: run this with sudo, or deselect containerd")
    driver = make_driver_root(tmp_path / "driver")
    with Podman(program, suite) as podman, cdi.specification(podman.cdi, driver, tmp_path / "stage"):
        podman.load()
        ids = [podman.run("--device", f"nvidia.com/gpu={index}") for index in range(3)]
        agent, plain, ended = podman.run("--privileged"), podman.run(), podman.run("--device", "nvidia.com/gpu=3")
        podman("stop", "--time", "0", ended)
        found = seen(podman.base)
        pids = {id_: podman.inspect(id_)["State"]["Pid"] for id_ in ids}
    assert {*found} == {*ids, agent}
    assert plain not in found
    for index, id_ in enumerate(ids):
        assert (found[id_].runtime, found[id_].name, found[id_].pid) == (PODMAN, id_[:12], pids[id_])
        check_gpu(found[id_], index)
    check_privileged(found[agent])
    assert not podman.base.exists()
