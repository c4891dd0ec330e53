"""The picture from the literature, on every containerd and both cgroup generations: who sees and opens what."""

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import UUIDS, NriGpu
from tests.support.image import ImageSpec
from tests.support.loading import LIBRARIES
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Opened, check_opens, nvidia_nodes, open_number, open_paths

pytestmark = pytest.mark.containerd

UVM_MAJOR = 1510  # of config/topologies/four-gpus.toml
CTL = (195, 255)
SHARED_NODES = {"/dev/nvidiactl": CTL, "/dev/nvidia-uvm": (UVM_MAJOR, 0), "/dev/nvidia-uvm-tools": (UVM_MAJOR, 1)}
ALL_IMAGE = ImageSpec("localhost/nri-gpu/cuda-like:1", env={"NVIDIA_VISIBLE_DEVICES": "all"})
WANTS = {"a": (0, 1), "b": (0, 2, 3), "c": (3,)}


@pytest.fixture(scope="module")
def module_node(module_cgroup_node: Containerd) -> Containerd:
    """Once on each cgroup generation."""
    return module_cgroup_node


def run(node: Containerd, name: str, annotations: dict[str, str]) -> ContainerId:
    node.import_image(ALL_IMAGE)
    pod = node.cri.run_pod(PodSpec(name=name, annotations=annotations))
    return node.cri.run(pod, ContainerSpec(image=ALL_IMAGE.name))


def ask(gpus: tuple[int, ...]) -> dict[str, str]:
    return {"gpu.nri.io/container.main": f"device={','.join(map(str, gpus))}; mode=shared"}


@pytest.mark.short
def test_three_containers_share_four_gpus(node: Containerd, shared_daemon: NriGpu) -> None:
    containers = {name: run(node, name, ask(gpus)) for name, gpus in WANTS.items()}

    for name, gpus in WANTS.items():
        container = containers[name]
        expected = SHARED_NODES | {f"/dev/nvidia{n}": (195, n) for n in gpus}
        assert nvidia_nodes(node.cri, container) == expected
        assert set(open_paths(node.cri, container, expected).values()) == {Opened.NO_DRIVER}
        check_opens(node, container, set(expected.values()), {(195, minor) for minor in (*range(5), 254)})
        status = node.cri.status(container)
        assert status.env["NVIDIA_VISIBLE_DEVICES"] == ",".join(UUIDS[n] for n in gpus)
        assert not status.oci.get("hooks")
        _has_driver(node, container)
    shared_daemon.wait_held({f"{name}/main": [UUIDS[n] for n in gpus] for name, gpus in WANTS.items()})


@on_newest
def test_who_asked_for_nothing_gets_nothing(node: Containerd, shared_daemon: NriGpu) -> None:
    """Although its image says NVIDIA_VISIBLE_DEVICES=all, as every CUDA image does."""
    container = run(node, "bystander", {})

    status = node.cri.status(container)
    assert status.env["NVIDIA_VISIBLE_DEVICES"] == "all"  # untouched, and without effect
    assert status.device_paths == []
    assert not status.oci.get("hooks")
    assert nvidia_nodes(node.cri, container) == {}
    assert LIBRARIES not in {mount["destination"] for mount in status.oci["mounts"]}
    assert open_number(node.cri, container, 195, 2) is Opened.DENIED
    shared_daemon.wait_held({})


def _has_driver(node: Containerd, container: ContainerId) -> None:
    listed = node.cri.execute(container, "/bin/ls", "-l", LIBRARIES).stdout
    assert "libcuda.so.1 -> libcuda.so.580.95.05" in listed
    smi = node.cri.execute(container, "/bin/sh", "-c", "nvidia-smi")
    assert (smi.code, "580.95.05" in smi.stdout) == (0, True)
    written = node.cri.execute(container, "/bin/sh", "-c", f"echo x > {LIBRARIES}/libcuda.so.1")
    assert written.code != 0, "the driver's files must be read-only"
