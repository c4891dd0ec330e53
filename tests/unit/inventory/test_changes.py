"""What is said of a node that changed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.domain.gpu import DrmNode, PciBusId
from nri_gpu.domain.health import Health, HealthState, Sign, TransitionKind
from nri_gpu.domain.node import GpuFault, Inventory, KernelGpu, Majors
from nri_gpu.inventory.changes import changes
from nri_gpu.simulation.topology import load_topology
from tests.support.daemon import TOPOLOGIES

NODE = load_topology(TOPOLOGIES / "mig-a100.toml", wall=lambda: 1.0)
GPU = NODE.gpus[0]
CUT = NODE.gpus[1]


def other(at: int, **fields: object) -> Inventory:
    gpus = list(NODE.gpus)
    gpus[at] = replace(gpus[at], **fields)
    return replace(NODE, gpus=tuple(gpus))


CASES = {
    "a GPU fails": (other(0, unavailable="lost"), [f"GPU 0 ({GPU.uuid}) is unavailable: lost"]),
    "a GPU leaves": (replace(NODE, gpus=NODE.gpus[1:]), [f"GPU 0 ({GPU.uuid}) is gone"]),
    "a layout": (
        other(1, mig=CUT.mig[1:]),
        [f"MIG device 1:0 3g.40gb ({CUT.mig[0].uuid}) of GPU 1 is gone"],
    ),
    "MIG mode": (other(0, mig_enabled=True), [f"GPU 0 ({GPU.uuid}) is in MIG mode"]),
    "an index": (other(3, index=7), [f"GPU 7 ({NODE.gpus[3].uuid}) had index 3"]),
    "a minor": (other(0, minor_number=9), [f"GPU 0 ({GPU.uuid}) had minor 1, and has 9"]),
    "a driver": (replace(NODE, driver_version="590.1"), ["driver 580.95.05 -> 590.1"]),
    "modules": (
        replace(NODE, majors=Majors(nvidia=195, nvidia_uvm=511)),
        [
            "kernel module nvidia-uvm has major 511, and had 1510",
            "kernel module nvidia-caps is no longer loaded",
        ],
    ),
    "a module of screens": (
        replace(NODE, majors=replace(NODE.majors, modeset=True)),
        ["kernel module nvidia-modeset is loaded"],
    ),
    "a sign": (other(0, signs=(Sign.THERMAL,)), [f"GPU 0 ({GPU.uuid}) shows thermal"]),
    "health, and nothing of what follows from it": (
        other(0, health=Health(HealthState.BAD, 1.0, "XID 79", 1), unavailable="bad since 1970"),
        [f"GPU 0 ({GPU.uuid}) is bad, because of: XID 79"],
    ),
    "a fact of no name": (other(0, numa_node=7), [f"GPU 0 ({GPU.uuid}) has numa_node 7, and had 0"]),
    "a long one": (other(0, drm=(DrmNode("card0", 226, 0),)), [f"GPU 0 ({GPU.uuid}) has another drm"]),
    "who uses it": (other(0, processes=3), []),
    "links": (replace(NODE, links=()), ["links changed"]),
    "a device of a layout moves": (
        other(1, mig=(replace(CUT.mig[0], index=6), *CUT.mig[1:])),
        [f"MIG device 1:6 3g.40gb ({CUT.mig[0].uuid}) of GPU 1 had index 0"],
    ),
    "no name": (replace(NODE, faults=(GpuFault(4, "gone"),)), ["GPU 4 cannot be described: gone"]),
    "nobody answers": (replace(NODE, fault="no driver"), ["no driver"]),
    "time": (replace(NODE, taken_at=9.0), []),
}


@pytest.mark.parametrize(("after", "said"), CASES.values(), ids=CASES)
def test_sentences(after: Inventory, said: list[str]) -> None:
    assert [each.what for each in changes(NODE, after)] == said


def back(before: Inventory, after: Inventory = NODE) -> list[str]:
    return [each.what for each in changes(before, after)]


def test_and_back() -> None:
    assert back(other(0, unavailable="lost")) == [f"GPU 0 ({GPU.uuid}) is available again"]
    assert back(replace(NODE, gpus=NODE.gpus[1:])) == [f"GPU 0 ({GPU.uuid}) is new"]
    assert back(replace(NODE, fault="x")) == ["the driver answers again"]
    assert back(replace(NODE, majors=Majors(nvidia=195, nvidia_uvm=1510))) == [
        "kernel module nvidia-caps has major 1511"
    ]
    assert back(other(0, signs=(Sign.THERMAL,))) == [f"GPU 0 ({GPU.uuid}) no longer shows thermal"]
    assert back(replace(NODE, faults=(GpuFault(0, "gone"),))) == ["GPU 0 can be described again"]
    assert back(replace(NODE, faults=(GpuFault(9, "gone"),))) == ["GPU 9 is gone, and could not be described"]


def test_a_gpu_that_health_gives_back_is_said_to_be_well_and_no_more() -> None:
    bad = other(0, health=Health(HealthState.BAD, 1.0, "XID 79", 1), unavailable="bad since 1970")
    well = other(0, health=Health(HealthState.HEALTHY, 9.0, "XID 79", 3))
    assert back(bad, well) == [f"GPU 0 ({GPU.uuid}) is healthy, recovered from: XID 79"]
    lost = other(0, health=Health(HealthState.HEALTHY, 9.0, "XID 79", 3), unavailable="no permission")
    assert back(bad, lost)[1:] == [f"GPU 0 ({GPU.uuid}) is unavailable: no permission"]


def test_whose_and_what() -> None:
    (one,) = changes(NODE, other(1, mig=CUT.mig[1:]))
    assert (one.kind, one.uuid, one.index, one.worse) == (TransitionKind.MIG, CUT.mig[0].uuid, 1, False)
    (one,) = changes(NODE, replace(NODE, gpus=NODE.gpus[1:]))
    assert (one.kind, one.uuid, one.index, one.worse) == (TransitionKind.GPU, GPU.uuid, 0, True)


def test_who_the_kernel_alone_knows_of() -> None:
    away = KernelGpu(pci_bus_id=PciBusId("0000:f1:00.0"), reason="bound to vfio-pci, for a virtual machine")
    with_it = replace(NODE, unlisted=(away,))
    (told,) = changes(NODE, with_it)
    assert told.what == f"GPU 0000:f1:00.0 is not listed by NVML: {away.reason}"
    assert (told.kind, told.worse) == (TransitionKind.DESCRIPTION, True)
    assert [each.what for each in changes(with_it, NODE)] == ["GPU 0000:f1:00.0 is no longer on the bus"]
    back = replace(NODE, gpus=(*NODE.gpus[1:], replace(GPU, pci_bus_id=away.pci_bus_id)))
    assert "GPU 0000:f1:00.0 is listed by NVML now" in [each.what for each in changes(with_it, back)]
    moved = replace(NODE, unlisted=(replace(away, reason="not bound to a driver"),))
    assert [each.worse for each in changes(with_it, moved)] == [True]
