"""Events of a simulated node, as its topology file scripts them."""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.health import ScriptedEvent, Sign
from nri_gpu.inventory.table import Table

AT_S_MAX: Final = 86400
XID_MAX: Final = 65535
INDEX_MAX: Final = 247


def read_events(root: Table, indices: frozenset[int]) -> tuple[ScriptedEvent, ...]:
    """`[[event]]`: at_s, gpu (its index), xid; in the order of their time."""
    return tuple(sorted((_event(table, indices) for table in root.tables("event")), key=lambda each: each.at_s))


def parse_signs(text: str) -> tuple[Sign, ...]:
    """Signs, separated by commas; none in an empty text. Raises: ValueError."""
    return tuple(parse_sign(word) for word in filter(None, (word.strip() for word in text.split(","))))


def parse_sign(text: str) -> Sign:
    """One sign. Raises: ValueError."""
    if text not in set(Sign):
        raise ValueError(f"{text!r} is no sign ({', '.join(Sign)})")
    return Sign(text)


def _event(table: Table, indices: frozenset[int]) -> ScriptedEvent:
    gpu = table.number("gpu", 0, INDEX_MAX)
    if gpu is not None and gpu not in indices:
        table.wrong("gpu", f"there is no GPU with index {gpu}")
    event = ScriptedEvent(table.number("at_s", 0, AT_S_MAX) or 0, gpu or 0, table.number("xid", 1, XID_MAX) or 0)
    table.done()
    return event
