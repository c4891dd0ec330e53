"""How old what a running daemon goes by is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct


class Snapshot(Struct, frozen=True):
    """What a daemon goes by. age_s: seconds since its source last confirmed it; None where it never did."""

    number: int
    age_s: float | None

    @property
    def words(self) -> str:
        """For people."""
        age = "not confirmed yet" if self.age_s is None else f"{self.age_s:.0f} s old"
        return f"the daemon's snapshot is number {self.number}, {age}"


def snapshot_of(said: Mapping[str, Any] | None) -> Snapshot | None:
    """As its `status` has it; None where none was asked, or it does not tell."""
    try:
        node = (said or {})["node"]
        age_s = node["inventory_age_s"]
        return Snapshot(int(node["inventory_number"]), None if age_s is None else float(age_s))
    except (ValueError, KeyError, TypeError):
        return None
