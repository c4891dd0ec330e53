"""Each burst of changes is reported once, whatever noticed it first: inotify or a look."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nri_gpu.inventory.node_watch import DEV_FOLDERS, NodeWatch, Pace
from tests.support.log import Log
from tests.support.running import running
from tests.support.scripted_runtime import until

SELDOM = Pace(look_s=60.0, quiet_s=0.02, longest_s=0.5)
OFTEN = Pace(look_s=0.005, quiet_s=0.0)


class Node:
    """What a look shows, and how often a change was reported."""

    def __init__(self) -> None:
        self.state: Hashable = 0
        self.looks = 0
        self.reports = 0

    def look(self) -> Hashable:
        self.looks += 1
        return self.state

    def changed(self) -> None:
        self.reports += 1


@asynccontextmanager
async def watching(watch: NodeWatch, node: Node) -> AsyncIterator[None]:
    async with running(watch.run()):
        await until("the first look", lambda: node.looks > 0)
        yield


async def reported(node: Node, times: int = 1) -> None:
    await until(f"{times} reports", lambda: node.reports == times)


async def test_a_look_finds_a_change_without_an_event() -> None:
    node = Node()
    async with watching(NodeWatch(node.look, node.changed, folders=(), pace=OFTEN), node):
        looks = node.looks
        await until("node.looks > looks + 5", lambda: node.looks > looks + 5)
        assert node.reports == 0
        node.state = 1
        await reported(node)


async def test_a_burst_is_one_change(folder: Path) -> None:
    node = Node()
    async with watching(NodeWatch(node.look, node.changed, folders=(folder,), pace=SELDOM), node):
        node.state = 1
        for number in range(20):
            (folder / f"nvidia{number}").touch()
            await asyncio.sleep(0)
        await reported(node)
        assert node.looks == 2


async def test_an_endless_burst_is_reported_too(folder: Path) -> None:
    node = Node()
    pace = Pace(look_s=60.0, quiet_s=1.0, longest_s=0.05)

    async def touch() -> None:
        while True:
            (folder / "nvidia0").touch()
            (folder / "nvidia0").unlink()
            await asyncio.sleep(0.005)

    async with running(touch()), watching(NodeWatch(node.look, node.changed, folders=(folder,), pace=pace), node):
        node.state = 1
        await reported(node)


async def test_a_node_in_dev_and_in_a_folder_that_is_new(folder: Path) -> None:
    node = Node()
    below = folder / "nvidia-caps"
    watch = NodeWatch(node.look, node.changed, folders=(folder, below), pace=SELDOM)
    async with watching(watch, node):
        node.state = 1
        below.mkdir()
        await reported(node)
        node.state = 2
        (below / "nvidia-cap3").touch()
        await reported(node, 2)
        looks = node.looks
        (folder / "loop7").touch()  # looked at, and of no interest
        await until("node.looks > looks", lambda: node.looks > looks)
        assert node.reports == 2


async def test_in_a_sandbox_without_inotify_looks_are_enough_and_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    def refuse() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("nri_gpu.system.folder_watch._inotify_init", refuse)
    node = Node()
    async with watching(NodeWatch(node.look, node.changed, folders=(folder,), pace=OFTEN), node):
        node.state = 1
        await reported(node)
    assert "Too many open files" in str(log.one("no inotify: polling device nodes for changes each second").fields)


async def test_of_the_machine_and_of_a_topology_file() -> None:
    for folders in (DEV_FOLDERS, ()):
        node = Node()
        async with watching(NodeWatch(node.look, node.changed, folders=folders), node):
            node.state = 1
            await reported(node)
