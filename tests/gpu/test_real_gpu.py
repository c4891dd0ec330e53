"""On a machine with an NVIDIA GPU: a container with an annotation computes on what it was granted, and only on that.

`make test-gpu`. The driver root is found by itself (`/usr/local/nvidia` where it holds the driver, else `/`), or named
by NRI_GPU_DRIVER_ROOT. A machine without a registry needs the containerd cache brought along: NRI_GPU_CACHE.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.compare import FIELDS, ask_smi, compare, differences, shown
from tests.gpu.conftest import driver_root, program_image, serving
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import Launch, NriGpu
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not Path("/proc/driver/nvidia/version").exists(), reason="no NVIDIA driver is loaded on this machine"
    ),
]
IMAGE = "localhost/nri-gpu/vector_add:1"


@pytest.fixture(scope="module")
def gpu_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with Containerd(packages.find_any()) as node:
        node.import_image(program_image("vector_add", tmp_path_factory.mktemp("program")))
        yield node


@pytest.fixture
def real(gpu_node: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    with serving(Launch(tmp_path / "d", gpu_node.nri_socket, topology=None, driver_root=driver_root())) as daemon:
        yield daemon
    gpu_node.cri.remove_all()


def run(node: Containerd, annotations: dict[str, str]) -> ContainerId:
    pod = node.cri.run_pod(PodSpec(annotations=annotations))
    return node.cri.run(pod, ContainerSpec(image=IMAGE))


def test_nvidia_smi_sees_what_was_granted(gpu_node: Containerd, real: NriGpu) -> None:
    container = run(gpu_node, {"gpu.nri.io": "1"})
    said = gpu_node.cri.execute(container, "/usr/bin/nvidia-smi", "-L", timeout_s=60)
    print(said.stdout)
    real.wait_grants(1)
    (granted,) = next(iter(real.held().values()))
    assert said.code == 0, said.stderr
    assert [line for line in said.stdout.splitlines() if line.startswith("GPU ")] == [
        line for line in said.stdout.splitlines() if granted in line
    ]


def test_a_cuda_program_computes(gpu_node: Containerd, real: NriGpu) -> None:
    container = run(gpu_node, {"gpu.nri.io": "1"})
    said = gpu_node.cri.execute(container, "/bin/vector_add", timeout_s=120)
    print(said.stdout)
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout.startswith("GPUs 1\nvector add ok on ")
    real.wait_grants(1)


def test_nothing_is_seen_without_the_annotation(gpu_node: Containerd, real: NriGpu) -> None:
    """Although the image says NVIDIA_VISIBLE_DEVICES=all."""
    container = run(gpu_node, {})
    said = gpu_node.cri.execute(container, "/bin/vector_add", timeout_s=60)
    assert said.code == 2
    assert "libcuda.so.1" in said.stderr
    assert real.held() == {}


def test_gpus_agrees_with_nvidia_smi(real: NriGpu) -> None:
    """In every field that both tell of. `python -m tests.gpu.compare` is the same by hand."""
    rows = compare(real.gpus(), ask_smi(driver_root()))
    print(shown(rows))
    assert len(rows) > len(FIELDS)
    assert differences(rows) == []
