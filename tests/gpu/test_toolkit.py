"""On a machine with an NVIDIA GPU and NVIDIA's container toolkit: create + start beside CDI with NVIDIA's hooks.

`make test-gpu`, as test_real_gpu.py. Nothing is asserted of the times: they go into the report.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.contenders import specify
from bench.figures import paired
from tests.gpu.conftest import IMAGE, ON_GPU, Record, driver_root
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import Pod
from tests.support.daemon import NriGpu
from tests.support.image import ImageSpec
from tests.support.pods import ContainerSpec

pytestmark = ON_GPU
ROUNDS = 30


@pytest.fixture
def hooked_node(gpu_image: ImageSpec) -> Iterator[Containerd]:
    """A containerd without NRI, with a specification of `nvidia-ctk cdi generate`."""
    programs = [shutil.which(name) for name in ("nvidia-ctk", "nvidia-cdi-hook")]
    if None in programs:
        pytest.skip("nvidia-ctk and nvidia-cdi-hook are not on the PATH: NVIDIA's container toolkit is not installed")
    generate, hook = (Path(program) for program in programs if program)
    with Containerd(packages.find_any(), nri=False) as node:
        node.layout.cdi.mkdir(parents=True, exist_ok=True)
        specify(generate, driver_root(), hook, node.layout.cdi / "nvidia.json")
        node.import_image(gpu_image)
        yield node


def milliseconds(node: Containerd, pod: Pod, spec: ContainerSpec) -> float:
    """Of create + start of a container, which sees a GPU and is gone again when this returns."""
    began = time.perf_counter()
    container = node.cri.run(pod, spec)
    took_s = time.perf_counter() - began
    # By PATH: a CDI specification has it where the driver root has it.
    said = node.cri.execute(container, "/bin/sh", "-c", "nvidia-smi -L", timeout_s=60)
    assert (said.code, sum(line.startswith("GPU ") for line in said.stdout.splitlines())) == (0, 1), said
    node.cri.stop(container)
    node.cri.remove(container)
    return took_s * 1000


def test_create_and_start_beside_cdi_with_nvidia_hooks(
    gpu_node: Containerd, hooked_node: Containerd, real: NriGpu, whole: int, record: Record
) -> None:
    assert real.held() == {}
    asking, plain = gpu_node.cri.asking(f"device={whole}"), hooked_node.cri.run_pod()
    by_cdi = ContainerSpec(image=IMAGE, cdi_devices=(f"nvidia.com/gpu={whole}",))
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(milliseconds(gpu_node, asking, ContainerSpec(image=IMAGE)))
        theirs.append(milliseconds(hooked_node, plain, by_cdi))
    ratio = paired(ours, theirs)
    medians = f"nri-gpu {statistics.median(ours):.1f} ms, CDI with NVIDIA's hooks {statistics.median(theirs):.1f} ms"
    record(f"{medians}; paired by round {ratio.median:.2f} +- {ratio.spread:.2f} of it, {ROUNDS} rounds")
