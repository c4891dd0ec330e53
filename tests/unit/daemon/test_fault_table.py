"""Whatever a driver does, containers for healthy GPUs are created at once, and nothing has to be started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.driver.scan import folder_signatures
from nri_gpu.inventory.nvml_client import GPU_GONE, UNSUPPORTED
from tests.support.driver_root import make_driver_root
from tests.support.log import Log
from tests.support.nvml import Act, FakeMig, build_fake_nvml
from tests.support.nvml.build import GARBAGE
from tests.unit.daemon.rig import DEADLINES, DRIVER, Rig, gpus

# nvmlReturn_t as NVIDIA/go-nvml pkg/nvml/const.go lists them, success and what no driver returns left out.
CODES = (1, 2, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 17, 18, 19, 20, 23, 25, 27, 28, 29, 999)
INIT, COUNT, HANDLE, UUID, NAME = (
    "nvmlInitWithFlags",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
)
TWO = gpus(2)
PARTS = (
    FakeMig(place=0, gi=1, uuid="MIG-a0000000-0000-4000-8000-000000000000"),
    FakeMig(place=1, gi=2, uuid="MIG-b0000000-0000-4000-8000-000000000000"),
)
CUT = replace(TWO[1], mig=(1, 1), parts=PARTS)


@pytest.fixture
def rig(tmp_path: Path, log: Log) -> Iterator[Rig]:
    del log  # thousands of decisions, and nobody to read them
    made = Rig(tmp_path, TWO)
    yield made
    assert made.answered_while_asking() >= 1  # and in `running` it is asserted that no answer was waited for


async def held(rig: Rig, fact: Callable[[], object], what: str) -> None:
    """It becomes so, and creates for GPU 0 go on after it."""
    await rig.until(what, fact)
    before = rig.created
    await rig.until("creates to go on", lambda: rig.created > before)


def gpu(rig: Rig, index: int = 1) -> str:
    """What a container that asks for it is told."""
    return rig.ask(f"device={index}")


@pytest.mark.parametrize("function", [INIT, COUNT])
async def test_each_code_of_the_whole_driver_keeps_the_last_snapshot(rig: Rig, function: str) -> None:
    async with rig.running():
        for code in CODES:
            rig.play(TWO, Act(function, "fail", code))
            await rig.refreshed()
            assert rig.cache.fault, code
            assert len(rig.cache.fault) <= 700
            assert gpu(rig) == ""
        rig.play(TWO)
        await rig.refreshed()
        assert rig.cache.fault == ""
    assert rig.refused == []
    assert len(set(rig.faults)) == len(rig.faults) == len(CODES)  # each is said once


# A call of each kind, with the codes that cost its GPU nothing; all calls are in inventory/test_survey.py.
CALLS: dict[str, frozenset[int]] = {
    HANDLE: frozenset(),
    NAME: frozenset(),
    "nvmlDeviceGetMigMode": UNSUPPORTED,
    "nvmlDeviceGetBrand": frozenset(CODES) - GPU_GONE,
    "nvmlDeviceGetNvLinkState": frozenset(CODES),
}


@pytest.mark.parametrize("function", CALLS)
async def test_each_code_of_one_gpu_costs_that_gpu_at_most(rig: Rig, function: str) -> None:
    async with rig.running():
        for code in CODES:
            rig.play(TWO, Act(function, "fail", code, gpu=1))
            await rig.refreshed()
            assert rig.cache.fault == ""
            told = gpu(rig)
            assert told == "" if code in CALLS[function] else f"({code})" in told, (code, told)
        rig.play(TWO)
        await rig.refreshed()
        assert gpu(rig) == ""
    assert rig.refused == []


# A call that may wake a GPU has longer than the others.
HANGS = {
    "dlopen": DEADLINES.slow_call_s,
    INIT: DEADLINES.slow_call_s,
    COUNT: DEADLINES.call_s,
    HANDLE: DEADLINES.slow_call_s,
    UUID: DEADLINES.call_s,
    NAME: DEADLINES.call_s,
    "nvmlDeviceGetMigDeviceHandleByIndex": DEADLINES.call_s,
    "nvmlDeviceGetNvLinkState": DEADLINES.call_s,
    "nvmlShutdown": DEADLINES.call_s,
}


@pytest.mark.parametrize(("function", "limit_s"), HANGS.items(), ids=HANGS)
async def test_a_hang_stalls_nobody_and_is_noticed_in_its_time(rig: Rig, function: str, limit_s: float) -> None:
    async with rig.running():
        machine = [TWO[0], CUT] if "Mig" in function else TWO
        rig.play(machine, Act(function, "hang"))
        if function == "dlopen":  # of the next process alone
            assert rig.source.child
            os.kill(rig.source.child, signal.SIGKILL)
            rig.cache.poke()
            await rig.until("its end", lambda: "SIGKILL" in rig.cache.fault)
        rig.cache.poke()
        await rig.hangs(function, limit_s)
        rig.play(TWO)
        rig.cache.poke()
        await held(rig, lambda: rig.cache.fault == "", "an answer again")
        assert rig.cache.age_s() == 0.0
    assert rig.refused == []


@pytest.mark.parametrize("sort", range(GARBAGE))
async def test_a_library_that_writes_nonsense_into_our_pipe(rig: Rig, sort: int) -> None:
    """Another process is asked next; what was believed stays, and ages."""
    async with rig.running():
        pid, known = rig.source.child, rig.node_state.node.inventory
        rig.play(TWO, Act(NAME, "babble", sort, gpu=0))
        rig.cache.poke()
        await held(rig, lambda: rig.cache.fault, "the nonsense to be noticed")
        assert "the NVML process" in rig.cache.fault
        assert rig.node_state.node.inventory == known
        rig.clock.advance(7.0)
        assert (rig.cache.age_s() or 0.0) >= 7.0
        rig.play(TWO)
        rig.cache.poke()
        await held(rig, lambda: rig.cache.fault == "", "sense again")
        assert rig.source.child != pid
    assert rig.refused == []


async def test_a_driver_upgrade(rig: Rig) -> None:
    """Files first, then the module: no restart, and no container with one driver's files on another's module."""

    def drivers() -> tuple[str, str]:
        node = rig.node_state.node
        return node.driver.version if node.driver else "", node.inventory.driver_version

    async with rig.running():
        assert drivers() == (DRIVER, DRIVER)
        new = "590.10"
        fresh = rig.base / "fresh"
        make_driver_root(fresh, new)
        build_fake_nvml(fresh, TWO, driver=new)
        rig.root.rename(rig.base / "old")
        fresh.rename(rig.root)
        rig.load(new)
        rig.watch.notify()
        await held(rig, lambda: drivers() == (new, new) and gpu(rig) == "", "the new driver")
    assert all("580.95.05" in refusal or "590.10" in refusal for refusal in rig.refused)


async def test_a_snapshot_that_is_no_longer_true_is_corrected(rig: Rig) -> None:
    async with rig.running():
        await rig.refreshed()
        # The fake library leaves notes beside itself, and the driver's folder is another one for it: looked at again.
        await rig.until("the last look at the files", lambda: rig.driver.scanned == folder_signatures(rig.root))
        await rig.snapshots.keep()
    rig.play(TWO, Act(HANDLE, "fail", 15, gpu=1))
    again = Rig(rig.base, None)
    assert again.snapshots.restore(again.cache)
    async with again.running():
        await held(again, lambda: again.cache.confirmed, "NVML's word")
        assert "(15)" in gpu(again)
        assert gpu(again, 0) == ""
