"""The NVML process against a made-up libnvidia-ml.so.1, through the unmodified nvidia-ml-py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, GpuUuid, PciBusId
from nri_gpu.domain.health import Sign
from nri_gpu.domain.node import GpuFault, Inventory, Link
from nri_gpu.inventory.child import NvmlChild
from nri_gpu.simulation.topology import load_topology
from tests.support.nvml import SWITCH, Act, FakeFacts, FakeGpu, build_fake_nvml, configure, evidence, gpus_of

ROOT = Path(__file__).parents[3]
FOUR = [FakeGpu() for _ in range(4)]


def ask(driver_root: Path, sysfs: str = "/sys") -> Inventory:
    """One refresh by a process of its own."""

    async def once() -> Inventory:
        child = NvmlChild(str(driver_root), sysfs=sysfs, wall=lambda: 7.0)
        try:
            return await child.refresh()
        finally:
            await child.close()

    return asyncio.run(once())


def refusal(driver_root: Path, sysfs: str = "/sys") -> str:
    with pytest.raises(InventoryError) as caught:
        ask(driver_root, sysfs)
    return str(caught.value)


def module(tmp_path: Path, version: str) -> str:
    """A sysfs of a machine with that kernel module."""
    path = tmp_path / "sys/module/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(version + "\n")
    return str(tmp_path / "sys")


def played(
    tmp_path: Path, faults: Sequence[Act], gpus: Sequence[FakeGpu] = FOUR, without: Sequence[str] = ()
) -> Inventory:
    return ask(build_fake_nvml(tmp_path / "driver", gpus, faults, without=without), str(tmp_path))


def test_one_gpu_in_full(tmp_path: Path) -> None:
    gpu = FakeGpu(
        minor=3,
        uuid="GPU-01234567-89ab-cdef-0123-456789abcdef",
        domain=0x1,
        bus=0x3B,
        model="NVIDIA L4",
        memory_bytes=24_152_899_584,
        arch=(8, 9),
        numa=1,
        brand=2,
    )
    inventory = ask(build_fake_nvml(tmp_path, [gpu]))
    expected = Gpu(
        index=0,
        minor_number=3,
        uuid=GpuUuid("GPU-01234567-89ab-cdef-0123-456789abcdef"),
        pci_bus_id=PciBusId("0001:3b:00.0"),
        model="NVIDIA L4",
        memory_bytes=24_152_899_584,
        arch=(8, 9),
        numa_node=1,
        brand="tesla",
    )
    assert inventory == Inventory(taken_at=7.0, gpus=(expected,), driver_version="580.95.05", cuda_version="13.0")


def make_drm(sysfs: Path, gpu: Gpu) -> None:
    """The kernel's folder of a GPU's graphics nodes, with what else it holds."""
    folder = sysfs / "bus/pci/devices" / gpu.pci_bus_id / "drm"
    for name, number in [(node.name, f"{node.major}:{node.minor}") for node in gpu.drm]:
        (folder / name).mkdir(parents=True)
        (folder / name / "dev").write_text(f"{number}\n")
    if gpu.drm:
        for name, number in (("card9-DP-1", "226:9"), ("controlD64", "226:64"), ("card8", "nothing")):
            (folder / name).mkdir()
            (folder / name / "dev").write_text(number)
        (folder / "card7").mkdir()  # on its way out: no number any more


@pytest.mark.parametrize("name", ["four-gpus", "hgx-h100", "dgx-a100", "pcie-8"])
def test_a_topology_and_nvml_tell_of_a_node_alike(tmp_path: Path, name: str) -> None:
    simulated = load_topology(ROOT / "config/topologies" / f"{name}.toml", wall=lambda: 7.0)
    gpus, ancestors = gpus_of(simulated)
    sysfs = tmp_path / "sys"
    for gpu in simulated.gpus:
        make_drm(sysfs, gpu)
        folder = sysfs / "bus/pci/devices" / gpu.pci_bus_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "local_cpulist").write_text(f"{gpu.cpus}\n")
    for module_name, version in simulated.modules.items():
        (sysfs / "module" / module_name).mkdir(parents=True)
        (sysfs / "module" / module_name / "version").write_text(f"{version}\n")
    fake = build_fake_nvml(tmp_path, gpus, ancestors=ancestors, driver=simulated.driver_version)
    inventory = ask(fake, str(sysfs))
    assert inventory == replace(
        simulated,
        majors=inventory.majors,
        cuda_version=inventory.cuda_version,
        simulated=False,
        extras={},
        numa=(),
    )


def test_nvml_without_gpus_is_an_inventory(tmp_path: Path) -> None:
    inventory = played(tmp_path, [], gpus=[])
    assert inventory.gpus == ()
    assert inventory.driver_version == "580.95.05"


def test_the_library_is_found_in_a_flat_root(tmp_path: Path) -> None:
    build_fake_nvml(tmp_path, FOUR, lib_dir="lib64")
    assert len(ask(tmp_path).gpus) == 4
    assert len(ask(tmp_path / "lib64").gpus) == 4


# --- nothing at all ---------------------------------------------------------------------------------------------------


def test_no_library_names_the_folders(tmp_path: Path) -> None:
    sentence = refusal(tmp_path)
    assert f"below the driver root {tmp_path}" in sentence
    assert f"{tmp_path}/usr/lib64" in sentence


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "lib64/libnvidia-ml.so.1"
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF\x02" + bytes(100))
    assert refusal(tmp_path).startswith(f"cannot load {path}: ")


def test_no_driver(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path / "driver", FOUR, [Act("nvmlInitWithFlags", "fail", 9)])
    sentence = refusal(root, str(tmp_path))
    assert "Driver Not Loaded" in sentence
    assert "modprobe nvidia" in sentence


def test_no_nodes(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path / "driver", FOUR, [Act("nvmlInitWithFlags", "fail", 9)])
    assert "nvidia-modprobe -c 255" in refusal(root, module(tmp_path, "580.95.05"))


def test_version_mismatch_names_both(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path / "driver", FOUR, [Act("nvmlInitWithFlags", "fail", 18)])
    sentence = refusal(root, module(tmp_path, "570.195.03"))
    assert "is 580.95.05 and the loaded kernel module is 570.195.03" in sentence


def test_a_library_without_a_start(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path / "driver", FOUR, without=["nvmlInitWithFlags", "nvmlInit_v2"])
    assert "update the driver" in refusal(root)


def test_gpus_that_cannot_be_counted(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, FOUR, [Act("nvmlDeviceGetCount_v2", "fail", 999)])
    assert refusal(root) == "nvmlDeviceGetCount: Unknown Error (999)"


# --- one of many ------------------------------------------------------------------------------------------------------

IDENTITY = ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo_v3"]
DESCRIPTION = [
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetMemoryAffinity",
    "nvmlDeviceGetMigMode",
]


@pytest.mark.parametrize("function", IDENTITY)
def test_a_lost_gpu_without_a_name_is_a_fault(tmp_path: Path, function: str) -> None:
    inventory = played(tmp_path, [Act(function, "fail", 15, gpu=2)])
    assert [gpu.index for gpu in inventory.gpus] == [0, 1, 3]
    assert all(not gpu.unavailable for gpu in inventory.gpus)
    uuid = "GPU-2fa4e000-0000-4000-8000-000000000002" if function == "nvmlDeviceGetMinorNumber" else ""
    bus_id = "0000:12:00.0" if uuid or function == "nvmlDeviceGetUUID" else ""
    reason = f"{function.removesuffix('_v2')}: GPU is lost (15)"
    assert inventory.faults == (GpuFault(2, reason, 15, Sign.LOST, uuid, bus_id),)


@pytest.mark.parametrize(("code", "sign"), [(16, Sign.RESET_REQUIRED), (999, Sign.UNREADABLE), (4, Sign.UNREADABLE)])
def test_what_a_fault_says_of_a_gpus_health(tmp_path: Path, code: int, sign: Sign) -> None:
    (fault,) = played(tmp_path, [Act("nvmlDeviceGetUUID", "fail", code, gpu=1)]).faults
    assert (fault.code, fault.sign) == (code, sign)


@pytest.mark.parametrize("function", DESCRIPTION)
def test_a_lost_gpu_with_a_name_is_unavailable(tmp_path: Path, function: str) -> None:
    inventory = played(tmp_path, [Act(function, "fail", 15, gpu=2)])
    assert [gpu.unavailable for gpu in inventory.gpus] == ["", "", f"{function}: GPU is lost (15)", ""]
    assert inventory.faults == ()


def test_text_that_is_no_text_costs_one_gpu(tmp_path: Path) -> None:
    inventory = played(tmp_path, [Act("nvmlDeviceGetName", "rubbish", gpu=1)])
    assert [bool(gpu.unavailable) for gpu in inventory.gpus] == [False, True, False, False]


def test_a_uuid_that_is_none_costs_one_gpu(tmp_path: Path) -> None:
    inventory = played(tmp_path, [], gpus=[FakeGpu(), FakeGpu(uuid="GPU-../../etc")])
    assert [gpu.index for gpu in inventory.gpus] == [0]
    assert "is not a GPU UUID" in inventory.faults[0].reason
    assert (inventory.faults[0].code, inventory.faults[0].sign) == (0, None)


def test_mig_mode_and_its_change(tmp_path: Path) -> None:
    gpus = [FakeGpu(mig=(-1, -1)), FakeGpu(mig=(1, 1)), FakeGpu(mig=(0, 1))]
    inventory = played(tmp_path, [], gpus=gpus)
    assert [gpu.mig_enabled for gpu in inventory.gpus] == [False, True, False]
    assert [bool(gpu.unavailable) for gpu in inventory.gpus] == [False, False, True]
    assert "next reset" in inventory.gpus[2].unavailable


@pytest.mark.parametrize("code", [4, 999], ids=["no permission", "unknown"])
def test_mig_mode_that_cannot_be_told_is_not_taken_for_none(tmp_path: Path, code: int) -> None:
    inventory = played(tmp_path, [Act("nvmlDeviceGetMigMode", "fail", code, gpu=0)])
    assert inventory.gpus[0].unavailable.startswith("nvmlDeviceGetMigMode: ")


def test_brands_old_new_newer_and_not_told(tmp_path: Path) -> None:
    gpus = [FakeGpu(brand=number) for number in (1, 16, 99, -1)]
    inventory = played(tmp_path, [], gpus=gpus)
    assert [gpu.brand for gpu in inventory.gpus] == ["quadro", "titanrtx", "unknown", ""]
    assert not any(gpu.unavailable for gpu in inventory.gpus)


def test_a_gpu_without_memory_of_its_own(tmp_path: Path) -> None:
    (gpu,) = played(tmp_path, [Act("nvmlDeviceGetMemoryInfo", "fail", 3)], gpus=[FakeGpu()]).gpus
    assert gpu.memory_bytes == 0
    assert gpu.unavailable == ""


# --- what a driver lacks ----------------------------------------------------------------------------------------------

OPTIONAL = [
    "nvmlDeviceGetBrand",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlDeviceGetMemoryAffinity",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetP2PStatus",
]


@pytest.mark.parametrize("symbol", OPTIONAL)
def test_a_missing_symbol_costs_no_gpu(tmp_path: Path, symbol: str) -> None:
    inventory = played(tmp_path, [], gpus=[FakeGpu(nvlinks=(1,)), FakeGpu(nvlinks=(0,))], without=[symbol])
    assert [gpu.unavailable for gpu in inventory.gpus] == ["", ""]
    assert inventory.faults == ()


def test_all_optional_symbols_missing(tmp_path: Path) -> None:
    inventory = played(tmp_path, [], without=OPTIONAL)
    assert [gpu.numa_node for gpu in inventory.gpus] == [None] * 4
    assert (inventory.driver_version, inventory.cuda_version, inventory.links) == ("", "", ())


def test_numa_node_from_sysfs(tmp_path: Path) -> None:
    for bus_id, node in (("0000:10:00.0", "1\n"), ("0000:11:00.0", "-1\n")):
        path = tmp_path / "bus/pci/devices" / bus_id / "numa_node"
        path.parent.mkdir(parents=True)
        path.write_text(node)
    gpus = [FakeGpu(numa=-1)] * 3
    assert [gpu.numa_node for gpu in played(tmp_path, [], gpus=gpus).gpus] == [1, None, None]


@pytest.mark.parametrize("driver", ["580", "../../etc/x", "580.95.05-rc1", "9" * 70])
def test_a_driver_of_an_odd_version_has_none(tmp_path: Path, driver: str) -> None:
    """It names folders, and stands in logs."""
    root = build_fake_nvml(tmp_path, [FakeGpu()])
    configure(root, [FakeGpu()], driver=driver)
    inventory = ask(root)
    assert (inventory.driver_version, len(inventory.gpus)) == ("", 1)


# --- links ------------------------------------------------------------------------------------------------------------


def links(tmp_path: Path, gpus: Sequence[FakeGpu], faults: Sequence[Act] = ()) -> tuple[Link, ...]:
    near = [(a, b, "NODE") for a in range(len(gpus)) for b in range(a)]
    return ask(build_fake_nvml(tmp_path, gpus, faults, ancestors=near)).links


def test_direct_links_are_counted_by_pair(tmp_path: Path) -> None:
    gpus = [FakeGpu(nvlinks=(1, 1, 2)), FakeGpu(nvlinks=(0, 0)), FakeGpu(nvlinks=(0,))]
    assert links(tmp_path, gpus) == (Link(0, 1, "NODE", 2), Link(0, 2, "NODE", 1), Link(1, 2, "NODE", 0))


def test_a_pair_has_the_links_of_its_poorer_gpu(tmp_path: Path) -> None:
    gpus = [FakeGpu(nvlinks=(SWITCH,) * 18), FakeGpu(nvlinks=(SWITCH,) * 16)]
    assert links(tmp_path, gpus) == (Link(0, 1, "NODE", 16),)


def test_a_fabric_that_is_not_up_leads_nowhere(tmp_path: Path) -> None:
    down = Act("nvmlDeviceGetP2PStatus", "deny")
    assert links(tmp_path, [FakeGpu(nvlinks=(SWITCH,))] * 2, [down]) == (Link(0, 1, "NODE", 0),)


def test_a_lost_gpu_has_no_links(tmp_path: Path) -> None:
    gpus = [FakeGpu(nvlinks=(SWITCH,))] * 3
    found = links(tmp_path, gpus, [Act("nvmlDeviceGetName", "fail", 15, gpu=1)])
    assert [(link.a, link.b) for link in found] == [(0, 2)]


def test_a_gpu_that_is_only_set_up_wrongly_keeps_its_links(tmp_path: Path) -> None:
    """In prohibited mode, or waiting for its reset into MIG mode: it is unavailable, and where it was."""
    whole = FakeGpu(nvlinks=(SWITCH,) * 4)
    expected = links(tmp_path, [whole] * 3)
    assert [link.nvlink for link in expected] == [4, 4, 4]
    for odd in (replace(whole, facts=FakeFacts(compute_mode=2)), replace(whole, mig=(0, 1))):
        near = [(0, 1, "NODE"), (0, 2, "NODE"), (1, 2, "NODE")]
        inventory = ask(build_fake_nvml(tmp_path, [whole, odd, whole], ancestors=near))
        assert [bool(gpu.unavailable) for gpu in inventory.gpus] == [False, True, False]
        assert inventory.links == expected


def test_of_a_lost_gpu_its_neighbours_know(tmp_path: Path) -> None:
    """Their links lead to it; it is not asked about them itself."""
    gpus = [FakeGpu(nvlinks=(1, 1, 2)), FakeGpu(nvlinks=(0, 0)), FakeGpu(nvlinks=(0,))]
    found = links(tmp_path, gpus, [Act("nvmlDeviceGetName", "fail", 15, gpu=0)])
    assert found == (Link(0, 1, "SYS", 2), Link(0, 2, "SYS", 1), Link(1, 2, "NODE", 0))
    calls = evidence(tmp_path, "calls").splitlines()
    assert calls.count("nvmlDeviceGetNvLinkState") == 2 * 36


def test_failing_links_cost_nothing_else(tmp_path: Path) -> None:
    names = ["nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState"]
    inventory = played(tmp_path, [Act(name, "fail", 999) for name in names])
    assert inventory.links == ()
    assert [gpu.unavailable for gpu in inventory.gpus] == [""] * 4


# --- the process itself -----------------------------------------------------------------------------------------------


def test_the_library_sees_an_empty_environment_and_no_capabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_A_TEST", "secret")
    root = build_fake_nvml(tmp_path, FOUR)
    ask(root)
    assert evidence(root, "environ") == ""
    status = dict(line.split(":\t", 1) for line in evidence(root, "status").splitlines())
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0000000000000000"}
    assert status["NoNewPrivs"] == "1"


def test_what_the_library_prints_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    inventory = played(tmp_path, [Act("nvmlInitWithFlags", "say"), Act("nvmlDeviceGetUUID", "say")])
    assert len(inventory.gpus) == 4


def test_nvml_is_started_and_shut_for_each_refresh(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, FOUR)

    async def twice() -> tuple[Inventory, Inventory]:
        child = NvmlChild(str(root))
        first = await child.refresh()
        configure(root, FOUR[:2])
        pid, second = child.pid, await child.refresh()
        assert child.pid == pid
        await child.close()
        return first, second

    first, second = asyncio.run(twice())
    assert (len(first.gpus), len(second.gpus)) == (4, 2)
    calls = evidence(root, "calls").split()
    assert [name for name in calls if name in ("nvmlInitWithFlags", "nvmlShutdown")] == [
        "nvmlInitWithFlags",
        "nvmlShutdown",
    ] * 2


def test_a_fault_after_the_start_shuts_nvml_too(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, FOUR, [Act("nvmlDeviceGetCount_v2", "fail", 999)])
    refusal(root)
    assert evidence(root, "calls").split()[-1] == "nvmlShutdown"


def test_a_new_library_is_loaded_by_a_new_process(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, FOUR)

    async def upgrade() -> list[tuple[str, int | None]]:
        child, seen = NvmlChild(str(root)), []
        for driver in ("580.95.05", "590.10.01"):
            build_fake_nvml(root, FOUR, driver=driver)
            seen.append(((await child.refresh()).driver_version, child.pid))
        await child.close()
        return seen

    (old, old_pid), (new, new_pid) = asyncio.run(upgrade())
    assert (old, new) == ("580.95.05", "590.10.01")
    assert old_pid != new_pid
