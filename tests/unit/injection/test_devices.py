from __future__ import annotations

import pytest

from nri_gpu.domain.decision import Code
from nri_gpu.domain.edits import DeviceNode
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability, DrmNode, closure
from nri_gpu.domain.node import Majors
from nri_gpu.injection.devices import covered_node, device_nodes, missing_capability_major, missing_modules
from tests.support import builders as make

COMPUTE, UTILITY = frozenset({Capability.COMPUTE}), frozenset({Capability.UTILITY})
BOTH = DEFAULT_CAPABILITIES
GPU_NODES = [("/dev/nvidia7", 195, 7), ("/dev/nvidia5", 195, 5), ("/dev/nvidiactl", 195, 255)]
UVM_NODES = [("/dev/nvidia-uvm", 511, 0), ("/dev/nvidia-uvm-tools", 511, 1)]
MODESET = ("/dev/nvidia-modeset", 195, 254)
DRM = (DrmNode("card1", 226, 1), DrmNode("renderD129", 226, 129))
DRM_NODES = [
    ("/dev/dri/card1", 226, 1),
    (f"/dev/dri/by-path/pci-{make.gpu(2).pci_bus_id}-card", 226, 1),
    ("/dev/dri/renderD129", 226, 129),
    (f"/dev/dri/by-path/pci-{make.gpu(2).pci_bus_id}-render", 226, 129),
]

NODES = {
    "both": (BOTH, make.MAJORS, [*GPU_NODES, *UVM_NODES]),
    "compute": (COMPUTE, make.MAJORS, [*GPU_NODES, *UVM_NODES]),
    "utility needs no unified memory": (UTILITY, make.MAJORS, GPU_NODES),
    "utility without that module": (UTILITY, Majors(nvidia=195), GPU_NODES),
    "video": (closure(frozenset({Capability.VIDEO})), make.MAJORS, [*GPU_NODES, *UVM_NODES]),
    "graphics": (frozenset({Capability.GRAPHICS}), make.MAJORS, [*GPU_NODES, MODESET, *DRM_NODES]),
    "display": (closure(frozenset({Capability.DISPLAY})), make.MAJORS, [*GPU_NODES, MODESET, *DRM_NODES]),
    "ngx": (frozenset({Capability.NGX}), make.MAJORS, GPU_NODES),
    "compat32": (frozenset({Capability.COMPAT32}), make.MAJORS, GPU_NODES),
    "no driver": (BOTH, Majors(), []),
}


@pytest.mark.parametrize(("capabilities", "majors", "nodes"), NODES.values(), ids=NODES)
def test_nodes_carry_the_gpus_minors_and_the_hosts_majors(
    capabilities: Capabilities, majors: Majors, nodes: list[tuple[str, int, int]]
) -> None:
    made = device_nodes((make.gpu(0), make.gpu(2, drm=DRM)), capabilities, majors)
    assert [(node.path, node.major, node.minor) for node in made] == nodes


def test_no_gpu_no_node_not_even_the_shared_ones() -> None:
    assert device_nodes((), BOTH, make.MAJORS) == ()


def test_everybody_may_use_the_graphics_nodes_whatever_the_hosts_groups() -> None:
    made = device_nodes((make.gpu(2, drm=DRM),), frozenset({Capability.GRAPHICS}), make.MAJORS)
    assert {(node.mode, node.uid, node.gid) for node in made} == {(0o666, 0, 0)}


def test_the_driver_opens_its_nodes_to_every_user() -> None:
    assert device_nodes((make.gpu(0),), UTILITY, make.MAJORS)[0] == DeviceNode("/dev/nvidia7", 195, 7, 0o666, 0, 0)


MISSING = {
    "all loaded": (BOTH, make.MAJORS, ""),
    "utility does without unified memory": (UTILITY, Majors(nvidia=195), ""),
    "compute does not": (COMPUTE, Majors(nvidia=195), "modprobe nvidia-uvm"),
    "nothing loaded": (UTILITY, Majors(), "`modprobe nvidia`"),
    "odd: unified memory alone": (BOTH, Majors(nvidia_uvm=511), "`modprobe nvidia`"),
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


CUT = make.mig_gpu(2, mig=(make.mig(2, 0), make.mig(2, 1, gpu_instance_minor=738, compute_instance_minor=740)))
CAPS = [("/dev/nvidia-caps/nvidia-cap741", 510, 741), ("/dev/nvidia-caps/nvidia-cap742", 510, 742)]


def test_a_mig_device_is_its_gpus_node_and_two_capabilities() -> None:
    made = device_nodes((CUT.parts[0],), BOTH, make.MAJORS)
    nodes = [("/dev/nvidia5", 195, 5), GPU_NODES[2], *UVM_NODES, *CAPS]
    assert [(node.path, node.major, node.minor) for node in made] == nodes
    assert {node.mode for node in made if "caps" in node.path} == {0o444}


def test_several_mig_devices_of_a_gpu_have_its_node_once() -> None:
    made = device_nodes((make.gpu(0), *CUT.parts), UTILITY, make.MAJORS)
    assert [node.path for node in made].count("/dev/nvidia5") == 1
    assert [node.minor for node in made if "caps" in node.path] == [741, 742, 738, 740]


def test_compute_instances_of_one_gpu_instance_share_its_capability() -> None:
    pair = tuple(make.mig(2, at, gpu_instance_minor=738, compute_instance_minor=739 + at) for at in (0, 1))
    made = device_nodes(make.mig_gpu(2, mig=pair).parts, UTILITY, make.MAJORS)
    assert [node.minor for node in made if "caps" in node.path] == [738, 739, 740]


def test_mig_without_capabilities_is_refused_and_whole_gpus_do_without() -> None:
    majors = Majors(nvidia=195, nvidia_uvm=511)
    reason = missing_capability_major(CUT.parts, majors)
    assert reason is not None
    assert (reason.code, "nvidia-caps" in reason.sentence) == (Code.NODE_NOT_READY, True)
    assert missing_capability_major(CUT.parts, make.MAJORS) is None
    assert missing_capability_major(make.gpus(), majors) is None


COVERED = {
    "nothing of its own": ((), None),
    "what every container has": (
        ("/proc", "/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/termination-log", "/sys"),
        None,
    ),
    "a volume elsewhere": (("/mnt/dev", "/dev/nvidia", "/dev/nvidia7x", "/dev/infiniband"), None),
    "all of /dev": (("/dev",), "/dev/nvidia7"),
    "a file in the place of a node": (("/dev/nvidia-uvm",), "/dev/nvidia-uvm"),
    "the folder of a node": (("/dev/dri",), "/dev/dri/card1"),
    "in a roundabout way": (("//dev/./x/../dri/",), "/dev/dri/card1"),
}


@pytest.mark.parametrize(("mounts", "node"), COVERED.values(), ids=COVERED)
def test_a_volume_in_the_place_of_a_node(mounts: tuple[str, ...], node: str | None) -> None:
    reason = covered_node(["/dev/nvidia7", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dri/card1"], mounts)
    assert (reason is None) is (node is None)
    if reason and node:
        assert reason.code is Code.VOLUME_IN_THE_WAY
        assert f"at {node} or above it" in reason.sentence
