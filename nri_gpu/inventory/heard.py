"""What the event process says, from a line of JSON to a value.

A driver's library has written into that process what it liked, so every line is checked: what is not one of these
values through and through is nonsense, and who talks nonsense has lost its mind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from nri_gpu.domain.health import GpuEvent
from nri_gpu.inventory.identity import parse_bus_id, parse_uuid

LINE_MAX: Final = 1 << 16  # bytes; that 247 GPUs cannot be listened to has some 40 000
GPUS_MAX: Final = 247  # as in a report
XID_MAX: Final = 65535
KIND_MAX: Final = 2**64 - 1  # nvmlEventData_t.eventType
INSTANCE_MAX: Final = 2**32 - 2  # nvmlEventData_t.gpuInstanceId; the last one means none
TEXT_MAX: Final = 1000  # characters of a sentence
_CALL: Final = re.compile(r"[A-Za-z]\w{0,63}", re.ASCII)


class Call(Struct, frozen=True):
    """It makes this call next."""

    name: str


class Watching(Struct, frozen=True):
    """Who is listened to, by bus id, and who cannot be, with the reason."""

    gpus: tuple[str, ...]
    deaf: Mapping[str, str]


class Unplaced(Struct, frozen=True):
    """An event, and why nobody knows whose."""

    why: str


class Fault(Struct, frozen=True):
    """Waiting failed; its last word."""

    why: str


Said = Call | Watching | Unplaced | Fault | GpuEvent


class NonsenseError(ValueError):
    """A line that says none of these."""


def understood(line: bytes) -> Said:
    """What a line says.

    Raises: NonsenseError.
    """
    if len(line) > LINE_MAX:
        raise NonsenseError("too long")
    try:
        said = json.loads(line)
        (kind,) = _READERS.keys() & said.keys()
        return _READERS[kind](said)
    # KeyError, TypeError, AttributeError: parts that are missing or of another kind. RecursionError: nested too deep.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NonsenseError(type(error).__name__) from error


def _event(said: Mapping[str, Any]) -> GpuEvent:
    event = said["event"]
    return GpuEvent(
        parse_uuid(event["uuid"]),
        _number(event["kind"], KIND_MAX),
        _number(event["xid"], XID_MAX),
        _instance(event.get("gi")),
        _instance(event.get("ci")),
    )


def _watching(said: Mapping[str, Any]) -> Watching:
    gpus, deaf = said["watching"], said["deaf"]
    if not isinstance(gpus, list) or len(gpus) > GPUS_MAX or len(deaf) > GPUS_MAX:
        raise ValueError("not a list of GPUs")
    return Watching(
        tuple(parse_bus_id(each) for each in gpus), {parse_bus_id(each): _text(why) for each, why in deaf.items()}
    )


def _call(said: Mapping[str, Any]) -> Call:
    if not _CALL.fullmatch(said["call"]):
        raise ValueError("not a call")
    return Call(said["call"])


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Said]]] = {
    "call": _call,
    "event": _event,
    "watching": _watching,
    "unplaced": lambda said: Unplaced(_text(said["unplaced"])),
    "fault": lambda said: Fault(_text(said["fault"])),
}


def _number(value: object, most: int) -> int:
    """Raises: ValueError."""
    if type(value) is not int or not 0 <= value <= most:  # a bool is an int to isinstance
        raise ValueError(f"not a number from 0 to {most}")
    return value


def _instance(value: object) -> int | None:
    """Raises: ValueError."""
    return None if value is None else _number(value, INSTANCE_MAX)


def _text(value: object) -> str:
    """One line that a terminal shows as it is. Raises: ValueError."""
    if not isinstance(value, str) or not value:
        raise ValueError("not a text")
    return "".join(letter if letter.isprintable() else "?" for letter in value[:TEXT_MAX])
