"""Pods on NVIDIA's own runtime, which acts on NVIDIA_VISIBLE_DEVICES beside us: they are injected once.

The runtime is the real one, a handler of a real containerd. It asks a made-up driver for its GPUs.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from bench.contenders import CONFIG, CONTROL_NODES, specify
from nri_gpu.inventory.topology_file import load_topology
from tests import ground
from tests.conformance.conftest import launch_on
from tests.support import packages
from tests.support.config import CRI_RUNTIME_V3, CRI_V2
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import FOUR_GPUS, UUIDS, NriGpu, staged
from tests.support.driver_root import make_driver_root
from tests.support.image import ImageSpec
from tests.support.nvml import build_fake_nvml, gpus_of
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = pytest.mark.containerd

VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
LEGACY: Final = "legacy"
CUDA_LIKE: Final = ImageSpec("localhost/nri-gpu/cuda-like:1", env={VARIABLE: "all"})
# The toolkit's configuration has the places of its programs, where they are not those of its packages.
HOOK: Final = """
[nvidia-container-runtime-hook]
path = "{programs}/nvidia-container-runtime-hook"
"""
HANDLER: Final = """
  [plugins."{cri}".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{cri}".containerd.runtimes.nvidia.options]
      BinaryName = "{program}"
"""


@pytest.fixture(scope="module", params=["cdi", "jit-cdi", LEGACY])
def mode(request: pytest.FixtureRequest) -> str:
    """How NVIDIA's runtime injects."""
    return str(request.param)


@pytest.fixture(scope="module")
def nvidias(runtime: packages.Runtime, mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    """A containerd with NVIDIA's runtime as a handler, as `nvidia-ctk runtime configure` makes one."""
    programs, folder = ground.need("nvidia"), tmp_path_factory.mktemp("nvidias")
    driver, cdi, hook = (
        make_driver_root(folder / "nvidia", everything=True),
        folder / "cdi",
        programs / "nvidia-cdi-hook",
    )
    gpus, ancestors = gpus_of(load_topology(FOUR_GPUS))
    build_fake_nvml(driver, gpus, ancestors=ancestors, lib_dir="lib64")
    (driver / "dev").mkdir()
    for name, (major, minor) in (CONTROL_NODES | {f"nvidia{minor}": (195, minor) for minor in range(4)}).items():
        os.mknod(driver / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    cdi.mkdir()
    specify(programs / "nvidia-ctk", driver, hook, cdi / "nvidia.json")
    config = folder / "nvidia.toml"
    config.write_text(
        CONFIG.format(driver=driver, mode=mode, runc=packages.runc(), folder=cdi, hook=hook)
        + HOOK.format(programs=programs)
    )
    node = Containerd(runtime, environment={"NVIDIA_CTK_CONFIG_FILE_PATH": str(config)})
    with node.layout.config.open("a") as file:
        cri = CRI_RUNTIME_V3 if runtime.number >= (2, 0) else CRI_V2
        file.write(HANDLER.format(cri=cri, program=programs / "nvidia-container-runtime"))
    with node:
        yield node


@pytest.fixture(scope="module")
def serving(nvidias: Containerd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NriGpu]:
    with staged(launch_on(nvidias, tmp_path_factory.mktemp("ours"))) as daemon:
        yield daemon


def started(node: Containerd, container: ContainerId) -> Mapping[str, Any]:
    """The specification that runc got, after NVIDIA's runtime; CRI shows the one before it."""
    bundle = node.base / "state/io.containerd.runtime.v2.task/k8s.io" / container
    found: Mapping[str, Any] = json.loads((bundle / "config.json").read_text())
    return found


def hooks(oci: Mapping[str, Any]) -> set[str]:
    return {Path(hook["path"]).name for stage in (oci.get("hooks") or {}).values() for hook in stage}


def gpu_nodes(oci: Mapping[str, Any]) -> Counter[str]:
    return Counter(node["path"] for node in oci["linux"].get("devices") or () if node["path"][11:].isdigit())


def test_a_pod_on_nvidias_runtime_is_injected_once(mode: str, nvidias: Containerd, serving: NriGpu) -> None:
    """What the legacy runtime adds to each container, whatever it says, finds nothing to do."""
    del serving
    pod = nvidias.cri.run_pod(PodSpec("train", annotations={"gpu.nri.io": "device=1"}, runtime_handler="nvidia"))
    container = nvidias.cri.run(pod)
    oci = started(nvidias, container)
    assert hooks(oci) == ({"nvidia-container-runtime-hook"} if mode == LEGACY else set())
    assert gpu_nodes(oci) == {"/dev/nvidia1": 1}
    env = nvidias.cri.status(container).env
    assert (env[VARIABLE], env["NRI_GPU_UUIDS"]) == ("void", UUIDS[1])


def test_what_asks_nothing_of_us_is_still_nvidias(mode: str, nvidias: Containerd, serving: NriGpu) -> None:
    """The runtime acts on the variable; the legacy one by a program of NVIDIA's that no registry serves."""
    del serving
    pod = nvidias.cri.run_pod(PodSpec("theirs", runtime_handler="nvidia"))
    asking = ContainerSpec(env={VARIABLE: UUIDS[2]})
    if mode == LEGACY:
        with pytest.raises(CriError, match="nvidia-container-cli"):
            nvidias.cri.run(pod, asking)
        return
    oci = started(nvidias, nvidias.cri.run(pod, asking))
    assert gpu_nodes(oci) == {"/dev/nvidia2": 1}
    assert hooks(oci)


def test_what_image_and_pod_both_say_stays_and_is_logged(mode: str, nvidias: Containerd, serving: NriGpu) -> None:
    """As a kubelet with NVIDIA's device plugin and a CUDA image do: the same GPU comes by both."""
    nvidias.import_image(CUDA_LIKE)
    pod = nvidias.cri.run_pod(PodSpec("both", annotations={"gpu.nri.io": "device=0"}, runtime_handler="nvidia"))
    asking = ContainerSpec(image=CUDA_LIKE.name, env={VARIABLE: UUIDS[0]})
    if mode == LEGACY:
        with pytest.raises(CriError, match="nvidia-container-cli"):
            nvidias.cri.run(pod, asking)
    else:
        assert set(gpu_nodes(started(nvidias, nvidias.cri.run(pod, asking)))) == {"/dev/nvidia0"}
    serving.wait_logged(f"image and pod both set {VARIABLE}: the pod's value stays, ours has no effect")
