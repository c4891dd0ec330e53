"""Device nodes where no golden shows them: without a module, of several MIG devices, and below a volume."""

from __future__ import annotations

import pytest

from nri_gpu.domain.decision import Code
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability, Unit
from nri_gpu.domain.node import Majors
from nri_gpu.injection.device_nodes import covered_node, device_nodes, missing_capability_major, missing_modules
from tests.support import builders as make

COMPUTE, UTILITY, GRAPHICS = (frozenset({Capability(each)}) for each in ("compute", "utility", "graphics"))
CUT = make.mig_gpu(2, mig=(make.mig(2, 0), make.mig(2, 1, gpu_instance_minor=738, compute_instance_minor=740)))
ONE_INSTANCE = make.mig_gpu(
    2, mig=tuple(make.mig(2, at, gpu_instance_minor=738, compute_instance_minor=739 + at) for at in (0, 1))
)
NODES: dict[str, tuple[tuple[Unit, ...], Majors, list[tuple[int, int]]]] = {
    "no GPU, not even the shared ones": ((), make.MAJORS, []),
    "no driver": (make.gpus(1), Majors(), []),
    "the module that utility does without": (make.gpus(1), Majors(nvidia=195), [(195, 7), (195, 255)]),
    "a GPU's node once, its MIG devices' each": (
        (make.gpu(0), *CUT.parts),
        make.MAJORS,
        [(195, 7), (195, 5), (195, 255), (510, 741), (510, 742), (510, 738), (510, 740)],
    ),
    "two of one GPU instance, which they share": (
        ONE_INSTANCE.parts,
        make.MAJORS,
        [(195, 5), (195, 255), (510, 738), (510, 739), (510, 740)],
    ),
}


@pytest.mark.parametrize(("units", "majors", "numbers"), NODES.values(), ids=NODES)
def test_nodes_have_the_gpus_minors_and_the_hosts_majors(
    units: tuple[Unit, ...], majors: Majors, numbers: list[tuple[int, int]]
) -> None:
    assert [(node.major, node.minor) for node in device_nodes(units, UTILITY, majors)] == numbers


MISSING = {
    "all loaded": (DEFAULT_CAPABILITIES, make.MAJORS, ""),
    "utility does without unified memory": (UTILITY, Majors(nvidia=195), ""),
    "compute does not": (COMPUTE, Majors(nvidia=195), "modprobe nvidia-uvm"),
    "nothing loaded": (UTILITY, Majors(), "`modprobe nvidia`"),
    "odd: unified memory alone": (DEFAULT_CAPABILITIES, Majors(nvidia_uvm=511), "`modprobe nvidia`"),
    "what draws needs modeset": (GRAPHICS, Majors(195, 511, modeset=False), "modprobe nvidia-modeset"),
    "modeset is loaded": (GRAPHICS, Majors(195, 511, modeset=True), ""),
    "older drivers do not tell": (GRAPHICS, Majors(195, 511), ""),
    "compute does without modeset": (DEFAULT_CAPABILITIES, Majors(195, 511, modeset=False), ""),
}


@pytest.mark.parametrize(("capabilities", "majors", "fix"), MISSING.values(), ids=MISSING)
def test_a_module_that_is_not_loaded_is_named_with_its_cure(
    capabilities: Capabilities, majors: Majors, fix: str
) -> None:
    reason = missing_modules(capabilities, make.inventory(majors=majors))
    assert (reason is None) == (not fix)
    if reason is not None:
        assert reason.code is Code.NODE_NOT_READY
        assert fix in reason.sentence


def test_mig_without_capabilities_is_refused_and_whole_gpus_do_without() -> None:
    majors = Majors(nvidia=195, nvidia_uvm=511)
    reason = missing_capability_major(CUT.parts, majors)
    assert reason is not None
    assert (reason.code, "nvidia-caps" in reason.sentence) == (Code.NODE_NOT_READY, True)
    assert missing_capability_major(CUT.parts, make.MAJORS) is None
    assert missing_capability_major(make.gpus(), majors) is None


COVERED = {
    "what every container has": (("/proc", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys"), None),
    "a volume elsewhere": (("/mnt/dev", "/dev/nvidia", "/dev/nvidia7x", "/dev/infiniband"), None),
    "all of /dev": (("/dev",), "/dev/nvidia7"),
    "a file in the place of a node": (("/dev/nvidia-uvm",), "/dev/nvidia-uvm"),
    "the folder of a node, in a roundabout way": (("//dev/./x/../dri/",), "/dev/dri/card1"),
}


@pytest.mark.parametrize(("mounts", "node"), COVERED.values(), ids=COVERED)
def test_a_volume_in_the_place_of_a_node(mounts: tuple[str, ...], node: str | None) -> None:
    reason = covered_node(["/dev/nvidia7", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dri/card1"], mounts)
    assert (reason is None) is (node is None)
    if reason and node:
        assert reason.code is Code.VOLUME_IN_THE_WAY
        assert f"at {node} or above it" in reason.sentence
