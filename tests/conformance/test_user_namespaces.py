"""Pods in user namespaces: mounts are mapped, and nodes are those of the host, so they have to be there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support import packages, user_namespaces
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import Launch
from tests.support.driver_root import STUBS, compile_stub, make_driver_root
from tests.support.glibc import glibc_files
from tests.support.image import ImageSpec
from tests.support.loading import LIBRARIES
from tests.support.pods import IDS, ContainerSpec, PodSpec
from tests.support.probe import Opened, device_nodes, open_paths

pytestmark = [
    pytest.mark.containerd,
    pytest.mark.skipif(
        not int(Path("/proc/sys/user/max_user_namespaces").read_text()), reason="this kernel allows no user namespaces"
    ),
]

V: Final = "580.95.05"
NODES: Final = {"nvidia1": (195, 1), "nvidiactl": (195, 255), "nvidia-uvm": (1510, 0), "nvidia-uvm-tools": (1510, 1)}


@pytest.fixture
def node(runtime: packages.Runtime, tmp_path: Path) -> Iterator[Containerd]:
    """A containerd with a pod network and a runc that maps ids."""
    made = Containerd(runtime, runc=packages.runc_for_user_namespaces(tmp_path))
    user_namespaces.prepare(made)
    with made as running:
        yield running


@pytest.fixture
def launch(node: Containerd) -> Launch:
    driver = make_driver_root(node.base / "driver", V, compiled=True)
    return Launch(node.base / "d", node.nri_socket, driver_root=driver)


def run(node: Containerd, request: str, image: str) -> ContainerId:
    annotations = {"gpu.nri.io": request} if request else {}
    pod = node.cri.run_pod(PodSpec(annotations=annotations, user_namespace=True))
    return node.cri.run(pod, ContainerSpec(image=image, user_namespace=True))


@pytest.mark.usefixtures("daemon")
def test_a_gpu_in_a_user_namespace(node: Containerd, tmp_path: Path) -> None:
    image = ImageSpec(extra=glibc_files({"/bin/probe": compile_stub(STUBS / "probe.c", tmp_path / "probe", V)}))
    node.import_image(image)

    # Nothing is asked for, so nothing is in the way.
    run(node, "", image.name)
    # A runtime binds nodes there instead of making them. Its words reach the pod's events.
    with pytest.raises(CriError, match=r"/dev/nvidia1.*no such file or directory"):
        run(node, "device=1; mode=shared", image.name)

    user_namespaces.make_nodes(node, NODES)
    container = run(node, "device=1; mode=shared", image.name)
    shown = node.cri.execute(container, "/bin/cat", "/proc/self/uid_map").stdout.split()
    assert shown == ["0", str(IDS.host_id), str(IDS.length)]
    seen = {each.path: (each.major, each.minor) for each in device_nodes(node.cri, container) if "nvidia" in each.path}
    assert seen == {f"/dev/{name}": number for name, number in NODES.items()}
    # By the device cgroup, that is yes.
    assert set(open_paths(node.cri, container, seen).values()) == {Opened.NO_DRIVER}
    assert (
        node.cri.execute(container, "/bin/probe", "libcuda.so.1").stdout
        == f"libcuda.so.1 -> {LIBRARIES}/libcuda.so.1\n"
    )
    smi = node.cri.execute(container, "/bin/sh", "-c", "nvidia-smi")
    assert smi.stdout.startswith(f"nvidia-smi: SIMULATION of driver {V}")
