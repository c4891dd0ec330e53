"""A sample: what GPUs and MIG devices do at one moment. It is never part of an inventory, a record or the audit log.

Numbers come from NVML through a process of ours, so each is checked: one that cannot be true is None, as is one that
the driver does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, convert
from msgspec.structs import replace

from nri_gpu.domain.gpu import GpuUuid

PID_MAX: Final = 2**22  # PID_MAX_LIMIT of linux/threads.h
MEMORY_MAX: Final = 2**50  # bytes
PERCENT_MAX: Final = 100
TEMPERATURES_C: Final = (-40, 200)
POWER_MAX_MW: Final = 10_000_000
CLOCK_MAX_MHZ: Final = 20_000


class MigTarget(Struct, frozen=True):
    """A MIG device to sample. index: its place in NVML's list."""

    index: int
    uuid: str


class SampleTarget(Struct, frozen=True):
    """A GPU to sample, with its MIG devices. index: NVML's. told_us: as the last sample of it had that, 0: none did."""

    index: int
    pci_bus_id: str
    uuid: str
    mig: tuple[MigTarget, ...] = ()
    told_us: int = 0


def read_targets(gpus: object) -> tuple[SampleTarget, ...]:
    """Return targets: from GPUs of an inventory, or from plain data that names them."""
    return convert(gpus, tuple[SampleTarget, ...], from_attributes=True)


class ProcessSample(Struct, frozen=True):
    """A process on a GPU. used: whether it was seen to use the GPU since the sample before; None: not told of it.

    sm_percent: the share of time in which its kernels ran, as the driver saw it last.
    """

    pid: int
    memory_bytes: int | None = None
    used: bool | None = None
    sm_percent: int | None = None


class UnitSample(Struct, frozen=True, kw_only=True):
    """A GPU or a MIG device in a sample. processes: None where NVML cannot list them.

    memory_rate_percent: the share of time in which its memory was read or written. told_us: of what was told of its
    processes the newest, by the driver's clock in microseconds: the next sample goes on from there.
    """

    uuid: GpuUuid
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: int | None = None
    memory_rate_percent: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    processes: tuple[ProcessSample, ...] | None = None
    told_us: int = 0

    @property
    def rate_percent(self) -> int | None:
        """Return the greater of both rates, or None if the driver does not tell both. 0: nobody used the GPU."""
        rates = (self.utilization_percent, self.memory_rate_percent)
        return None if None in rates else max(each for each in rates if each is not None)


def read_units(report: object) -> tuple[UnitSample, ...]:
    """Return the samples of a report in plain data, without what cannot be true. Raises: ValueError: it is none."""
    return tuple(map(_plausible, convert(report, tuple[UnitSample, ...])))


_BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "memory_total_bytes": (1, MEMORY_MAX),
    "utilization_percent": (0, PERCENT_MAX),
    "memory_rate_percent": (0, PERCENT_MAX),
    "temperature_c": TEMPERATURES_C,
    "power_mw": (0, POWER_MAX_MW),
    "power_limit_mw": (1, POWER_MAX_MW),
    "sm_clock_mhz": (0, CLOCK_MAX_MHZ),
    "memory_clock_mhz": (0, CLOCK_MAX_MHZ),
}


def _plausible(unit: UnitSample) -> UnitSample:
    told = {name: _within(getattr(unit, name), *bounds) for name, bounds in _BOUNDS.items()}
    most = told["memory_total_bytes"] or MEMORY_MAX
    return replace(
        unit,
        **told,
        memory_used_bytes=_within(unit.memory_used_bytes, 0, most),
        processes=unit.processes
        and tuple(
            replace(
                each,
                memory_bytes=_within(each.memory_bytes, 0, most),
                sm_percent=_within(each.sm_percent, 0, PERCENT_MAX),
            )
            for each in unit.processes
            if 0 < each.pid <= PID_MAX
        ),
    )


def _within(value: int | None, least: int, most: int) -> int | None:
    return value if value is not None and least <= value <= most else None
