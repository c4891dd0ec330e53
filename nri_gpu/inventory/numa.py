"""The host's NUMA nodes, as the kernel lists their CPUs. Read with the inventory, never for a container."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from nri_gpu.domain.gpu import Gpu, NumaNode

CPULIST_MAX: Final = 4096  # characters, a page of sysfs
_CPULIST: Final = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*", re.ASCII)
_MEMORY: Final = "MemTotal:"


def parse_cpulist(text: str) -> str:
    """The kernel's list syntax, `0-15,32-47`, as it is.

    Raises: ValueError.
    """
    if len(text) > CPULIST_MAX or not _CPULIST.fullmatch(text):
        raise ValueError(f'{text[:64]!r} is not a list of CPUs ("0-15,32-47")')
    return text


def numa_nodes(gpus: Iterable[Gpu], sysfs: Path) -> tuple[NumaNode, ...]:
    """The nodes that GPUs are nearest to; one that cannot be read is left out."""
    numbers = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
    return tuple(node for number in numbers if (node := _read(number, sysfs)) is not None)


def _read(number: int, sysfs: Path) -> NumaNode | None:
    folder = sysfs / "devices/system/node" / f"node{number}"
    try:
        listed = (folder / "cpulist").read_text(encoding="ascii").strip()
        cpus = parse_cpulist(listed) if listed else ""  # a node of memory alone
        return NumaNode(number, cpus, memory=_has_memory(folder))
    except (OSError, ValueError):
        return None


def _has_memory(folder: Path) -> bool:
    """Source: `Node 0 MemTotal:  131072 kB` in meminfo; a node of CPUs alone has 0."""
    for line in (folder / "meminfo").read_text(encoding="ascii").splitlines():
        before, found, amount = line.partition(_MEMORY)
        if found and before:
            return int(amount.split()[0]) > 0
    return False
