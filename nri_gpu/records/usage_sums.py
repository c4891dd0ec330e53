"""The time that GPUs were held, summed up: each moment of a GPU is divided by those who hold it then.

Holders to which a scheduler of fractions gave parts of it have these, and all others the rest, in equal parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from nri_gpu.records.usage_lines import LogMoment

A = TypeVar("A")
ALWAYS = (float("-inf"), float("inf"))


class _Device(Struct, Generic[A]):
    """A GPU or MIG device. share: the part of a GPU that it counts as."""

    share: float
    holders: dict[str, tuple[float, A]]  # by hold: its part of the device, 1 unless it was given one
    counted: float  # up to when, seconds on the boot's monotonic clock


class Sums(Generic[A]):
    """The GPU-seconds of each account. Moments come in their order, and are all of one boot until `reboot`.

    window: from when to when time counts, seconds since the epoch.
    """

    def __init__(self, window: tuple[float, float] = ALWAYS) -> None:
        self.totals = defaultdict[A, float](float)
        self._window = window
        self._devices = dict[str, _Device[A]]()  # by UUID
        self._of = dict[str, tuple[str, ...]]()  # hold -> UUIDs

    def begun(self, hold: str, devices: Mapping[str, tuple[float, A]], now: LogMoment, part: float = 1.0) -> None:
        """Count a hold from now on. devices: UUID -> its share of a GPU, and on whose account it is.

        part: of each device, that a scheduler of fractions gave to the holder.
        """
        self._of[hold] = tuple(devices)
        for uuid, (share, account) in devices.items():
            device = self._devices.setdefault(uuid, _Device(share, {}, now.mono_s))
            self._count(device, now)
            device.holders[hold] = (part, account)

    def ended(self, hold: str, now: LogMoment) -> None:
        """Count a hold no more; one that is not known changes nothing."""
        for uuid in self._of.pop(hold, ()):
            device = self._devices[uuid]
            self._count(device, now)
            del device.holders[hold]
            if not device.holders:
                del self._devices[uuid]

    def count(self, now: LogMoment) -> None:
        """Count all that is held up to now."""
        for device in self._devices.values():
            self._count(device, now)

    def _count(self, device: _Device[A], now: LogMoment) -> None:
        elapsed_s = now.mono_s - device.counted
        if elapsed_s <= 0:
            return
        device.counted = now.mono_s
        first, last = self._window
        within_s = min(now.at_s, last) - max(now.at_s - elapsed_s, first)
        if within_s > 0:
            for part, account in _divided([*device.holders.values()]):
                self.totals[account] += within_s * device.share * part


def _divided(holders: Sequence[tuple[float, A]]) -> Iterator[tuple[float, A]]:
    """Yield each holder with the part of the device that is its own: together they have no more than the device."""
    given = sum(part for part, _ in holders if part < 1)
    others = sum(part >= 1 for part, _ in holders)
    for part, account in holders:
        yield (part / max(given, 1.0) if part < 1 else max(1.0 - given, 0.0) / others), account
