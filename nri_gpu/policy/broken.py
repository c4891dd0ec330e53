"""The policy where there is none: its file is broken, and no good one was kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BrokenPolicy:
    """No usable policy: every container that asks is refused. fault: what is wrong with the file."""

    fault: str
