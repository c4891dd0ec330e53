"""What an operator says about where on the node containers go."""

from __future__ import annotations

from enum import StrEnum


class Strategy(StrEnum):
    """Which of the GPUs that serve an exclusive request equally well are taken."""

    PACK = "pack"  # beside those in use, so that what is left stays together
    SPREAD = "spread"  # away from those in use, each with a way to the host of its own


class NumaBinding(StrEnum):
    """What of a granted container is kept to the NUMA nodes of its GPUs."""

    NONE = "none"
    CPUS = "cpus"
    MEMORY = "memory"
    BOTH = "both"
