"""How GPUs are set up, through the real binding and a made-up library; a fact that is missing is no fault."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.gpu import ComputeMode, Ecc, Fabric, FabricState, Gpu
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.controller import InventoryCache
from tests.support import builders as make
from tests.support.nvml import Act, FakeFabric, FakeFacts, FakeGpu
from tests.unit.inventory.played import played

CLUSTER = "0123456789abcdef0123456789abcdef"
FABRIC = FakeFabric(state=3, clique=5, health_mask=0x4002, cluster=CLUSTER)
H100 = FakeGpu(facts=FakeFacts(ecc=(1, 0), addressing=1), fabric=FABRIC)
NOTHING = ("", "", None, None, None, "", None)
CALLS = (
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetAddressingMode",
    "nvmlDeviceGetGpuFabricInfoV",
)
V1 = "nvmlDeviceGetGpuFabricInfo"


def facts(gpu: Gpu) -> tuple[object, ...]:
    return gpu.architecture, gpu.cpus, gpu.compute_mode, gpu.persistence, gpu.ecc, gpu.addressing, gpu.fabric


def test_all_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "bus/pci/devices/0000:10:00.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text("0-15,32-47\n")
    (gpu,) = played(tmp_path, [H100]).gpus
    assert facts(gpu)[:-1] == ("hopper", "0-15,32-47", ComputeMode.DEFAULT, True, Ecc(True, False), "hmm")
    cluster = "01234567-89ab-cdef-0123-456789abcdef"
    assert gpu.fabric == Fabric(FabricState.COMPLETED, 0, cluster, 5, 0x4002)
    assert gpu.fabric.health_mask == 0x4002  # not part of what makes two equal


def test_an_old_driver_tells_none(tmp_path: Path) -> None:
    (gpu,) = played(tmp_path, [H100], without=[*CALLS, V1]).gpus
    assert (facts(gpu), gpu.unavailable, gpu.processes) == (NOTHING, "", 0)


def test_a_gpu_that_has_none_of_it(tmp_path: Path) -> None:
    (gpu,) = played(tmp_path, [FakeGpu()]).gpus
    assert (facts(gpu), gpu.unavailable) == (NOTHING, "")


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_costs_its_fact_alone(tmp_path: Path, call: str) -> None:
    """Of two GPUs, with each code short of a GPU that is gone."""
    whole = played(tmp_path, [H100]).gpus[0]
    for code in (2, 3, 4, 17, 18, 999):
        acts = [Act(call, "fail", code, gpu=0), Act(V1, "fail", code, gpu=0)]
        first, second = played(tmp_path, [H100, H100], acts).gpus
        assert sum(one != other for one, other in zip(facts(first), facts(whole), strict=True)) == 1
        assert (first.unavailable, second.unavailable, facts(second)) == ("", "", facts(whole))


@pytest.mark.parametrize("code", [15, 16])
@pytest.mark.parametrize("call", CALLS)
def test_a_gpu_that_is_gone_is_gone_in_any_call(tmp_path: Path, call: str, code: int) -> None:
    first, second = played(tmp_path, [H100, H100], [Act(call, "fail", code, gpu=0)]).gpus
    assert f"({code})" in first.unavailable
    assert second.unavailable == ""


def test_fabric_by_the_older_call(tmp_path: Path) -> None:
    for lacking in ({"without": [CALLS[-1]]}, {"acts": [Act(CALLS[-1], "fail", 25)]}):
        (gpu,) = played(tmp_path, [H100], **lacking).gpus
        assert gpu.fabric
        assert (gpu.fabric.state, gpu.fabric.clique, gpu.fabric.health_mask) == (FabricState.COMPLETED, 5, None)


@pytest.mark.parametrize(("state", "word"), [(0, None), (1, "not-started"), (2, "in-progress"), (3, "completed")])
def test_fabric_states(tmp_path: Path, state: int, word: str | None) -> None:
    (gpu,) = played(tmp_path, [FakeGpu(fabric=FakeFabric(state=state, status=3))]).gpus
    assert (gpu.fabric and (gpu.fabric.state, gpu.fabric.status)) == (word and (word, 3))


@pytest.mark.parametrize(
    ("number", "word"), [(2, "kepler"), (7, "ampere"), (8, "ada-lovelace"), (10, "blackwell"), (77, "")]
)
def test_architectures(tmp_path: Path, number: int, word: str) -> None:
    assert played(tmp_path, [FakeGpu(facts=FakeFacts(architecture=number))]).gpus[0].architecture == word


def test_a_gpu_in_prohibited_mode_is_unavailable_and_says_the_way_out(tmp_path: Path) -> None:
    gpus = [FakeGpu(facts=FakeFacts(compute_mode=mode)) for mode in (0, 2, 3, 9)]
    default, none, one, unknown = played(tmp_path, gpus).gpus
    assert none.unavailable == (
        "its compute mode is prohibited, so no program can compute on it: run `nvidia-smi -i 0000:11:00.0 -c 0`"
    )
    assert none.fabric is None
    assert none.ecc is not None  # the rest is told all the same
    assert (default.unavailable, one.unavailable, unknown.unavailable) == ("", "", "")
    assert (one.compute_mode, unknown.compute_mode) == (ComputeMode.EXCLUSIVE_PROCESS, None)


def test_versions_of_modules(tmp_path: Path) -> None:
    for name, version in (("nvidia", "580.95.05"), ("nvidia_uvm", "580.95.05"), ("nvidia_drm", None), ("ext4", "1")):
        folder = tmp_path / "module" / name
        folder.mkdir(parents=True)
        if version:
            (folder / "version").write_text(f"{version}\n")
    modules = played(tmp_path, [FakeGpu()]).modules
    assert modules == {"nvidia": "580.95.05", "nvidia_uvm": "580.95.05", "nvidia_drm": ""}


# What moves by itself makes no new snapshot; what decides, or an operator sets, does.
MOVES = {
    "an MPS daemon's mode": ({"compute_mode": ComputeMode.EXCLUSIVE_PROCESS}, 1),
    "a bit of the fabric's health": ({"fabric": Fabric(FabricState.COMPLETED, health_mask=1)}, 1),
    "the fabric's state": ({"fabric": Fabric(FabricState.IN_PROGRESS)}, 2),
    "persistence": ({"persistence": True}, 2),
    "ECC": ({"ecc": Ecc(True, True)}, 2),
    "prohibited": ({"compute_mode": ComputeMode.PROHIBITED, "unavailable": "its compute mode is prohibited"}, 2),
}


@pytest.mark.parametrize(("moved", "published"), MOVES.values(), ids=MOVES)
def test_what_flaps_is_not_published(moved: dict[str, object], published: int) -> None:
    gpu = replace(make.gpu(0), compute_mode=ComputeMode.DEFAULT, fabric=Fabric(FabricState.COMPLETED, health_mask=0))
    looks = [make.inventory((gpu,)), make.inventory((replace(gpu, **moved),))]

    class Looks:
        async def refresh(self) -> Inventory:
            return looks.pop(0)

        async def close(self) -> None:
            """Nothing was opened."""

    seen: list[Inventory] = []
    cache = InventoryCache(Looks(), seen.append, lambda _fault: None)

    async def twice() -> None:
        await cache.refresh()
        await cache.refresh()

    asyncio.run(twice())
    assert len(seen) == published
    assert cache.current is not None
    assert all(getattr(cache.current.gpus[0], name) == value for name, value in moved.items())
