"""The samples of what GPUs do, through the real binding and a made-up library: after a refresh, and each second."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.sample import MigTarget, SampleTarget, UnitSample
from nri_gpu.inventory.nvml_child import Deadlines, NvmlChild, SampleSink
from nri_gpu.system.child import unkilled
from nri_gpu.usage.sample_child import SampleChild
from tests.support.cgroup import Freezer
from tests.support.nvml import Act, FakeGpu, FakeMig, FakeProcess, FakeUse, build_fake_nvml, configure, evidence, use
from tests.support.running import running
from tests.support.scripted_runtime import until

GPUS = tuple(FakeGpu(uuid=f"GPU-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(2))
TARGETS = tuple(SampleTarget(n, f"0000:{0x10 + n:02x}:00.0", gpu.uuid) for n, gpu in enumerate(GPUS))
PART = "MIG-0b200000-0000-4000-8000-000000000001"
PATIENCE_S = 20.0
BUSY = FakeUse(utilization=93, memory_rate=40, processes=(FakeProcess(41, 2**30, 93), FakeProcess(42, 2**29, 0, "g")))
# Every function that only a sample asks, and one that both ask.
FUNCTIONS = (
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetHandleByPciBusId_v2",
)
SHARED = ("nvmlInitWithFlags", "nvmlDeviceGetUUID", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlShutdown")


class Taken:
    """What a sink was given."""

    def __init__(self) -> None:
        self.samples: list[Sequence[UnitSample]] = []
        self.faults: list[str] = []
        self.sink = SampleSink(lambda: True, self._take, self.faults.append)

    async def _take(self, at: float, units: Sequence[UnitSample]) -> None:
        assert 0 <= time.monotonic() - at < PATIENCE_S
        self.samples.append(units)

    async def next(self) -> Sequence[UnitSample]:
        seen = len(self.samples)
        await until("a sample", lambda: len(self.samples) > seen, PATIENCE_S)
        return self.samples[-1]

    async def fault(self) -> str:
        await until("a fault", lambda: self.faults, PATIENCE_S)
        return self.faults[-1]


@asynccontextmanager
async def each_second(
    root: Path, taken: Taken, targets: Callable[[], Sequence[SampleTarget]] = lambda: TARGETS
) -> AsyncIterator[SampleChild]:
    """The process is asked ten times a second."""
    child = SampleChild(
        root, (), targets, taken.sink, start_s=10.0, sample_s=3.0, sleep=lambda wait_s: asyncio.sleep(wait_s / 10)
    )
    async with running(child.run()):
        child.woken.set()
        yield child
    assert not child.runs


def calls(root: Path, name: str) -> int:
    return evidence(root, "calls").splitlines().count(name)


# --- each second ------------------------------------------------------------------------------------------------------


async def test_what_a_gpu_does_as_it_changes(tmp_path: Path) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS), Taken()
    use(root, BUSY, FakeUse(gpu=1))

    def asked() -> Sequence[SampleTarget]:
        told = taken.samples[-1] if taken.samples else ()
        return [replace(each, told_us=unit.told_us) for each, unit in zip(TARGETS, told, strict=False)] or TARGETS

    async with each_second(root, taken, asked):
        before, _ = await taken.next()
        assert [each.used for each in before.processes or ()] == [None, None], "since when, is told by the first"
        first, second = await taken.next()
        assert (first.utilization_percent, first.rate_percent, second.rate_percent) == (93, 93, 0)
        assert (first.memory_used_bytes, first.memory_total_bytes) == (2**30, 80 * 2**30)
        assert (first.temperature_c, first.power_mw, first.power_limit_mw) == (31, 71_200, 700_000)
        assert (first.sm_clock_mhz, first.memory_clock_mhz) == (345, 2619)
        assert first.processes
        assert {each.pid: (each.memory_bytes, each.used) for each in first.processes} == {
            41: (2**30, True),
            42: (2**29, False),
        }
        assert second.processes == ()
        use(root, FakeUse(gpu=1, utilization=7))
        await until("the change", lambda: taken.samples[-1][1].utilization_percent == 7, PATIENCE_S)
        assert taken.samples[-1][0].utilization_percent is None, "declined"
    assert calls(root, "nvmlInitWithFlags") == 1
    assert not taken.faults


async def test_the_next_process_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    """What the driver remembers of long ago is not use since then, and what was told once is not told again."""
    root, taken = build_fake_nvml(tmp_path, GPUS), Taken()
    use(root, BUSY)
    later = [replace(TARGETS[0], told_us=time.time_ns() // 1000 + 3_600_000_000)]
    async with each_second(root, taken, lambda: later):
        (first,) = await taken.next()
        assert [each.used for each in first.processes or ()] == [False, False]
        later[0] = replace(TARGETS[0], told_us=1)
        await until(
            "use since then", lambda: any(each.used for each in taken.samples[-1][0].processes or ()), PATIENCE_S
        )


async def test_what_lies_is_unknown(tmp_path: Path) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS), Taken()
    lies = FakeUse(used_bytes=81 * 2**30, utilization=1_000_000, temperature=2**31, milliwatts=2**32 - 2, sm_mhz=2**31)
    use(root, lies, FakeUse(gpu=1, used_bytes=-1, utilization=-1, temperature=-1, processes=(FakeProcess(9, 2**60),)))
    async with each_second(root, taken):
        lied, declined = await taken.next()
    for unit in (lied, declined):
        assert (unit.memory_used_bytes, unit.utilization_percent, unit.temperature_c) == (None, None, None)
    assert (lied.power_mw, lied.sm_clock_mhz, lied.memory_clock_mhz) == (None, None, 2619)
    assert declined.processes and declined.processes[0].memory_bytes is None


async def test_a_driver_that_tells_of_no_process(tmp_path: Path) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS), Taken()
    use(root, FakeUse(processes=(FakeProcess(41, utilization=-1),)))
    async with each_second(root, taken):
        (first, _) = await taken.next()
    assert first.processes and first.processes[0].used is None


@pytest.mark.parametrize(
    "without",
    ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetMPSComputeRunningProcesses_v3"],
)
async def test_an_older_driver(tmp_path: Path, without: str) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS, without=[without]), Taken()
    use(root, BUSY)
    async with each_second(root, taken):
        first, _ = await taken.next()
    assert (first.memory_used_bytes, first.utilization_percent, len(first.processes or ())) == (2**30, 93, 2)
    assert not taken.faults


async def test_a_mig_device_has_memory_and_processes_and_no_rates(tmp_path: Path) -> None:
    gpu = FakeGpu(uuid=GPUS[0].uuid, mig=(1, 1), parts=(FakeMig(place=2, uuid=PART, gi=5),))
    root, taken = build_fake_nvml(tmp_path, [gpu]), Taken()
    use(root, FakeUse(), FakeUse(place=2, used_bytes=3, total_bytes=9, processes=(FakeProcess(41),)))
    target = SampleTarget(0, "0000:10:00.0", gpu.uuid, mig=(MigTarget(2, PART),))
    async with each_second(root, taken, lambda: [target]):
        whole, part = await taken.next()
    assert (whole.uuid, whole.utilization_percent, whole.temperature_c) == (gpu.uuid, None, 31)
    assert (part.uuid, part.memory_used_bytes, part.memory_total_bytes, part.rate_percent) == (PART, 3, 9, None)
    assert [(each.pid, each.used) for each in part.processes or ()] == [(41, None)]


async def test_a_gpu_that_is_another_by_now_is_left_out(tmp_path: Path) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS), Taken()
    stranger = SampleTarget(0, TARGETS[0].pci_bus_id, GPUS[1].uuid)
    async with each_second(root, taken, lambda: [stranger, TARGETS[1]]):
        assert [each.uuid for each in await taken.next()] == [GPUS[1].uuid]


async def test_it_ends_with_the_questions_and_leaves_nvml_for_fewer_gpus(tmp_path: Path) -> None:
    root, taken, asked = build_fake_nvml(tmp_path, GPUS), Taken(), list(TARGETS)
    async with each_second(root, taken, lambda: asked) as child:
        assert len(await taken.next()) == 2
        assert child.runs
        del asked[1:]
        await until("one GPU", lambda: len(taken.samples[-1]) == 1, PATIENCE_S)
        assert (calls(root, "nvmlInitWithFlags"), calls(root, "nvmlShutdown")) == (2, 1)
        asked.clear()
        await until("its end", lambda: not child.runs, PATIENCE_S)
        asked.extend(TARGETS)
        child.woken.set()
        await taken.next()
        assert child.starts == 2
    assert not taken.faults


@pytest.mark.parametrize("function", [*FUNCTIONS, *SHARED[:-1]])
async def test_a_call_that_hangs_is_named_and_ended(tmp_path: Path, function: str) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS, [Act(function, "hang")]), Taken()
    child = SampleChild(root, (), lambda: TARGETS, taken.sink, start_s=3.0)
    async with running(child.run()):
        child.woken.set()
        fault = await taken.fault()
        name = function.removesuffix("_v2") if "Handle" in function else function
        assert name.removesuffix("WithFlags") in fault
        assert "did not return within 3 s; the NVML sampling process was killed" in fault
        configure(root, GPUS)
        assert len(await taken.next()) == 2


@pytest.mark.parametrize(
    ("deed", "code"), [("crash", 0), ("fail", 9), *(("babble", sort) for sort in (0, 1, 5, 9, 10, 11))]
)
async def test_a_library_that_fails(tmp_path: Path, deed: str, code: int) -> None:
    function = "nvmlDeviceGetPowerUsage" if deed != "fail" else "nvmlInitWithFlags"
    root, taken = build_fake_nvml(tmp_path, GPUS, [Act(function, deed, code)]), Taken()  # type: ignore[arg-type]
    async with each_second(root, taken):
        assert await taken.fault()
        configure(root, GPUS)
        assert len(await taken.next()) == 2


# --- after a refresh --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def refreshed(root: Path, taken: Taken | None) -> AsyncIterator[NvmlChild]:
    deadlines = Deadlines(call_s=2.0, sample_s=2.0, end_s=1.0)
    child = NvmlChild(str(root), deadlines=deadlines, samples=taken.sink if taken else None)
    try:
        yield child
    finally:
        await child.close()


async def test_a_refresh_brings_a_sample_by_the_same_start_of_nvml(tmp_path: Path) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS), Taken()
    use(root, BUSY, FakeUse(gpu=1))
    async with refreshed(root, taken) as child:
        for times in (1, 2):
            assert len((await child.refresh()).gpus) == 2
            assert [each.utilization_percent for each in await taken.next()] == [93, 0]
            await until("its end", lambda: calls(root, "nvmlShutdown") == times, PATIENCE_S)  # noqa: B023
            assert calls(root, "nvmlInitWithFlags") == times
        assert child.starts == 1


async def test_a_sample_changes_nothing_of_the_inventory(tmp_path: Path) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS), Taken()
    async with refreshed(root, None) as without, refreshed(root, taken) as with_samples:
        one, other = await without.refresh(), await with_samples.refresh()
        assert one.gpus == other.gpus
        use(root, BUSY, FakeUse(gpu=1))
        await taken.next()
        assert calls(root, FUNCTIONS[1]) == 2  # of one refresh, a call for each GPU


@pytest.mark.parametrize("function", [*FUNCTIONS, "nvmlShutdown"])
async def test_a_sample_that_hangs_costs_no_inventory(tmp_path: Path, function: str) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS, [Act(function, "hang")]), Taken()
    async with refreshed(root, taken) as child:
        began = time.monotonic()
        assert len((await child.refresh()).gpus) == 2
        assert time.monotonic() - began < 2.0
        assert "did not return within 2 s; the NVML process was killed" in await taken.fault()
        if function != "nvmlShutdown":  # which each refresh calls
            assert len((await child.refresh()).gpus) == 2
            assert (len(taken.faults), taken.samples) == (1, []), "it is not asked again with each refresh"


async def test_a_refresh_waits_for_the_sample_before_it(tmp_path: Path) -> None:
    root, taken = build_fake_nvml(tmp_path, GPUS), Taken()
    async with refreshed(root, taken) as child:
        for _ in range(5):
            await child.refresh()
        await until("all samples", lambda: len(taken.samples) == 5, PATIENCE_S)
        await child.refresh()
        await child.close()
        assert len((await child.refresh()).gpus) == 2
    assert not taken.faults


# --- a process that cannot be killed ----------------------------------------------------------------------------------


async def test_no_second_process_samples_while_the_first_cannot_be_killed(tmp_path: Path, freezer: Freezer) -> None:
    """And the refresh, whose process is another, goes on."""
    root, taken, other = build_fake_nvml(tmp_path, GPUS), Taken(), Taken()
    async with each_second(root, taken) as child, refreshed(root, other) as refreshing:
        await taken.next()
        [pid] = sampling()
        freezer.hold(pid)
        assert (await taken.fault()).endswith("the NVML sampling process cannot be killed")
        await until("a second try", lambda: len(taken.faults) > 1, PATIENCE_S)
        assert f"nri_gpu.usage.nvml_samples {pid} still hangs in the kernel" in taken.faults[-1]
        assert [each.pid for each in unkilled()] == [pid]
        assert child.starts == 1
        assert len((await refreshing.refresh()).gpus) == 2
        freezer.thaw()
        await taken.next()


def sampling() -> list[int]:
    """The processes of ours that sample."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in found if b"nri_gpu.usage.nvml_samples" in Path(f"/proc/{pid}/cmdline").read_bytes()]
