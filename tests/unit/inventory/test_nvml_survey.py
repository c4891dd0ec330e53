"""GPUs as the NVML process describes them, through the unmodified nvidia-ml-py and a made-up library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.bounds import profile_in
from nri_gpu.domain.gpu import ComputeMode, Ecc, Fabric, FabricState, Gpu, GpuUuid, MigDevice, MigEngines, described
from nri_gpu.domain.health import RecoveryAction, Sign
from nri_gpu.domain.node import GpuFault, Inventory, Link
from nri_gpu.inventory.nvml_client import GPU_GONE, UNSUPPORTED
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.system.proc import has_hosts_pids
from nri_gpu.system.process import process_of
from tests.support.nvml import SWITCH, Act, FakeFabric, FakeFacts, FakeGpu, FakeHealth, FakeMig, gpus_of
from tests.unit.inventory.machine import Machine

ROOT = Path(__file__).parents[3]
CLUSTER = "0123456789abcdef0123456789abcdef"
FABRIC = FakeFabric(state=3, clique=5, health_mask=0x4002, cluster=CLUSTER)
H100 = FakeGpu(facts=FakeFacts(ecc=(1, 0), addressing=1), fabric=FABRIC, running=(2, 0))


@pytest.mark.parametrize("name", ["four-gpus", "hgx-h100", "dgx-a100", "pcie-8"])
def test_nvml_and_a_topology_file_describe_a_node_alike(machine: Machine, name: str) -> None:
    simulated = load_topology(ROOT / "config/topologies" / f"{name}.toml", boot_clock=lambda: 7.0)
    gpus, ancestors = gpus_of(simulated)
    for gpu in simulated.gpus:
        folder = f"bus/pci/devices/{gpu.pci_bus_id}"
        place = f"devices/{gpu.pcie_root or 'platform'}/{gpu.pci_bus_id}"
        machine.write(f"{place}/local_cpulist", f"{gpu.cpus}\n")
        (machine.sysfs / folder).parent.mkdir(parents=True, exist_ok=True)
        (machine.sysfs / folder).symlink_to(f"../../../{place}")
        for node in gpu.drm:
            machine.write(f"{folder}/drm/{node.name}/dev", f"{node.major}:{node.minor}\n")
        for other, number in (("card9-DP-1", "226:9"), ("controlD64", "226:64"), ("card8", "nothing")):
            machine.write(f"{folder}/drm/{other}/dev", number)
        (machine.sysfs / folder / "drm/card7").mkdir()  # on its way out: it has no number any more
    for module, version in simulated.modules.items():
        machine.write(f"module/{module}/version", f"{version}\n")
    inventory = machine.look(gpus, ancestors=ancestors, driver=simulated.driver_version)
    expected = replace(simulated, majors=inventory.majors, cuda_version="13.0", simulated=False, extras={}, numa=())
    expected = replace(expected, nvswitches=0)  # procfs tells of these, not NVML
    assert inventory == expected


def test_a_machine_without_gpus(machine: Machine) -> None:
    assert machine.look([]) == Inventory(taken_at=7.0, driver_version="580.95.05", cuda_version="13.0")


# Every return code of NVML that is an error (nvml.h).
CODES = frozenset({1, 2, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 17, 18, 19, 20, 23, 25, 27, 28, 29, 999})
SIGNS = {15: Sign.LOST, 16: Sign.RESET_REQUIRED}
IDENTITY = ("index", "minor_number", "uuid", "pci_bus_id")


def facts(gpu: Gpu) -> dict[str, object]:
    return {name: getattr(gpu, name) for name in Gpu.__struct_fields__ if name not in IDENTITY}


def with_each_code(machine: Machine, gpu: FakeGpu, *functions: str) -> list[tuple[int, Inventory, int]]:
    """Each code, with the inventory of a machine on which these functions fail with it, and of which GPU."""
    found, codes = [], sorted(CODES)
    for some in (codes[:11], codes[11:]):  # as many GPUs as fit
        acts = [Act(name, "fail", code, gpu=at) for at, code in enumerate(some) for name in functions]
        inventory = machine.look([gpu] * (len(some) + 1), acts)
        assert len(inventory.gpus) + len(inventory.faults) == len(some) + 1
        assert not inventory.gpus[-1].unavailable
        found += [(code, inventory, at) for at, code in enumerate(some)]
    return found


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo_v3"],
)
def test_a_gpu_without_an_identity_is_a_fault(machine: Machine, function: str) -> None:
    for code, inventory, at in with_each_code(machine, H100, function):
        (fault,) = [each for each in inventory.faults if each.index == at]
        assert fault.reason.startswith(f"{function.removesuffix('_v2')}: ")
        assert (fault.code, fault.sign) == (code, SIGNS.get(code, Sign.UNREADABLE))
        # What was read before stays.
        uuid = f"GPU-{at:x}fa4e000-0000-4000-8000-{at:012d}" if function == "nvmlDeviceGetMinorNumber" else ""
        assert (fault.uuid, bool(fault.pci_bus_id)) == (
            uuid,
            function in ("nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber"),
        )


FABRIC_CALLS = ("nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo")
CLOCK_CALLS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
# The codes of a call that cost its GPU nothing but one fact.
DESCRIPTION: dict[tuple[str, ...], frozenset[int]] = {
    ("nvmlDeviceGetName",): frozenset(),
    ("nvmlDeviceGetCudaComputeCapability",): frozenset(),
    ("nvmlDeviceGetMemoryInfo",): UNSUPPORTED,
    ("nvmlDeviceGetMigMode",): UNSUPPORTED,  # in doubt, a GPU must not pass for one without MIG
    ("nvmlDeviceGetBrand",): CODES - GPU_GONE,
    ("nvmlDeviceGetMemoryAffinity",): CODES - GPU_GONE,
    ("nvmlDeviceGetArchitecture",): CODES - GPU_GONE,
    ("nvmlDeviceGetComputeMode",): CODES - GPU_GONE,
    ("nvmlDeviceGetPersistenceMode",): CODES - GPU_GONE,
    ("nvmlDeviceGetEccMode",): CODES - GPU_GONE,
    ("nvmlDeviceGetAddressingMode",): CODES - GPU_GONE,
    ("nvmlDeviceGetRemappedRows",): CODES - GPU_GONE,
    ("nvmlDeviceGetFieldValues",): CODES - GPU_GONE,
    FABRIC_CALLS: CODES - GPU_GONE,
    CLOCK_CALLS: CODES,
    ("nvmlDeviceGetComputeRunningProcesses_v3",): CODES,
    ("nvmlDeviceGetNvLinkState",): CODES,
    ("nvmlDeviceGetTopologyCommonAncestor",): CODES,
}


@pytest.mark.parametrize("functions", DESCRIPTION, ids=lambda functions: functions[0])
def test_a_call_that_fails_costs_one_fact_or_one_gpu(machine: Machine, functions: tuple[str, ...]) -> None:
    whole = facts(machine.look([H100]).gpus[0])
    for code, inventory, at in with_each_code(machine, H100, *functions):
        gpu = inventory.gpus[at]
        if code in DESCRIPTION[functions]:
            assert gpu.unavailable == ""
            assert len(facts(gpu).items() - whole.items()) <= 1, code
        else:
            assert gpu.unavailable.startswith(functions[0])
            assert gpu.unavailable.endswith(f"({code})")
            assert gpu.signs == (SIGNS.get(code, Sign.UNREADABLE),)


def test_a_number_that_nvml_declines_is_unknown_and_not_zero(machine: Machine) -> None:
    declines = Act("nvmlDeviceGetMemoryInfo", "fail", 3, gpu=1)
    for found in (machine.look([FakeGpu()] * 2, [declines]), machine.look([FakeGpu(), FakeGpu(memory_bytes=0)])):
        assert [gpu.memory_bytes for gpu in found.gpus] == [FakeGpu().memory_bytes, None]
        assert [gpu.unavailable for gpu in found.gpus] == ["", ""]
    (gpu,) = machine.look([FakeGpu()], [Act("nvmlDeviceGetCudaComputeCapability", "fail", 999)]).gpus
    assert (gpu.arch, gpu.arch_text, bool(gpu.unavailable)) == (None, "", True)
    (gpu,) = machine.look([PARTITIONED], [Act("nvmlDeviceGetAttributes_v2", "fail", 999)]).gpus
    assert {(part.memory_bytes, part.device.engines) for part in gpu.parts} == {(None, MigEngines())}


@pytest.mark.parametrize(("code", "mask"), [(0, 0x4002), (13, None), (25, None)])
def test_fabric_by_the_older_call(machine: Machine, code: int, mask: int | None) -> None:
    (gpu,) = machine.look([H100], [Act(FABRIC_CALLS[0], "fail", code)] if code else ()).gpus
    assert gpu.fabric == IN_FABRIC
    assert gpu.fabric
    assert gpu.fabric.health_mask == mask


def test_clock_reasons_by_the_older_name(machine: Machine) -> None:
    hot = FakeGpu(health=FakeHealth(clock_reasons=0x80))
    assert machine.look([hot], [Act(CLOCK_CALLS[0], "fail", 13)]).gpus[0].signs == (Sign.POWER_BRAKE,)


OPTIONAL = [
    *(name for names, free in DESCRIPTION.items() if free for name in names if name != "nvmlDeviceGetMemoryInfo"),
    *(
        f"nvmlDeviceGet{kind}RunningProcesses{suffix}"
        for kind in ("Compute", "Graphics")
        for suffix in ("_v3", "_v2", "")
    ),
    *("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"),
    *("nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemotePciInfo"),
    *("nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetP2PStatus"),
]


def test_an_old_driver_without_any_optional_function(machine: Machine) -> None:
    inventory = machine.look([replace(H100, health=FakeHealth(remap_failed=1))] * 2, without=dict.fromkeys(OPTIONAL))
    assert (inventory.driver_version, inventory.cuda_version, inventory.links) == ("", "", ())
    for gpu in inventory.gpus:
        bare = Gpu(**{name: getattr(gpu, name) for name in (*IDENTITY, "model", "memory_bytes", "arch")})
        assert (gpu, gpu.compute_mode, gpu.processes) == (bare, None, None)


def test_numa_node_from_sysfs(machine: Machine) -> None:
    for bus_id, node in (("0000:10:00.0", "1\n"), ("0000:11:00.0", "-1\n")):
        machine.write(f"bus/pci/devices/{bus_id}/numa_node", node)
    assert [gpu.numa_node for gpu in machine.look([FakeGpu(numa=-1)] * 3).gpus] == [1, None, None]


@pytest.mark.parametrize("driver", ["580", "../../etc/x", "580.95.05-rc1", "9" * 70])
def test_a_malformed_driver_version_is_left_out(machine: Machine, driver: str) -> None:
    """It names folders, and stands in logs."""
    machine.look([FakeGpu()])
    inventory = machine.look([FakeGpu()], reported=driver)
    assert (inventory.driver_version, len(inventory.gpus)) == ("", 1)


def test_garbage_in_a_name_costs_one_gpu(machine: Machine) -> None:
    inventory = machine.look([FakeGpu()] * 3, [Act("nvmlDeviceGetName", "rubbish", gpu=1)])
    assert [bool(gpu.unavailable) for gpu in inventory.gpus] == [False, True, False]
    inventory = machine.look([FakeGpu(), FakeGpu(uuid="GPU-../../etc")])
    assert [gpu.index for gpu in inventory.gpus] == [0]
    assert inventory.faults == (GpuFault(1, inventory.faults[0].reason, pci_bus_id="0000:11:00.0"),)
    assert "is not a GPU UUID" in inventory.faults[0].reason


HEALTH: dict[FakeHealth, tuple[Sign, ...]] = {
    FakeHealth(): (),
    FakeHealth(remap_pending=1): (Sign.REMAP_PENDING,),
    FakeHealth(remap_failed=1): (Sign.REMAP_FAILED,),
    FakeHealth(clock_reasons=0x40): (Sign.THERMAL,),
    FakeHealth(clock_reasons=0x20 | 0x80 | 0x4): (Sign.THERMAL, Sign.POWER_BRAKE),
    FakeHealth(recovery_action=1): (Sign.RESET_REQUIRED,),
    FakeHealth(recovery_action=3): (),
    FakeHealth(recovery_action=7): (Sign.RESET_REQUIRED,),
    FakeHealth(recovery_action=20): (),
    FakeHealth(recovery_action=-1): (),
    FakeHealth(fabric_state=2): (Sign.FABRIC_NOT_READY,),
    FakeHealth(fabric_state=3): (),
}
SICK = [FakeGpu(health=health) for health in HEALTH]
ARCHITECTURES = {2: "kepler", 7: "ampere", 8: "ada-lovelace", 10: "blackwell", 77: ""}
# Compute and graphics contexts, -1 where the driver does not tell: the number of processes.
RUNNING = {(0, 0): 0, (3, 1): 3, (0, 2): 2, (2, -1): 2, (-1, -1): None}
PROHIBITED = "its compute mode is prohibited, so no program can compute on it: run `nvidia-smi -i 0000:11:00.0 -c 0`"
MODES = [FakeGpu(facts=FakeFacts(compute_mode=mode)) for mode in (0, 2, 3, 9)]
IN_FABRIC = Fabric(FabricState.COMPLETED, 0, "01234567-89ab-cdef-0123-456789abcdef", 5)
# What NVML says of GPUs, in numbers, and which value of a field that makes of each.
TOLD: dict[str, tuple[Sequence[FakeGpu], Sequence[object]]] = {
    "brand": ([FakeGpu(brand=n) for n in (1, 16, 99, -1)], ["quadro", "titanrtx", "unknown", ""]),
    "architecture": (
        [FakeGpu(facts=FakeFacts(architecture=number)) for number in ARCHITECTURES],
        [*ARCHITECTURES.values()],
    ),
    "fabric": (
        [H100, *(FakeGpu(fabric=FakeFabric(state=state, status=3)) for state in range(4))],
        [IN_FABRIC, None, *(Fabric(state, 3, "00000000-0000-0000-0000-000000000000") for state in FabricState)],
    ),
    "compute_mode": (MODES, [ComputeMode.DEFAULT, ComputeMode.PROHIBITED, ComputeMode.EXCLUSIVE_PROCESS, None]),
    "unavailable": ([*MODES, *SICK], ["", PROHIBITED, "", "", *("" for _ in SICK)]),
    "ecc": ([H100, *MODES], [Ecc(current=True, pending=False), *[Ecc(current=True, pending=True)] * 4]),
    "numa_node": ([FakeGpu(numa=1), FakeGpu(numa=-1)], [1, None]),
    "signs": (SICK, [*HEALTH.values()]),
    "recovery_action": (
        [FakeGpu(health=FakeHealth(recovery_action=action)) for action in (*range(9), -1)],
        [*RecoveryAction, None, None],
    ),
    "remap_pending": ([FakeGpu(health=FakeHealth(remap_pending=n)) for n in (0, 1, -1)], [False, True, None]),
    "processes": ([FakeGpu(running=running) for running in RUNNING], [*RUNNING.values()]),
}


@pytest.mark.parametrize(("field", "fakes", "values"), [(name, *case) for name, case in TOLD.items()], ids=TOLD)
def test_what_nvml_says_in_numbers(
    machine: Machine, field: str, fakes: Sequence[FakeGpu], values: Sequence[object]
) -> None:
    gpus = machine.look(fakes).gpus
    assert [getattr(gpu, field) for gpu in gpus] == values


# --- MIG --------------------------------------------------------------------------------------------------------------

MIG_UUIDS = [GpuUuid(f"MIG-{n}0000000-0000-5000-8000-000000000000") for n in range(3)]
# Index 1 is a hole: an instance that was removed.
PARTS = (
    FakeMig(place=0, uuid=MIG_UUIDS[0], gi=2, slices=3, memory_mib=40192, engines=(42, 3, 2, 0, 1, 4)),
    FakeMig(place=2, uuid=MIG_UUIDS[2], gi=9, profile="1g.10gb+me"),
)
PARTITIONED = FakeGpu(minor=2, mig=(1, 1), memory_bytes=80 * 2**30, parts=PARTS)


def test_mig_devices_have_the_profile_of_their_slices_or_name(machine: Machine) -> None:
    """Their profiles follow from slices and memory, or from the driver's own name."""
    whole, cut = machine.look([FakeGpu(mig=(-1, -1)), PARTITIONED]).gpus
    assert (whole.mig_enabled, whole.mig, cut.mig_enabled) == (False, (), True)
    first = MigDevice(
        index=0,
        uuid=MIG_UUIDS[0],
        gpu_instance_id=2,
        compute_instance_id=0,
        profile="3g.40gb",
        memory_bytes=40192 * 2**20,
        engines=MigEngines(42, 3, 2, 0, 1, 4),
    )
    second = replace(
        first,
        index=2,
        uuid=MIG_UUIDS[2],
        gpu_instance_id=9,
        profile="1g.10gb+me",
        memory_bytes=9728 * 2**20,
        engines=MigEngines(*[0] * 6),
    )
    assert cut.mig == (first, second)
    assert not machine.look([replace(PARTITIONED, parts=())]).parts


def test_a_mig_device_has_the_placement_of_its_gpu_instance(machine: Machine) -> None:
    placed = replace(PARTITIONED, parts=(replace(PARTS[0], start=4), replace(PARTS[1], start=0)))
    assert [part.device.placement for part in machine.look([placed]).parts] == [4, 0]
    for function in ("nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo"):
        for part in machine.look([placed], [Act(function, "fail", 999)]).parts:
            assert part.device.placement is None
            assert function not in why_not(part)


# Two GPUs of four that share something, and the sentence.
UUID = FakeGpu(uuid="GPU-77777777-0000-4000-8000-000000000000")
SHARING: dict[str, tuple[list[FakeGpu], str]] = {
    "a UUID": ([UUID, FakeGpu(), UUID, FakeGpu()], f"UUID {UUID.uuid} is reported 2 times, of GPU 0 and 2"),
    "a minor": (
        [FakeGpu(minor=5), FakeGpu(), FakeGpu(minor=5), FakeGpu()],
        "minor 5 is reported 2 times, of GPU 0 and 2",
    ),
    "a MIG device's UUID": (
        [PARTITIONED, FakeGpu(), replace(PARTITIONED, minor=4), FakeGpu()],
        "UUID MIG-",
    ),
    "an address": ([FakeGpu(bus=9), FakeGpu(), FakeGpu(bus=9), FakeGpu()], "bus id 0000:09:00.0 is reported 2 times"),
}


@pytest.mark.parametrize(("fakes", "sentence"), SHARING.values(), ids=SHARING)
def test_gpus_that_share_a_name_are_withheld_and_the_others_stay(
    machine: Machine, fakes: list[FakeGpu], sentence: str
) -> None:
    near = [(a, b, "NODE") for a in range(4) for b in range(a)]
    inventory = machine.look(fakes, ancestors=near)
    assert [gpu.index for gpu in inventory.gpus] == [1, 3]
    assert [fault.index for fault in inventory.faults] == [0, 2]
    assert all(fault.reason.startswith(sentence) for fault in inventory.faults)
    assert [(link.a, link.b) for link in inventory.links] == [(1, 3)]


def test_processes_of_mig_devices(machine: Machine) -> None:
    busy, idle = replace(PARTS[0], running=(1, 0)), replace(PARTS[1], running=(0, 0))
    cut = machine.look([replace(PARTITIONED, parts=(busy, idle))])
    assert [described(unit).processes for unit in cut.units] == [0, 1, 0]


def test_when_processes_started_where_their_pids_are_this_machines(machine: Machine) -> None:
    us = process_of(os.getpid())
    seen, unseen = (machine.look([FakeGpu(running=(1, 0), first_pid=pid)]).gpus[0] for pid in (os.getpid(), 0))
    assert us
    assert (seen.processes, seen.started) == (1, (us.started,) if has_hosts_pids() else ())
    assert seen.pids == ((os.getpid(),) if has_hosts_pids() else ())
    assert (unseen.processes, unseen.started, unseen.pids) == (1, (), ())


def test_while_mig_mode_is_changing_there_are_no_mig_devices(machine: Machine) -> None:
    gpus = machine.look([replace(PARTITIONED, mig=(1, 0)), replace(PARTITIONED, mig=(0, 1), minor=3)]).gpus
    assert [gpu.mig for gpu in gpus] == [(), ()]
    assert all("MIG mode is changing: it takes effect with the GPU's next reset" in gpu.unavailable for gpu in gpus)


def test_mig_devices_that_fail_cost_their_gpu_or_themselves(machine: Machine) -> None:
    for function in ("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"):
        for code in (15, 999):
            first, cut = machine.look([FakeGpu(), PARTITIONED], [Act(function, "fail", code, gpu=1)]).gpus
            assert (first.unavailable, cut.mig_enabled) == ("", True)
            assert cut.unavailable.startswith(f"{function}: ")
    (gpu,) = machine.look([PARTITIONED], [Act("nvmlDeviceGetGpuInstanceId", "fail", 6)]).gpus  # removed meanwhile
    assert (gpu.mig, gpu.unavailable) == ((), "")
    (gpu,) = machine.look([PARTITIONED], [Act("nvmlDeviceGetAttributes_v2", "fail", 999)]).gpus
    assert [why_not(part).split(":")[0] for part in gpu.parts] == ["nvmlDeviceGetAttributes_v2"] * 2
    assert gpu.unavailable == ""
    (gpu,) = machine.look([PARTITIONED], [Act("nvmlDeviceGetAttributes_v2", "fail", 15)]).gpus
    assert "(15)" in gpu.unavailable


def test_the_profile_in_a_name() -> None:
    names = ("A100-SXM4-40GB MIG 1g.5gb", "H100 80GB HBM3 MIG 1c.3g.40gb", "H100 80GB HBM3", "MIG what", "1g.5gb")
    assert [profile_in(f"NVIDIA {name}") for name in names] == ["1g.5gb", "1c.3g.40gb", "", "", ""]


# --- links ------------------------------------------------------------------------------------------------------------


def links(machine: Machine, gpus: Sequence[FakeGpu], *acts: Act) -> tuple[Link, ...]:
    near = [(a, b, "NODE") for a in range(len(gpus)) for b in range(a)]
    return machine.look(gpus, acts, ancestors=near).links


MESH = [FakeGpu(nvlinks=(1, 1, 2)), FakeGpu(nvlinks=(0, 0)), FakeGpu(nvlinks=(0,))]


def test_direct_links_and_through_switches_as_many_as_the_gpu_with_fewer_has(machine: Machine) -> None:
    assert links(machine, MESH) == (Link(0, 1, "NODE", 2), Link(0, 2, "NODE", 1), Link(1, 2, "NODE", 0))
    gpus = [FakeGpu(nvlinks=(SWITCH,) * 18), FakeGpu(nvlinks=(SWITCH,) * 16)]
    assert links(machine, gpus) == (Link(0, 1, "NODE", 16),)
    assert links(machine, gpus, Act("nvmlDeviceGetP2PStatus", "deny")) == (Link(0, 1, "NODE", 0),)  # fabric not up


def test_a_gpu_that_cannot_be_asked_has_the_links_that_others_report(machine: Machine) -> None:
    switched = links(machine, [FakeGpu(nvlinks=(SWITCH,))] * 3, Act("nvmlDeviceGetName", "fail", 15, gpu=1))
    assert [(link.a, link.b) for link in switched] == [(0, 2)]
    found = links(machine, MESH, Act("nvmlDeviceGetName", "fail", 15, gpu=0))
    assert found == (Link(0, 1, "SYS", 2), Link(0, 2, "SYS", 1), Link(1, 2, "NODE", 0))


def test_a_gpu_that_is_only_set_up_wrongly_keeps_its_links(machine: Machine) -> None:
    """In prohibited mode, or waiting for its reset into MIG mode."""
    whole = FakeGpu(nvlinks=(SWITCH,) * 4)
    expected = links(machine, [whole] * 3)
    for odd in (replace(whole, facts=FakeFacts(compute_mode=2)), replace(whole, mig=(0, 1))):
        assert links(machine, [whole, odd, whole]) == expected
