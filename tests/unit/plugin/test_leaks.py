"""One call more after warming up leaves nothing behind: no task, no descriptor, no object of ours."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from pathlib import Path

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import Event
from tests.support import nri_messages as nri
from tests.support.plugin import ServedPlugin
from tests.support.scripted_runtime import ScriptedRuntime


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - proc has no use for Path


def ours() -> Counter[str]:
    """Living objects of our classes and of the messages', by class."""
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(("nri_gpu", "nri.pkg")))


async def census() -> tuple[int, int, Counter[str]]:
    for _ in range(5):  # what is put off until after the reply has had its turn
        await asyncio.sleep(0)
    gc.collect()  # of other tests, too
    return len(asyncio.all_tasks()), descriptors(), ours()


async def one_life(runtime: ScriptedRuntime, number: int) -> None:
    """A container granted, started, stopped, removed; one refused; one passed by."""
    pod, greedy, plain = nri.asking("2", f"p{number}"), nri.asking("9", f"g{number}"), nri.pod(f"q{number}")
    made = nri.container(pod)
    assert isinstance(await runtime.create(pod, made), pb.CreateContainerResponse)
    for kind in (Event.START_CONTAINER, Event.STOP_CONTAINER, Event.REMOVE_CONTAINER):
        assert (await runtime.event(kind, pod, made)).ok
    assert not isinstance(await runtime.create(greedy, nri.container(greedy)), pb.CreateContainerResponse)
    assert isinstance(await runtime.create(plain, nri.container(plain)), pb.CreateContainerResponse)
    assert (await runtime.event(Event.REMOVE_POD_SANDBOX, pod)).ok


async def test_one_container_more(folder: Path) -> None:
    async with ServedPlugin(folder) as served:
        runtime = await served.connected()
        for number in range(5):
            await one_life(runtime, number)
            served.ledgers.clear()
        before = await census()
        for number in range(5, 8):
            await one_life(runtime, number)
            served.ledgers.clear()
        assert await census() == before


async def test_one_connection_more(folder: Path) -> None:
    async with ServedPlugin(folder) as served:

        async def one_connection() -> None:
            runtime = await served.connected()
            await one_life(runtime, 1)
            runtime.close()
            for kept in (served.ledgers, served.configured, served.away, served.listener._accepted):
                kept.clear()

        for _ in range(3):
            await one_connection()
        runtime = await served.connected()
        before = await census()
        runtime.close()
        for _ in range(3):
            await one_connection()
        runtime = await served.connected()
        served.configured.clear()
        after = await census()
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert after[2] - before[2] == Counter()
