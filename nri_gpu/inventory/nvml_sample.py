"""A sample of what GPUs do, through NVML: in the NVML process after each refresh, and in the one that samples alone.

What fails is left out of the sample. The result is plain data for one line of JSON, as `domain/sample.py` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import attrgetter
from typing import Final

from nri_gpu.domain.sample import SampleTarget
from nri_gpu.inventory.nvml_client import NOT_FOUND, NvmlCallError, NvmlClient

# Numbers of nvml.h.
TEMPERATURE_GPU: Final = 0
CLOCK_SM: Final = 1
CLOCK_MEMORY: Final = 2
# The names have versions: without one, nvidia-ml-py raises a different error from NVML's on an older driver.
_RUNNING: Final = tuple(f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute"))
# Fact, call, arguments.
_NUMBERS: Final[tuple[tuple[str, str, tuple[int, ...]], ...]] = (
    ("temperature_c", "nvmlDeviceGetTemperature", (TEMPERATURE_GPU,)),
    ("power_mw", "nvmlDeviceGetPowerUsage", ()),
    ("power_limit_mw", "nvmlDeviceGetEnforcedPowerLimit", ()),
    ("sm_clock_mhz", "nvmlDeviceGetClockInfo", (CLOCK_SM,)),
    ("memory_clock_mhz", "nvmlDeviceGetClockInfo", (CLOCK_MEMORY,)),
)


_Use = tuple[bool, int]  # whether a process used the GPU, and the share of time in which its kernels ran, in percent
_UNUSED: Final = (False, 0)


class Sampler:
    """The samples of one NVML session. told_us: by GPU, the driver's time of the last utilization that it told."""

    def __init__(self, nvml: NvmlClient, told_us: MutableMapping[str, int]) -> None:
        self._nvml = nvml
        self._told_us = told_us
        self._handles: dict[str, object] = {}

    def sample(self, targets: Iterable[SampleTarget]) -> list[Mapping[str, object]]:
        """Return what these GPUs and their MIG devices do, without those that cannot be found."""
        return [facts for target in targets for facts in self._gpu(target)]

    def _gpu(self, target: SampleTarget) -> Iterator[Mapping[str, object]]:
        index = target.index
        # By bus id NVML touches only this GPU, by index every one up to it (nvml.h).
        gpu = self._handle(target.uuid, index, "nvmlDeviceGetHandleByPciBusId", target.pci_bus_id.encode())
        if gpu is None:
            return
        attempt = self._nvml.attempt
        rates = None if target.mig else attempt("nvmlDeviceGetUtilizationRates", gpu, gpu=index)
        used = None if target.mig else self._used(target, gpu)
        yield {
            **self._memory(target.uuid, gpu, index),
            **{fact: attempt(call, gpu, *arguments, gpu=index) for fact, call, arguments in _NUMBERS},
            "utilization_percent": rates and int(rates.gpu),
            "memory_rate_percent": rates and int(rates.memory),
            "told_us": self._told_us.get(target.uuid, 0),
            "processes": self._processes(gpu, index, used),
        }
        for each in target.mig:
            part = self._handle(each.uuid, index, "nvmlDeviceGetMigDeviceHandleByIndex", gpu, each.index)
            if part is not None:
                yield {**self._memory(each.uuid, part, index), "processes": self._processes(part, index, None)}

    def _handle(self, uuid: str, index: int, call: str, *arguments: object) -> object:
        """Return the handle of a GPU or MIG device, or None if another one has its place by now."""
        if uuid not in self._handles:
            handle = self._nvml.attempt(call, *arguments, gpu=index)
            if handle is None or self._nvml.attempt("nvmlDeviceGetUUID", handle, gpu=index) != uuid:
                return None
            self._handles[uuid] = handle
        return self._handles[uuid]

    def _memory(self, uuid: str, device: object, index: int) -> Mapping[str, object]:
        """Return memory, since R510 without what the driver keeps for itself, as nvidia-smi shows it."""
        attempt = self._nvml.attempt
        found = attempt("nvmlDeviceGetMemoryInfo_v2", device, gpu=index)
        found = found or attempt("nvmlDeviceGetMemoryInfo", device, gpu=index)
        numbers = (
            {} if found is None else {"memory_used_bytes": int(found.used), "memory_total_bytes": int(found.total)}
        )
        return {"uuid": uuid, **numbers}

    def _used(self, target: SampleTarget, gpu: object) -> Mapping[int, _Use] | None:
        """Return what processes did since the sample before, or None where the driver does not tell.

        One that is not among them did nothing. The first answer of all has what the driver remembers, of whenever that
        was: it tells from when on the next one counts.
        """
        since_us = max(self._told_us.get(target.uuid, 0), target.told_us)
        try:
            told = self._nvml.call("nvmlDeviceGetProcessUtilization", gpu, since_us, gpu=target.index)
        except NvmlCallError as error:
            return {} if error.code == NOT_FOUND else None
        self._told_us[target.uuid] = max([since_us, *(int(each.timeStamp) for each in told)])
        if not since_us:
            return None
        used: dict[int, _Use] = {}
        for each in sorted(told, key=attrgetter("timeStamp")):
            if each.timeStamp > since_us:
                busy = any((each.smUtil, each.memUtil, each.encUtil, each.decUtil))
                used[each.pid] = (busy or used.get(each.pid, _UNUSED)[0], int(each.smUtil))
        return used

    def _processes(
        self, device: object, index: int, used: Mapping[int, _Use] | None
    ) -> Sequence[Mapping[str, object]] | None:
        """Return the processes with a context, or None where NVML cannot list them. used: as of `_used`."""
        lists = [self._nvml.attempt(call, device, gpu=index) for call in _RUNNING]
        if lists[0] is None:
            return None
        memory: dict[int, int | None] = {}
        for each in (process for found in lists for process in found or ()):
            # A process may compute and draw: each list then has all of its memory.
            known = [size for size in (each.usedGpuMemory, memory.get(each.pid)) if size is not None]
            memory[each.pid] = max(known, default=None)
        return [
            {"pid": pid, "memory_bytes": size, "used": use and use[0], "sm_percent": use and use[1]}
            for pid, size in memory.items()
            for use in [None if used is None else used.get(pid, _UNUSED)]
        ]
