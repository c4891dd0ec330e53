"""`nri-gpu gpus --topology`: how GPUs reach each other, as `nvidia-smi topo -m` draws it."""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.gpu import Gpu, Inventory, Link
from nri_gpu.verbs.gpus import table

LEGEND: Final = (
    ("X", "itself"),
    ("NV#", "that many NVLinks"),
    ("PIX", "at most one PCIe bridge"),
    ("PXB", "several PCIe bridges, no host bridge"),
    ("PHB", "a PCIe host bridge"),
    ("NODE", "the host bridges of one NUMA node"),
    ("SYS", "the link between NUMA nodes"),
    ("?", "not told"),
)


def matrix(inventory: Inventory) -> str:
    """A line for each GPU; a pair with NVLinks shows these, every other one its path over PCIe."""
    links = {(link.a, link.b): link for link in inventory.links}
    cpus = {node.number: node.cpus for node in inventory.numa}
    heads = ("", *(f"GPU{gpu.index}" for gpu in inventory.gpus), "CPU Affinity", "NUMA Affinity")
    rows = [
        (
            f"GPU{gpu.index}",
            *(_cell(gpu, other, links) for other in inventory.gpus),
            ("" if gpu.numa_node is None else cpus.get(gpu.numa_node, "")) or "N/A",
            "N/A" if gpu.numa_node is None else str(gpu.numa_node),
        )
        for gpu in inventory.gpus
    ]
    legend = [f"  {word.ljust(4)} = {meaning}" for word, meaning in LEGEND]
    return "\n".join([*table(heads, rows), "", "Legend:", *legend])


def _cell(one: Gpu, other: Gpu, links: dict[tuple[int, int], Link]) -> str:
    if one.index == other.index:
        return "X"
    link = links.get((min(one.index, other.index), max(one.index, other.index)))
    if link is None:
        return "?"
    return f"NV{link.nvlink}" if link.nvlink else link.pcie
