"""How many processes are on a GPU, from a made-up NVML through the unmodified nvidia-ml-py, up to who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.child import NvmlChild
from nri_gpu.inventory.controller import InventoryCache
from tests.support.nvml import Act, FakeGpu, FakeMig, build_fake_nvml, configure

COMPUTE, GRAPHICS = "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"
NOT_SUPPORTED, UNKNOWN = 3, 999


def found(root: Path, running: tuple[int, int], faults: Sequence[Act] = (), without: Sequence[str] = ()) -> int | None:
    """The count for the one GPU of a machine."""
    build_fake_nvml(root, [FakeGpu(running=running)], faults, without=without)

    async def once() -> Inventory:
        child = NvmlChild(str(root))
        try:
            return await child.refresh()
        finally:
            await child.close()

    [gpu] = asyncio.run(once()).gpus
    assert not gpu.unavailable
    return gpu.processes


OLD, OLDER = (f"{COMPUTE}_v3", f"{GRAPHICS}_v3"), (f"{COMPUTE}_v2", f"{GRAPHICS}_v2")
COUNTS: dict[str, tuple[tuple[int, int], tuple[Act, ...], tuple[str, ...], int | None]] = {
    "nobody": ((0, 0), (), (), 0),
    "one that computes and draws, and two more": ((3, 1), (), (), 3),
    "only drawing": ((0, 2), (), (), 2),
    "a GPU that does no graphics": ((2, -1), (), (), 2),
    "a GPU that tells nothing": ((-1, -1), (), (), None),
    "an older driver": ((2, 0), (), OLD, 2),
    "a driver older than MIG": ((3, 1), (), (*OLD, *OLDER), 3),
    "a driver without these functions": ((2, 0), (), (*OLD, *OLDER, COMPUTE, GRAPHICS), None),
    "a call that fails": ((0, 0), (Act(f"{GRAPHICS}_v3", "fail", UNKNOWN),), (), None),
}


@pytest.mark.parametrize(("running", "faults", "without", "expected"), COUNTS.values(), ids=COUNTS)
def test_counted(
    tmp_path: Path, running: tuple[int, int], faults: tuple[Act, ...], without: tuple[str, ...], expected: int | None
) -> None:
    assert found(tmp_path, running, faults, without) == expected


def test_each_mig_device_has_its_own(tmp_path: Path) -> None:
    parts = tuple(
        FakeMig(place=n, uuid=f"MIG-{n}0000000-0000-5000-8000-000000000000", gi=7 + n, running=(n, 0)) for n in range(2)
    )
    build_fake_nvml(tmp_path, [FakeGpu(mig=(1, 1), parts=parts, running=(1, 0))])

    async def once() -> Inventory:
        child = NvmlChild(str(tmp_path))
        try:
            return await child.refresh()
        finally:
            await child.close()

    assert [unit.processes for unit in asyncio.run(once()).units] == [1, 0, 1]


def test_a_look_is_told_of_although_only_processes_changed(tmp_path: Path) -> None:
    """And nothing is published then: processes come and go all the time."""
    build_fake_nvml(tmp_path, [FakeGpu(running=(2, 0))])
    looks: list[tuple[int | None, float]] = []
    published: list[Inventory] = []
    ticks = iter(range(100))

    async def run() -> None:
        cache = InventoryCache(
            NvmlChild(str(tmp_path)),
            published.append,
            lambda _: None,
            monotonic=lambda: float(next(ticks)),
        )
        cache.subscribe(lambda inventory, began: looks.append((inventory.gpus[0].processes, began)))
        await cache.refresh()
        configure(tmp_path, [FakeGpu()])
        await cache.refresh()
        configure(tmp_path, [FakeGpu()], [Act("nvmlInitWithFlags", "fail", UNKNOWN)])
        await cache.refresh()
        await cache._source.close()

    asyncio.run(run())
    assert looks == [(2, 0.0), (0, 2.0)]  # at 1.0 the first was answered
    assert len(published) == 1
