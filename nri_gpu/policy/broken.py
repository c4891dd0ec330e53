"""The policy where there is none: its file is broken, and no good one was kept."""

from __future__ import annotations

from msgspec import Struct


class BrokenPolicy(Struct, frozen=True):
    """No usable policy: every container that asks is refused. fault: what is wrong with the file."""

    fault: str
