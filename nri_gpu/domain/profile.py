"""How MIG profiles are written: `1g.10gb`, `1c.3g.40gb`, `1g.10gb+me`; the same in requests and in inventories."""

from __future__ import annotations

import re
from typing import Final

# Compute slices where they are fewer than the GPU instance's, its slices, its memory, and its attributes.
MIG_PROFILE: Final = re.compile(r"(?:[1-9]c\.)?[1-9]g\.[1-9][0-9]{0,3}gb(?:[+-][a-z]{1,8}(?:\.[a-z]{1,8})*){0,3}")


def is_compute_slice(profile: str) -> bool:
    """Whether it is a part of a GPU instance, as `1c.3g.40gb` is; device plugins leave those out."""
    return profile[1:3] == "c."


def slices(profile: str) -> tuple[int, int]:
    """Of the GPU instance, and of the compute instance in it."""
    compute, _, rest = profile.partition("c.") if is_compute_slice(profile) else ("", "", profile)
    of_gpu = int(rest.partition("g.")[0])
    return of_gpu, int(compute or of_gpu)
