from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nri_gpu.domain.node import Inventory, NumaNode
from nri_gpu.inventory.formats import CPULIST
from nri_gpu.inventory.kernel import HostFolders, numa_nodes
from nri_gpu.inventory.source import NvmlSource
from tests.support import builders as make
from tests.support.nvml import FakeGpu, build_fake_nvml

MEMINFO = "Node {0} MemTotal:       {1} kB\nNode {0} MemFree:         1 kB\n"


def make_node(sysfs: Path, number: int, cpulist: str | None, memory_kib: int | None = 131_072) -> None:
    """A node's folder as the kernel shows it; None: that file is missing."""
    folder = sysfs / "devices/system/node" / f"node{number}"
    folder.mkdir(parents=True)
    if cpulist is not None:
        (folder / "cpulist").write_text(f"{cpulist}\n")
    if memory_kib is not None:
        (folder / "meminfo").write_text(MEMINFO.format(number, memory_kib))


def test_the_nodes_of_gpus_and_no_others(tmp_path: Path) -> None:
    for number, cpus in enumerate(("0-15,32-47", "16-31,48-63", "64")):
        make_node(tmp_path, number, cpus)
    gpus = [make.gpu(0, numa_node=1), make.gpu(1, numa_node=0), make.gpu(2, numa_node=1), make.gpu(3)]
    assert numa_nodes(gpus, tmp_path) == (NumaNode(0, "0-15,32-47"), NumaNode(1, "16-31,48-63"))


def test_a_node_may_lack_cpus_or_memory(tmp_path: Path) -> None:
    make_node(tmp_path, 0, "")
    make_node(tmp_path, 1, "0-1", 0)
    make_node(tmp_path, 2, "2", None)
    make_node(tmp_path, 3, None)
    make_node(tmp_path, 4, "0-$(reboot)")
    (tmp_path / "devices/system/node/node0/meminfo").write_text("Node 0 MemFree: 1 kB\n")
    gpus = [make.gpu(index, numa_node=index) for index in range(6)]
    assert numa_nodes(gpus, tmp_path) == (NumaNode(0, "", memory=False), NumaNode(1, "0-1", memory=False))


def test_this_machine_has_its_cpus_on_nodes() -> None:
    sysfs = Path("/sys")
    if not (sysfs / "devices/system/node/node0").is_dir():
        assert numa_nodes([make.gpu(0, numa_node=0)], sysfs) == ()
        return
    (node,) = numa_nodes([make.gpu(0, numa_node=0)], sysfs)
    assert node.memory
    assert CPULIST.parse(node.cpus)


@pytest.mark.parametrize("text", ["0", "0-3", "0,2,4", "0-15,32-47", "99999"])
def test_lists(text: str) -> None:
    assert CPULIST.parse(text) == text


@pytest.mark.parametrize(
    "text", ["", "a", "0-", "-1", "0,,1", "0 1", "0-3\n", "\N{ARABIC-INDIC DIGIT ONE}", "0," * 3000 + "0"]
)
def test_no_lists(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of CPUs"):
        CPULIST.parse(text)


def test_the_nvml_source_reads_them_with_the_inventory(tmp_path: Path) -> None:
    make_node(tmp_path, 1, "16-31")
    (tmp_path / "devices_").mkdir()
    (tmp_path / "devices_/devices").write_text("Character devices:\n195 nvidia\n")
    root = build_fake_nvml(tmp_path / "driver", [FakeGpu(numa=1)])

    async def once() -> Inventory:
        source = NvmlSource(root, folders=HostFolders(proc=tmp_path / "devices_", sys=tmp_path))
        try:
            return await source.refresh()
        finally:
            await source.close()

    assert asyncio.run(once()).numa == (NumaNode(1, "16-31"),)
