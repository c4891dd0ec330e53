"""Another component gives a container a GPU that a pod has exclusively, on real containerds: told of, or kept out.

The component is played by what reaches the runtime: device specs as a kubelet passes them on, or a CDI device.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import pytest
from msgspec.structs import replace

from tests.conformance.conftest import injected, launch_on
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import UUIDS, NriGpu, staged
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import nvidia_nodes
from tests.support.prometheus import free_port
from tests.support.waiting import wait_for

PHRASE: Final = "container opens GPUs that another pod has exclusively"
KIND: Final = "nvidia.com/gpu"
EVERY: Final = (0, 1, 2, 3)
METRICS: Final = ("nri_gpu_external_conflicts", "nri_gpu_overlapping_grants")


@pytest.fixture
def nodes(node: Containerd, tmp_path: Path) -> Iterator[Mapping[int, str]]:
    """The node of each GPU on the host, which the CDI devices `0` to `3` and `all` have, too."""
    made: dict[int, str] = {}
    for minor in EVERY:
        file = tmp_path / f"nvidia{minor}"
        os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(195, minor))
        file.chmod(0o666)
        made[minor] = str(file)
    each = {
        str(minor): [{"path": f"/dev/nvidia{minor}", "hostPath": path, "type": "c", "major": 195, "minor": minor}]
        for minor, path in made.items()
    }
    every = {**each, "all": [one for nodes in each.values() for one in nodes]}
    devices = [{"name": name, "containerEdits": {"deviceNodes": nodes}} for name, nodes in every.items()]
    file = node.layout.cdi / "nvidia.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"cdiVersion": "0.6.0", "kind": KIND, "devices": devices}))
    yield made
    file.unlink()


def theirs(node: Containerd, nodes: Mapping[int, str], by: str, *minors: int, name: str = "theirs") -> ContainerId:
    """A container with these GPUs of another component."""
    spec = ContainerSpec(devices={f"/dev/nvidia{minor}": nodes[minor] for minor in minors})
    if by == "CDI":
        names = ("all",) if minors == EVERY else map(str, minors)
        spec = ContainerSpec(cdi_devices=tuple(f"{KIND}={each}" for each in names))
    return node.cri.run(node.cri.run_pod(PodSpec(name=name)), spec)


def conflicts(daemon: NriGpu) -> list[Any]:
    found: list[Any] = daemon.status()["conflicts"]
    return found


def metrics(daemon: NriGpu) -> list[float]:
    with urlopen(f"http://{daemon.launch.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return [float(line.split()[1]) for name in METRICS for line in text.splitlines() if line.startswith(f"{name} ")]


@pytest.mark.short
@pytest.mark.parametrize("by", ["CDI", "device specs"])
def test_it_runs_and_is_told_until_it_is_gone(
    node: Containerd, tmp_path: Path, nodes: Mapping[int, str], by: str
) -> None:
    with staged(replace(launch_on(node, tmp_path), metrics=f"127.0.0.1:{free_port()}")) as daemon:
        for index in (0, 1):
            node.cri.run_asking(f"device={index}", f"train-{index}")
        shared = node.cri.run_asking("device=2; mode=shared", "shared")
        assert (conflicts(daemon), metrics(daemon)) == ([], [0, 0])
        assert daemon.verb("status").returncode == 0

        container = theirs(node, nodes, by, *EVERY)
        daemon.wait_logged(PHRASE)
        assert {(195, minor) for minor in EVERY} <= {*nvidia_nodes(node.cri, container).values()}
        (found,) = conflicts(daemon)
        assert (found["container_id"], found["gpu_uuids"]) == (container, UUIDS[:2])
        assert found["holders"] == ["default/train-0", "default/train-1"]
        assert [each["granted"] for each in daemon.status()["overlaps"]] == [False, False]
        assert metrics(daemon) == [1, 2]
        shown = daemon.verb("status")
        assert shown.returncode == 1
        assert shown.stdout.count("in conflict") == 2
        assert "list this container's pod in foreign.monitors if it only watches" in shown.stdout
        examined = " ".join(daemon.verb("doctor").stdout.split())
        assert "default/theirs (not through nri-gpu), container main, has 2 GPUs, held exclusively by" in examined
        assert "delete all of these pods" not in examined + shown.stdout

        daemon.restart()
        wait_for("the conflict of before", lambda: len(conflicts(daemon)) == 1, 10)
        node.cri.stop(shared)
        assert daemon.log().count(PHRASE) <= 2

        node.cri.stop(container)
        wait_for("no conflict", lambda: not conflicts(daemon), 10)
        assert (daemon.status()["overlaps"], metrics(daemon)) == ([], [0, 0])


@pytest.mark.short
@pytest.mark.usefixtures("later_injector")
@pytest.mark.parametrize("conflict", ["report", "refuse"])
def test_what_an_nri_plugin_adds_after_us_is_known_at_the_start(
    node: Containerd, tmp_path: Path, conflict: str
) -> None:
    added = injected({"linux": {"devices": [{"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}]}})
    with staged(launch_on(node, tmp_path).with_policy(f'[foreign]\nconflict = "{conflict}"\n')) as daemon:
        node.cri.run_asking("device=1", "train")
        container = node.cri.create(node.cri.run_pod(PodSpec("theirs", annotations=added)))
        if conflict == "report":
            node.cri.start(container)
            daemon.wait_logged(PHRASE)
            assert [each["container_id"] for each in conflicts(daemon)] == [container]
            return
        with pytest.raises(CriError, match=r"\[gpu-busy\].*held exclusively by default/train"):
            node.cri.start(container)
        assert conflicts(daemon) == []
