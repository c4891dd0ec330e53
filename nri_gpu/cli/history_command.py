"""`nri-gpu history`: who had which GPU from when to when, and which GPUs root took out of use."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from msgspec import Struct

from nri_gpu.cli.kept_record import Asked, KeptRecord, asked
from nri_gpu.cli.page import Column, Grid, Line, Tone
from nri_gpu.cli.render import answer, at, duration, lines
from nri_gpu.domain.errors import Exit
from nri_gpu.ledger.holds import HoldWay
from nri_gpu.records.usage_lines import Begun, Cordoned, HeldDevice, LogMoment
from nri_gpu.system.node_name import NamedNode, this_node

COLUMNS: Final = tuple(map(Column, ("GPU", "MODEL", "HELD BY", "CONTAINER", "MODE", "FROM", "TO", "FOR")))
CORDONED: Final = tuple(map(Column, ("OUT OF USE", "BY", "WHY", "FROM", "TO", "BACK")))
NOT_SEEN: Final = "not seen"


class HeldLine(Struct, frozen=True, kw_only=True):
    """A GPU or MIG device and one of its holders. from_s, to_s: seconds since the epoch; to_s is null while it is held.

    way: granted, reserved, claimed or external. ended: what ended it; null while it is held, and where nobody saw it:
    then to_s is when it was last known. held_s: by the monotonic clock.
    """

    gpu_uuid: str
    place: str
    model: str
    profile: str
    way: str
    mode: str
    namespace: str
    pod: str
    container: str
    claim: str
    from_s: float
    to_s: float | None
    held_s: float
    ended: str | None


class CordonedLine(Struct, frozen=True, kw_only=True):
    """A GPU that root took out of use. by, why: as root said. ended: how it came back; null while it is out of use.

    from_s, to_s: seconds since the epoch; to_s is null while it is out of use.
    """

    gpu_uuid: str
    place: str
    by: str
    why: str
    from_s: float
    to_s: float | None
    ended: str | None


T = TypeVar("T", HeldLine, CordonedLine)


class HistoryDocument(Struct, frozen=True, tag_field="schema", tag="nri-gpu/history/v1"):
    """The holds, and the times out of use, each in the order in which they began. skipped_lines: of the record."""

    node: NamedNode
    holds: tuple[HeldLine, ...]
    skipped_lines: int
    cordons: tuple[CordonedLine, ...]


def run(args: argparse.Namespace) -> int:
    """Print the holds. Return 69 if nothing is kept, 77 without root."""
    window, record = asked(args), KeptRecord(args)
    about = args.about or ""
    held = _within((each for each in _held(record) if _is_about(each, about)), window)
    found = map(_cordoned, record.reader.cordons.values())
    cordons = _within((each for each in found if about in ("", each.place, each.gpu_uuid)), window)
    document = HistoryDocument(this_node(), held, record.reader.skipped, cordons)
    table = Grid(COLUMNS, tuple(map(_row, held))) if held else Line("nothing was held")
    below = [Grid(CORDONED, tuple(map(_cordoned_row, cordons)))] if cordons else []
    answer(args, document, [table, *below, *lines(record.notes, Tone.WARN)])
    return Exit.OK


def _within(found: Iterable[T], window: Asked) -> tuple[T, ...]:
    """Return those that were at some moment of the window, in the order in which they began."""
    seen = (each for each in found if each.from_s <= window.until_s and (each.to_s or math.inf) >= window.since_s)
    return tuple(sorted(seen, key=lambda each: each.from_s))


def _held(record: KeptRecord) -> Iterator[HeldLine]:
    begun = dict[str, Begun]()
    for event in record.events():
        if isinstance(event, Begun):
            begun[event.hold] = event
        else:
            yield from _lines(begun.pop(event.hold), event.now, event.why or NOT_SEEN)
    end, why = record.end, "" if record.goes_on else NOT_SEEN
    for each in begun.values():
        yield from _lines(each, end, why)


def _lines(begun: Begun, end: LogMoment, why: str) -> Iterator[HeldLine]:
    return (_line(begun, device, end, why) for device in begun.devices)


def _line(begun: Begun, device: HeldDevice, end: LogMoment, why: str) -> HeldLine:
    began = begun.began
    return HeldLine(
        gpu_uuid=device.uuid,
        place=device.place,
        model=device.model,
        profile=device.profile,
        way=begun.way,
        mode=begun.mode,
        namespace=begun.namespace,
        pod=begun.pod,
        container=begun.container,
        claim=begun.claim,
        from_s=began.at_s,
        to_s=end.at_s if why else None,
        held_s=round(max(0.0, end.mono_s - began.mono_s), 3),
        ended=None if why in ("", NOT_SEEN) else why,
    )


def _cordoned(line: Cordoned) -> CordonedLine:
    return CordonedLine(
        gpu_uuid=line.device.uuid,
        place=line.device.place,
        by=line.by,
        why=line.why,
        from_s=line.since_s,
        to_s=line.at_s if line.ended else None,
        ended=line.ended or None,
    )


def _is_about(held: HeldLine, word: str) -> bool:
    """Return whether a hold is of that GPU (place or UUID), namespace, or `namespace/pod`; of any if it is empty."""
    pod = f"{held.namespace}/{held.pod}"
    return word in ("", held.place, held.gpu_uuid, held.namespace, pod)


def _row(held: HeldLine) -> tuple[str | Line, ...]:
    who = f"claim {held.namespace}/{held.claim}" if held.way is HoldWay.CLAIMED else f"{held.namespace}/{held.pod}"
    mode = held.mode if held.way == HoldWay.GRANTED else held.way
    to = "held" if held.to_s is None else at(held.to_s) + ("" if held.ended else " or later")
    return (
        Line(held.place or held.gpu_uuid, Tone.HEAD),
        held.profile or held.model,
        who,
        held.container or "-",
        mode,
        at(held.from_s),
        Line(to, Tone.GOOD if held.to_s is None else Tone.PLAIN),
        duration(held.held_s),
    )


def _cordoned_row(each: CordonedLine) -> tuple[str | Line, ...]:
    gpu = Line(each.place or each.gpu_uuid, Tone.HEAD)
    to = "-" if each.to_s is None else at(each.to_s)
    return gpu, each.by, each.why, at(each.from_s), to, each.ended or "-"
