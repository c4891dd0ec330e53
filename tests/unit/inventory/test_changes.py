"""The differences between two inventories, in sentences."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.domain.gpu import ComputeMode, Cordon, DrmNode, Fabric, FabricState, PciBusId
from nri_gpu.domain.health import Health, HealthState, Sign, TransitionKind
from nri_gpu.domain.node import GpuFault, Inventory, KernelGpu, Majors
from nri_gpu.inventory.changes import changes
from nri_gpu.inventory.topology_file import load_topology
from tests.support.daemon import TOPOLOGIES

NODE = load_topology(TOPOLOGIES / "mig-a100.toml", boot_clock=lambda: 1.0)
GPU = NODE.gpus[0]
PARTITIONED = NODE.gpus[1]


def other(at: int, **fields: object) -> Inventory:
    gpus = list(NODE.gpus)
    gpus[at] = replace(gpus[at], **fields)
    return replace(NODE, gpus=tuple(gpus))


PART = f"{PARTITIONED.mig[0].uuid}) of GPU 1"
ILL = Health(HealthState.BAD, 1.0, "XID 79", 1)
# What came after NODE.
CASES = {
    f"GPU 0 ({GPU.uuid}) is unavailable: lost": other(0, unavailable="lost"),
    f"GPU 0 ({GPU.uuid}) is gone": replace(NODE, gpus=NODE.gpus[1:]),
    f"MIG device 1:0 3g.40gb ({PART} is gone": other(1, mig=PARTITIONED.mig[1:]),
    f"GPU 0 ({GPU.uuid}) mig_enabled False -> True": other(0, mig_enabled=True),
    f"GPU 7 ({NODE.gpus[3].uuid}) index 3 -> 7": other(3, index=7),
    f"GPU 0 ({GPU.uuid}) minor_number 1 -> 9": other(0, minor_number=9),
    "driver_version 580.95.05 -> 590.1": replace(NODE, driver_version="590.1"),
    "majors.nvidia_uvm 1510 -> 511": replace(NODE, majors=replace(NODE.majors, nvidia_uvm=511)),
    "majors.nvidia_caps 1511 -> None": replace(NODE, majors=replace(NODE.majors, nvidia_caps=None)),
    "majors.modeset None -> True": replace(NODE, majors=replace(NODE.majors, modeset=True)),
    f"GPU 0 ({GPU.uuid}) shows thermal": other(0, signs=(Sign.THERMAL,)),
    # Health, and nothing of what follows from it.
    f"GPU 0 ({GPU.uuid}) is bad, because of: XID 79": other(0, health=ILL, unavailable="bad since 1970"),
    f"GPU 0 ({GPU.uuid}) numa_node 0 -> 7": other(0, numa_node=7),
    f"GPU 0 ({GPU.uuid}) drm changed": other(0, drm=(DrmNode("card0", 226, 0),)),
    "links changed": replace(NODE, links=()),
    f"MIG device 1:6 3g.40gb ({PART} index 0 -> 6": other(
        1, mig=(replace(PARTITIONED.mig[0], index=6), *PARTITIONED.mig[1:])
    ),
    "GPU 4 cannot be described: gone": replace(NODE, faults=(GpuFault(4, "gone"),)),
    "no driver": replace(NODE, fault="no driver"),
}
# What a node was before, of which NODE is what came after.
RECOVERIES = {
    f"GPU 0 ({GPU.uuid}) is available again": other(0, unavailable="lost"),
    f"GPU 0 ({GPU.uuid}) is new": replace(NODE, gpus=NODE.gpus[1:]),
    "the driver answers again": replace(NODE, fault="x"),
    "majors.nvidia_caps None -> 1511": replace(NODE, majors=Majors(nvidia=195, nvidia_uvm=1510)),
    f"GPU 0 ({GPU.uuid}) no longer shows thermal": other(0, signs=(Sign.THERMAL,)),
    "GPU 0 can be described again, or is gone": replace(NODE, faults=(GpuFault(0, "gone"),)),
}


def sentences(before: Inventory, after: Inventory = NODE) -> list[str]:
    return [each.what for each in changes(before, after)]


@pytest.mark.parametrize(("sentence", "after"), CASES.items(), ids=CASES)
def test_a_change_is_one_sentence(sentence: str, after: Inventory) -> None:
    assert sentences(NODE, after) == [sentence]


@pytest.mark.parametrize(("sentence", "before"), RECOVERIES.items(), ids=RECOVERIES)
def test_a_recovery_is_one_sentence(sentence: str, before: Inventory) -> None:
    assert sentences(before) == [sentence]


def test_a_gpu_that_recovers_has_one_sentence() -> None:
    bad = other(0, health=ILL, unavailable="bad since 1970")
    well = other(0, health=Health(HealthState.HEALTHY, 9.0, "XID 79", 3))
    assert sentences(bad, well) == [f"GPU 0 ({GPU.uuid}) is healthy, recovered from: XID 79"]
    lost = other(0, health=Health(HealthState.HEALTHY, 9.0, "XID 79", 3), unavailable="no permission")
    assert sentences(bad, lost)[1:] == [f"GPU 0 ({GPU.uuid}) is unavailable: no permission"]


def test_kind_uuid_and_index() -> None:
    (one,) = changes(NODE, other(1, mig=PARTITIONED.mig[1:]))
    assert (one.kind, one.uuid, one.index, one.worse) == (TransitionKind.MIG, PARTITIONED.mig[0].uuid, 1, False)
    (one,) = changes(NODE, replace(NODE, gpus=NODE.gpus[1:]))
    assert (one.kind, one.uuid, one.index, one.worse) == (TransitionKind.GPU, GPU.uuid, 0, True)


def test_gpus_that_nvml_does_not_list() -> None:
    away = KernelGpu(pci_bus_id=PciBusId("0000:f1:00.0"), reason="bound to vfio-pci, for a virtual machine")
    with_it = replace(NODE, unlisted=(away,))
    (found,) = changes(NODE, with_it)
    assert found.what == f"GPU 0000:f1:00.0 is not listed by NVML: {away.reason}"
    assert (found.kind, found.worse) == (TransitionKind.DESCRIPTION, True)
    assert sentences(with_it) == ["GPU 0000:f1:00.0 is listed by NVML now, or no longer on the bus"]
    for meant in (replace(away, given=False), replace(away, set_aside=True)):
        assert not changes(NODE, replace(NODE, unlisted=(meant,)))[0].worse
    moved = replace(NODE, unlisted=(replace(away, reason="not bound to a driver"),))
    assert [each.worse for each in changes(with_it, moved)] == [True]


def test_facts_that_change_by_themselves_make_no_difference() -> None:
    """An MPS daemon changes the compute mode; the bits of a fabric's health come and go."""
    assert sentences(NODE, replace(other(0, processes=3), taken_at=9.0)) == []
    fabric = Fabric(FabricState.COMPLETED, health_mask=0)
    assert replace(GPU, compute_mode=ComputeMode.EXCLUSIVE_PROCESS, processes=9) == GPU
    assert replace(fabric, health_mask=1) == fabric != replace(fabric, state=FabricState.IN_PROGRESS)


def test_a_gpu_out_of_use_is_roots_doing_which_is_noted_elsewhere() -> None:
    assert sentences(NODE, other(0, cordon=Cordon())) == []
