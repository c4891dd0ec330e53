"""On a machine with an NVIDIA GPU: a container with an annotation computes on what it was granted, and only on that.

`make test-gpu`. The driver root is found by itself (`/usr/local/nvidia` where it holds the driver, else `/`), or named
by NRI_GPU_DRIVER_ROOT. A machine without a registry needs the containerd cache brought along: NRI_GPU_CACHE.
"""

import pytest

from tests.gpu.compare import FIELDS, Verdict, ask_smi, compare, differences, shown
from tests.gpu.conftest import IMAGE, ON_GPU, Record, driver_root
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import NriGpu
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = ON_GPU


def run(node: Containerd, annotations: dict[str, str]) -> ContainerId:
    pod = node.cri.run_pod(PodSpec(annotations=annotations))
    return node.cri.run(pod, ContainerSpec(image=IMAGE))


def test_nvidia_smi_sees_what_was_granted(gpu_node: Containerd, real: NriGpu, whole: int, record: Record) -> None:
    container = run(gpu_node, {"gpu.nri.io": f"device={whole}"})
    said = gpu_node.cri.execute(container, "/usr/bin/nvidia-smi", "-L", timeout_s=60)
    real.wait_grants(1)
    (granted,) = next(iter(real.held().values()))
    assert said.code == 0, said.stderr
    assert [line for line in said.stdout.splitlines() if line.startswith("GPU ")] == [
        line for line in said.stdout.splitlines() if granted in line
    ]
    record(said.stdout.partition(" (UUID")[0])


def test_a_cuda_program_computes(gpu_node: Containerd, real: NriGpu, whole: int, record: Record) -> None:
    container = run(gpu_node, {"gpu.nri.io": f"device={whole}"})
    said = gpu_node.cri.execute(container, "/bin/vector_add", timeout_s=120)
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout.startswith("GPUs 1\nvector add ok on ")
    real.wait_grants(1)
    record(said.stdout.splitlines()[-1])


def test_a_mig_device_is_all_that_its_container_sees(gpu_node: Containerd, real: NriGpu, record: Record) -> None:
    gpus = real.gpus()["gpus"]
    parts = [part for gpu in gpus for part in gpu["mig"] if not part["unavailable"]]
    if not parts:
        pytest.skip("MIG is on, without a MIG device" if any(gpu["mig_enabled"] for gpu in gpus) else "MIG is off")
    container = run(gpu_node, {"gpu.nri.io": f"mig={parts[0]['profile']}"})
    listed = gpu_node.cri.execute(container, "/usr/bin/nvidia-smi", "-L", timeout_s=60)
    real.wait_grants(1)
    [[granted]] = real.held().values()
    [seen] = [line.strip() for line in listed.stdout.splitlines() if "MIG-" in line]
    assert (listed.code, granted in seen) == (0, True), listed
    said = gpu_node.cri.execute(container, "/bin/vector_add", timeout_s=120)
    assert said.stdout.startswith("GPUs 1\nvector add ok on "), said
    record(f"{parts[0]['profile']}: {said.stdout.splitlines()[-1]}")


def test_nothing_is_seen_without_the_annotation(gpu_node: Containerd, real: NriGpu, record: Record) -> None:
    """Although the image says NVIDIA_VISIBLE_DEVICES=all."""
    container = run(gpu_node, {})
    said = gpu_node.cri.execute(container, "/bin/vector_add", timeout_s=60)
    assert said.code == 2
    assert "libcuda.so.1" in said.stderr
    assert real.held() == {}
    record(said.stderr.strip())


def test_gpus_agrees_with_nvidia_smi(real: NriGpu, record: Record) -> None:
    """In every field that both tell of. `python -m tests.gpu.compare` is the same by hand."""
    rows = compare(real.gpus(), ask_smi(driver_root()))
    print(shown(rows))
    assert len(rows) > len(FIELDS)
    assert differences(rows) == []
    record(f"{sum(row.verdict is Verdict.SAME for row in rows)} of {len(rows)} fields the same, none differs")
