"""Events and signs of a simulated node, as its topology file has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nri_gpu.domain.health import EventType, ScriptedEvent, Sign
from nri_gpu.inventory.table import Table

XID_MAX: Final = 65535
INDEX_MAX: Final = 247
# In the words of the header's names: `double-bit-ecc`.
KINDS: Final[Mapping[str, EventType]] = {kind.name.lower().replace("_", "-"): kind for kind in EventType if kind.name}


def read_events(root: Table, indices: frozenset[int]) -> tuple[ScriptedEvent, ...]:
    """`[[event]]`: at_s, gpu (its index), kind, xid; in the order of their time."""
    return tuple(sorted((_event(table, indices) for table in root.tables("event")), key=lambda each: each.at_s))


def read_signs(table: Table) -> tuple[Sign, ...] | None:
    """`signs`, an array or one text with commas; None where it is not there."""
    words = table.words("signs")
    if words is None:
        return None
    known = set(Sign)
    for word in words:
        if word not in known:
            table.wrong("signs", f"{word!r} is no sign ({', '.join(Sign)})")
    return tuple(dict.fromkeys(Sign(word) for word in words if word in known))


def parse_sign(text: str) -> Sign:
    """One sign. Raises: ValueError."""
    if text not in set(Sign):
        raise ValueError(f"{text!r} is no sign ({', '.join(Sign)})")
    return Sign(text)


def _event(table: Table, indices: frozenset[int]) -> ScriptedEvent:
    at_s, gpu = table.seconds("at_s"), table.number("gpu", 0, INDEX_MAX)
    if gpu is not None and gpu not in indices:
        table.wrong("gpu", f"there is no GPU with index {gpu}")
    kind = table.parsed("kind", _parse_kind, default="xid") or EventType.XID
    xid = table.number("xid", 1, XID_MAX, optional=kind is not EventType.XID)
    if xid is not None and kind is not EventType.XID:
        table.wrong("xid", "only an event of kind xid has a number")
    table.done()
    return ScriptedEvent(at_s, gpu or 0, xid or 0, int(kind))


def _parse_kind(text: str) -> EventType:
    """Raises: ValueError."""
    if text not in KINDS:
        raise ValueError(f"{text!r} is no kind of event ({', '.join(KINDS)})")
    return KINDS[text]
