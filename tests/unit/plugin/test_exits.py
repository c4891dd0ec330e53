"""Containers that end while the runtime does not call us: their GPUs come free, and nobody else's."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import TOLD_WITHIN_S
from nri_gpu.ledger.entries import STARTS_S
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin import supervisor
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import ServedPlugin
from tests.support.scripted_runtime import ScriptedRuntime, until

NO_PID: Final = 0x7FFFFFFF  # more than the kernel gives (proc(5), pid_max)
SENTENCE: Final = "container ended without an event from the runtime"


class Program:
    """A process that runs until it is told to end."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(["sleep", "600"])
        self.pid = self._child.pid

    def end(self) -> None:
        self._child.kill()
        self._child.wait()


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    made.end()


# --- with the plugin and its connection


class Listing:
    """A runtime that lists a container with a GPU, running, by that PID."""

    def __init__(self, served: ServedPlugin, runtime: ScriptedRuntime, pid: int) -> None:
        self.pod, self.made = served.granted("device=0")
        self.made.pid = pid
        self.served, self.runtime = served, runtime

    async def list_anew(self, *containers: pb.Container) -> None:
        """On the next connection, once the last one has ended."""
        await self.runtime.ended()
        self.runtime = await self.served.listener.accept()
        await self.runtime.register()
        await self.runtime.synchronize([self.pod], containers)

    @property
    def held(self) -> bool:
        return any(entry.holds for entry in self.served.plugin.ledger.entries.values())

    async def gives_its_gpu_to_the_next(self) -> bool:
        after = nri.asking("device=0", "next")
        return isinstance(await self.runtime.create(after, nri.container(after)), pb.CreateContainerResponse)


@asynccontextmanager
async def listed(folder: Path, pid: int) -> AsyncIterator[Listing]:
    async with ServedPlugin(folder) as served:
        listing = Listing(served, await served.listener.accept(), pid)
        await listing.runtime.register()
        await listing.runtime.synchronize([listing.pod], [nri.running(listing.made, pid)])
        yield listing


async def test_its_gpu_is_another_s_then(folder: Path, log: Log, program: Program) -> None:
    async with listed(folder, program.pid) as listing:
        program.end()
        assert listing.held
        await until("the GPU to come free", lambda: not listing.held)
        assert log.one(SENTENCE).fields["container_id"] == listing.made.id
        assert await listing.gives_its_gpu_to_the_next()


@pytest.mark.parametrize("event", [Event.CREATE_CONTAINER, Event.START_CONTAINER])
async def test_a_container_that_is_run_again_keeps_its_gpu(folder: Path, program: Program, event: Event) -> None:
    """By the same id, as Docker does."""
    async with listed(folder, program.pid) as listing:
        program.end()
        if event is Event.CREATE_CONTAINER:
            await listing.runtime.create(listing.pod, listing.made)
        else:
            listing.made.pid = os.getpid()
            assert (await listing.runtime.event(event, listing.pod, listing.made)).ok
        await asyncio.sleep(TOLD_WITHIN_S * 1.5)
        assert listing.held


async def test_pids_of_another_namespace_say_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "has_our_pids", lambda _: False)
    async with listed(folder, NO_PID) as listing:
        await asyncio.sleep(TOLD_WITHIN_S * 1.5)
        assert listing.held


@pytest.mark.parametrize("same_pids", [True, False])
async def test_one_without_a_pid_is_asked_for_once_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, same_pids: bool
) -> None:
    monkeypatch.setattr(supervisor, "has_our_pids", lambda _: same_pids)
    async with listed(folder, 0) as listing:
        assert listing.held
        await listing.list_anew()
        assert not listing.held
        assert listing.served.away == [supervisor.LISTED_ANEW]
        assert await listing.gives_its_gpu_to_the_next()


async def test_one_that_stays_without_a_pid_keeps_its_gpu_and_the_connection(folder: Path) -> None:
    """Its shim does not answer, say."""
    async with listed(folder, 0) as listing:
        await listing.list_anew(nri.running(listing.made, 0))
        await asyncio.sleep(TOLD_WITHIN_S * 1.5)
        assert (await listing.runtime.event(Event.RUN_POD_SANDBOX, nri.pod("other"))).ok
        assert listing.held
        assert len(listing.served.away) == 1


async def test_its_end_that_is_told_saves_the_connection(folder: Path) -> None:
    async with listed(folder, 0) as listing:
        assert (await listing.runtime.event(Event.STOP_CONTAINER, listing.pod, listing.made)).ok
        await asyncio.sleep(TOLD_WITHIN_S * 1.5)
        assert not listing.held
        assert listing.served.away == []


async def stopped_in_its_start(served: ServedPlugin) -> Listing:
    """A container that the runtime is asked to stop before it runs, of whose PID nothing is known."""
    listing = Listing(served, await served.connected(), 0)
    listing.made.state = pb.CONTAINER_CREATED
    for event in (Event.START_CONTAINER, Event.STOP_CONTAINER):
        assert (await listing.runtime.event(event, listing.pod, listing.made)).ok
    assert not await listing.gives_its_gpu_to_the_next()
    return listing


async def test_a_start_that_fails_frees_its_gpu_a_moment_later(folder: Path) -> None:
    async with ServedPlugin(folder) as served:
        listing = await stopped_in_its_start(served)
        served.clock.now += STARTS_S
        await until("the GPU to come free", lambda: not listing.held)
        assert await listing.gives_its_gpu_to_the_next()


async def test_a_start_that_succeeds_though_it_was_to_be_stopped_keeps_its_gpu(folder: Path) -> None:
    async with ServedPlugin(folder) as served:
        listing = await stopped_in_its_start(served)
        assert (await listing.runtime.event(Event.POST_START_CONTAINER, listing.pod, listing.made)).ok
        served.clock.now += STARTS_S
        served.plugin.lapse()
        assert not await listing.gives_its_gpu_to_the_next()
        listing.made.state = pb.CONTAINER_RUNNING
        assert (await listing.runtime.event(Event.STOP_CONTAINER, listing.pod, listing.made)).ok
        assert await listing.gives_its_gpu_to_the_next()
