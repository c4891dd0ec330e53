"""`nri-gpu usage`: how many GPU-seconds each namespace, pod, model or MIG profile had."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.cli.kept_record import Asked, KeptRecord, asked
from nri_gpu.cli.page import Column, Grid, Line, Row, Tone
from nri_gpu.cli.render import answer, lines
from nri_gpu.domain.errors import Exit
from nri_gpu.ledger.holds import HoldWay
from nri_gpu.records.usage_lines import Begun, HeldDevice
from nri_gpu.records.usage_sums import Sums
from nri_gpu.system.node_name import NamedNode, this_node

BY: Final[Mapping[str, Callable[[Begun, HeldDevice], str]]] = {
    "namespace": lambda hold, _: hold.namespace,
    "pod": lambda hold, _: f"{hold.namespace}/{hold.pod or hold.claim}",
    "model": lambda _, device: device.model,
    "profile": lambda _, device: device.profile or "-",
}
# Both wait for a container.
_KEPT: Final = (HoldWay.RESERVED, HoldWay.CLAIMED)


class UsedLine(Struct, frozen=True, kw_only=True):
    """The GPU-seconds of one name: by grants, reserved or claimed without a container, and by other components."""

    name: str
    granted_gpu_s: float
    reserved_gpu_s: float
    external_gpu_s: float


class UsageDocument(Struct, frozen=True, kw_only=True, tag_field="schema", tag="nri-gpu/usage/v1"):
    """The sums. by: what the names are. since_s, until_s: since the epoch. skipped_lines: of the record."""

    node: NamedNode
    by: str
    since_s: float
    until_s: float
    used: tuple[UsedLine, ...]
    skipped_lines: int


def run(args: argparse.Namespace) -> int:
    """Print the sums. Return 69 if nothing is kept, 77 without root."""
    window, record = asked(args), KeptRecord(args)
    used = _used(record, args.by, window)
    if args.csv:
        writer = csv.writer(sys.stdout)
        writer.writerow((args.by, "granted_gpu_s", "reserved_gpu_s", "external_gpu_s"))
        writer.writerows((each.name, *_seconds(each)) for each in used)
        return Exit.OK
    skipped = record.reader.skipped
    document = UsageDocument(
        node=this_node(),
        by=args.by,
        since_s=window.since_s,
        until_s=window.until_s,
        used=used,
        skipped_lines=skipped,
    )
    columns = tuple(map(Column, (args.by.upper(), "GPU-SECONDS", "RESERVED", "OTHER COMPONENTS")))
    rows = tuple[Row, ...]((Line(each.name, Tone.HEAD), *map(str, _seconds(each))) for each in used)
    answer(args, document, [Grid(columns, rows) if rows else Line("nothing was held"), *lines(record.notes, Tone.WARN)])
    return Exit.OK


def _seconds(used: UsedLine) -> tuple[int, int, int]:
    return round(used.granted_gpu_s), round(used.reserved_gpu_s), round(used.external_gpu_s)


def _used(record: KeptRecord, by: str, window: Asked) -> tuple[UsedLine, ...]:
    sums = Sums[tuple[str, HoldWay]]((window.since_s, window.until_s))
    for event in record.events():
        if isinstance(event, Begun):
            devices = {
                # By profile a MIG device counts as itself.
                each.uuid: (1.0 if by == "profile" else each.share, (BY[by](event, each), event.way))
                for each in event.devices
            }
            sums.begun(event.hold, devices, event.began, event.part)
        else:
            sums.ended(event.hold, event.now)
    sums.count(record.end)
    totals = sums.totals
    return tuple(
        UsedLine(
            name=name,
            granted_gpu_s=round(totals[name, HoldWay.GRANTED], 3),
            reserved_gpu_s=round(sum(totals[name, way] for way in _KEPT), 3),
            external_gpu_s=round(totals[name, HoldWay.EXTERNAL], 3),
        )
        for name in sorted({name for (name, _), total in totals.items() if total})
    )
