"""What a topology file says of the majors of a node: `[node.majors]`, and those of a change."""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.gpu import Majors
from nri_gpu.inventory.table import Table

MAJOR_MAX: Final = 4095  # 12 bits (linux/kdev_t.h)


def read_majors(table: Table) -> Majors:
    """One that is left out: that module is not loaded."""
    names = ("nvidia", "nvidia_uvm", "nvidia_caps")
    nvidia, uvm, caps = (table.number(name, 1, MAJOR_MAX, optional=True) for name in names)
    modeset = table.maybe_flag("modeset")
    table.done()
    return Majors(nvidia=nvidia, nvidia_uvm=uvm, nvidia_caps=caps, modeset=modeset)
