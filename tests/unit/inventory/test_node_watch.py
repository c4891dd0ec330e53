"""One word for each burst, whoever noticed it first, and none for nothing."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nri_gpu.inventory.node_watch import NodeWatch, Pace, Uevents, node_watch
from tests.support.log import Log
from tests.support.scripted_runtime import until

SELDOM = Pace(look_s=60.0, quiet_s=0.02, longest_s=0.5)
OFTEN = Pace(look_s=0.005, quiet_s=0.0)


class Node:
    """What a glance shows, and how often a change was told."""

    def __init__(self) -> None:
        self.state: Hashable = 0
        self.looks = 0
        self.told = 0

    def look(self) -> Hashable:
        self.looks += 1
        return self.state

    def changed(self) -> None:
        self.told += 1


@asynccontextmanager
async def running(watch: NodeWatch, node: Node) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run())
    try:
        await until("node.looks > 0", lambda: node.looks > 0)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def told(node: Node) -> None:
    await until("a change to be told", lambda: node.told == 1)


def quiet(node: Node, pace: Pace) -> NodeWatch:
    return NodeWatch(node.look, node.changed, folders=(), uevents=False, pace=pace)


async def test_a_glance_finds_what_nobody_tells() -> None:
    node = Node()
    async with running(quiet(node, OFTEN), node):
        looks = node.looks
        await until("node.looks > looks + 5", lambda: node.looks > looks + 5)
        assert node.told == 0
        node.state = 1
        await until("node.told == 1", lambda: node.told == 1)


async def test_a_burst_is_one_change() -> None:
    node = Node()
    watch = quiet(node, SELDOM)
    async with running(watch, node):
        for _ in range(20):
            watch.notify()
            await asyncio.sleep(0)
        await until("node.told == 1", lambda: node.told == 1)
        assert node.looks == 2


async def test_a_burst_without_end_is_told_of_too() -> None:
    node = Node()
    watch = quiet(node, Pace(look_s=60.0, quiet_s=1.0, longest_s=0.05))

    async def nag() -> None:
        while True:
            watch.notify()
            await asyncio.sleep(0.005)

    nagging = asyncio.create_task(nag())
    async with running(watch, node):
        await until("node.told > 0", lambda: node.told > 0)
    nagging.cancel()


async def test_a_node_in_dev_is_seen_at_once_and_in_a_folder_that_is_new(folder: Path) -> None:
    node = Node()
    below = folder / "nvidia-caps"
    watch = NodeWatch(node.look, node.changed, folders=(folder, below), uevents=False, pace=SELDOM)
    async with running(watch, node):
        node.state = 1
        below.mkdir()
        await until("node.told == 1", lambda: node.told == 1)
        node.state = 2
        (below / "nvidia-cap3").touch()
        await until("node.told == 2", lambda: node.told == 2)
        looks = node.looks
        (folder / "loop7").touch()  # looked at, and of no interest
        await until("node.looks > looks", lambda: node.looks > looks)
        assert node.told == 2


async def test_a_sandbox_without_device_events_is_said_once(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    def refuse(_: Uevents) -> None:
        raise OSError(errno.EAFNOSUPPORT, "no")

    monkeypatch.setattr(Uevents, "open", refuse)
    node = Node()
    watch = NodeWatch(node.look, node.changed, folders=(), pace=OFTEN)
    async with running(watch, node):
        node.state = 1
        await until("node.told == 1", lambda: node.told == 1)
    said = log.one("no device events: looking for changes of the node each second").fields["fault"]
    assert said == "cannot receive the kernel's device events (Address family not supported by protocol)"


async def test_no_inotify_left_is_said_and_made_up_for(monkeypatch: pytest.MonkeyPatch, folder: Path, log: Log) -> None:
    def refuse() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("nri_gpu.system.inotify._inotify_init", refuse)
    node = Node()
    watch = NodeWatch(node.look, node.changed, folders=(folder,), uevents=False, pace=OFTEN)
    async with running(watch, node):
        node.state = 1
        await until("node.told == 1", lambda: node.told == 1)
    assert log.one("no inotify: looking for changes of device nodes each second")


async def test_of_this_machine_and_of_a_file() -> None:
    for simulated in (False, True):
        node = Node()
        watch = node_watch(node.look, node.changed, simulated=simulated)
        async with running(watch, node):
            watch.notify()
            await told(node)
