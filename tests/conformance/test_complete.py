"""What a device plugin gave by device specs, completed in real containers: the same GPUs, and what using them takes.

The numbers are a simulated node's, so the device cgroup's answers are real and no driver's.
"""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import launch_on
from tests.support.cgroup import Cgroup, device_rules
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import UUIDS, NriGpu
from tests.support.loading import LIBRARIES
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Opened, device_nodes, open_numbers, open_paths

pytestmark = on_newest

CTL, UVM, UVM_TOOLS = (195, 255), (1510, 0), (1510, 1)
LIBRARY = f"{LIBRARIES}/libcuda.so.1"
Serve = Callable[[str], NriGpu]


@pytest.fixture
def serve(cgroup_node: Containerd, tmp_path: Path) -> Iterator[Serve]:
    """Starts the daemon with foreign.complete set to a word."""
    running: list[NriGpu] = []

    def start(complete: str) -> NriGpu:
        daemon = NriGpu(launch_on(cgroup_node, tmp_path).with_policy(f'[foreign]\ncomplete = "{complete}"\n'))
        running.append(daemon)
        daemon.start()
        daemon.wait_staged()
        return daemon

    yield start
    for daemon in running:
        daemon.__exit__()


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """What a kubelet passes on for a device plugin: path in the container -> node on the host."""

    def give(*indices: int, control: bool = False) -> dict[str, str]:
        numbers = {f"nvidia{index}": (195, index) for index in indices} | ({"nvidiactl": CTL} if control else {})
        for name, number in numbers.items():
            node = tmp_path / name
            if not node.exists():
                os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(*number))
                node.chmod(0o666)
        return {f"/dev/{name}": str(tmp_path / name) for name in numbers}

    return give


def run(
    node: Containerd, devices: dict[str, str], claim: str | None = None, name: str = "p", **env: str
) -> ContainerId:
    pod = node.cri.run_pod(PodSpec(name=name, annotations={"gpu.nri.io": claim} if claim else {}))
    return node.cri.run(pod, ContainerSpec(devices=devices, env=env))


def numbers(node: Containerd, container: ContainerId) -> set[tuple[int, int]]:
    return {(each.major, each.minor) for each in device_nodes(node.cri, container) if "nvidia" in each.path}


def has_driver(node: Containerd, container: ContainerId) -> bool:
    return node.cri.execute(container, "/bin/ls", LIBRARY).code == 0


@pytest.mark.parametrize(("complete", "claim"), [("asked", "2"), ("all", None)])
def test_it_has_the_same_gpus_and_all_it_takes(
    cgroup_node: Containerd,
    serve: Serve,
    plugin: Callable[..., dict[str, str]],
    complete: str,
    claim: str | None,
) -> None:
    node, daemon = cgroup_node, serve(complete)
    container = run(node, plugin(1, 3, control=True), claim, NVIDIA_VISIBLE_DEVICES="all")
    assert numbers(node, container) == {(195, 1), (195, 3), CTL, UVM, UVM_TOOLS}
    paths = [f"/dev/{path}" for path in ("nvidia1", "nvidia3", "nvidiactl", "nvidia-uvm")]
    assert set(open_paths(node.cri, container, paths).values()) == {Opened.NO_DRIVER}
    opened = open_numbers(node.cri, container, [(195, 0), (195, 2)])
    assert set(opened.values()) == {Opened.DENIED}
    if node.cgroup is Cgroup.V1:
        rules = {(rule.major, rule.minor) for rule in device_rules(node.container_cgroup(container))}
        assert {rule for rule in rules if rule[0] in (195, 1510)} == {(195, 1), (195, 3), CTL, UVM, UVM_TOOLS}
    status = node.cri.status(container)
    assert status.env["NVIDIA_VISIBLE_DEVICES"] == f"{UUIDS[1]},{UUIDS[3]}"
    assert has_driver(node, container)
    assert not status.oci.get("hooks")
    assert ";uuid=;" in status.oci["annotations"]["gpu.nri.io/grant"]

    with pytest.raises(CriError, match=r"\[gpu-busy\]: GPU 1"):
        run(node, {}, "device=1", "exclusive")
    daemon.restart(kill=True)
    daemon.wait_staged()
    with pytest.raises(CriError, match=r"\[gpu-busy\]: GPU 3"):
        run(node, {}, "device=3", "after-restart")
    run(node, {}, "device=0", "free")


def test_a_claim_for_more_is_refused_and_who_does_not_ask_is_let_alone(
    cgroup_node: Containerd, serve: Serve, plugin: Callable[..., dict[str, str]]
) -> None:
    serve("asked")
    with pytest.raises(CriError, match=r"\[held-by-others\].*already holds /dev/nvidia1.*can only shape GPUs"):
        run(cgroup_node, plugin(1), "device=0,1")
    container = run(cgroup_node, plugin(1))
    assert numbers(cgroup_node, container) == {(195, 1)}
    assert not has_driver(cgroup_node, container)


def test_without_the_policy_all_stays_as_it_was(
    cgroup_node: Containerd, serve: Serve, plugin: Callable[..., dict[str, str]]
) -> None:
    serve("none")
    with pytest.raises(CriError, match=r"\[held-by-others\].*two injectors never serve one container"):
        run(cgroup_node, plugin(1), "1")
    assert numbers(cgroup_node, run(cgroup_node, plugin(1))) == {(195, 1)}
