"""Closed sets of words and names that several parts of the policy use."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from nri_gpu.policy.kinds import Text

POOL_NAMES: Final = Text(r"[A-Za-z0-9_.-]+", "a pool's name: letters, digits and _ . -", 64)


class Otherwise(StrEnum):
    """What happens to a container that asks and may not."""

    REFUSE = "refuse"
    IGNORE = "ignore"
