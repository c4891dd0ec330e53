"""Handlers present -> event mask, within what the runtime's NRI knows.

A bit that the runtime does not know makes it drop the plugin, so the mask is cut to the runtime's version; the
oldest mask always works.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import IntEnum
from typing import Final


class Event(IntEnum):
    """NRI's events; bit n-1 of the mask. Source: containerd/nri pkg/api/api.proto (Event)."""

    RUN_POD_SANDBOX = 1
    STOP_POD_SANDBOX = 2
    REMOVE_POD_SANDBOX = 3
    CREATE_CONTAINER = 4
    POST_CREATE_CONTAINER = 5
    START_CONTAINER = 6
    POST_START_CONTAINER = 7
    UPDATE_CONTAINER = 8
    POST_UPDATE_CONTAINER = 9
    STOP_CONTAINER = 10
    REMOVE_CONTAINER = 11
    UPDATE_POD_SANDBOX = 12  # NRI 0.10
    POST_UPDATE_POD_SANDBOX = 13  # NRI 0.10
    VALIDATE_CONTAINER_ADJUSTMENT = 14  # NRI 0.10


OLDEST_MASK: Final = 0x07FF
NEWER_MASK: Final = 0x3FFF
_NEWER_SINCE: Final = (0, 10)
_PLAIN: Final = re.compile(r"v?([0-9]{1,6})\.([0-9]{1,6})(?:[.+-]|$)")


def event_mask(events: Collection[Event], nri_version: str) -> int:
    """The mask to answer Configure with.

    nri_version: as the runtime gave it. Only NRI 0.12 and later give one; whatever is not plainly a version
    counts as old. Raises: ValueError for no events at all (0 would mean all of them to the runtime).
    """
    wanted = sum(1 << (event - 1) for event in set(events))
    mask = wanted & known_mask(nri_version)
    if not mask:
        raise ValueError("a plugin without events must not connect: mask 0 subscribes to everything")
    return mask


def known_mask(nri_version: str) -> int:
    """All bits that an NRI of that version accepts."""
    return NEWER_MASK if _parse(nri_version) >= _NEWER_SINCE else OLDEST_MASK


def _parse(version: str) -> tuple[int, ...]:
    plain = _PLAIN.match(version)
    return (int(plain[1]), int(plain[2])) if plain else (0,)
