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
from nri_gpu.domain.container import ContainerId
from nri_gpu.ledger.entries import STARTS_S
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin import exits, supervisor
from nri_gpu.plugin.exits import TOLD_WITHIN_S, UntoldExits
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import ServedPlugin
from tests.support.scripted_runtime import ScriptedRuntime, until

SOON_S: Final = 0.3
NO_PID: Final = 0x7FFFFFFF  # more than the kernel gives (proc(5), pid_max)
SENTENCE: Final = "container ended without an event from the runtime"
ID: Final = ContainerId("one")


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


class Watching(UntoldExits):
    """Keeps which containers ended unheard."""

    def __init__(self) -> None:
        super().__init__(lambda id_: self.ended.append(id_), SOON_S)
        self.ended: list[ContainerId] = []


async def seen() -> None:
    """The loop has looked at its descriptors."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_an_end_is_told_after_a_while(program: Program) -> None:
    watching = Watching()
    watching.watch(ID, program.pid)
    await asyncio.sleep(SOON_S * 2)
    assert watching.ended == []
    program.end()
    await seen()
    assert watching.ended == []
    await until("the end", lambda: watching.ended == [ID])


async def test_so_is_one_of_before() -> None:
    watching = Watching()
    watching.watch(ID, NO_PID)
    await until("the end", lambda: watching.ended == [ID])


@pytest.mark.parametrize("ended_first", [False, True])
async def test_of_one_that_the_runtime_tells_of_no_end_is_told(program: Program, *, ended_first: bool) -> None:
    watching = Watching()
    watching.watch(ID, program.pid)
    if ended_first:
        program.end()
        await seen()
    watching.told(ID)
    program.end()
    await asyncio.sleep(SOON_S * 2)
    assert watching.ended == []


async def test_others_than_are_kept_are_not_watched(program: Program) -> None:
    watching = Watching()
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - proc has no use for Path
    for id_ in (ID, ContainerId("two"), ContainerId("three")):
        watching.watch(id_, program.pid)
    watching.watch(ID, program.pid)
    watching.listed({ID: program.pid, ContainerId("three"): program.pid, ContainerId("four"): program.pid})
    watching.told(ContainerId("three"))
    program.end()
    await until("the end", lambda: watching.ended == [ID])
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


async def test_without_a_pid_the_one_of_before_is_watched_on(program: Program) -> None:
    """As containerd lists one whose task it just lost."""
    watching = Watching()
    watching.watch(ID, program.pid)
    program.end()
    watching.watch(ID, 0)
    watching.watch(ContainerId("two"), 0)
    await until("the end", lambda: watching.ended == [ID])
    watching.listed({ID: 0})
    assert watching.unsure == set()
    watching.watch(ID, 0)
    await until("the end", lambda: watching.ended == [ID, ID])


async def test_one_that_was_never_seen_and_has_no_pid_is_unsure_once(program: Program) -> None:
    watching = Watching()
    watched, two = ContainerId("watched"), ContainerId("two")
    watching.watch(watched, program.pid)
    watching.listed({ID: 0, watched: 0, two: program.pid})
    assert watching.unsure == {ID}
    watching.listed({ID: 0, watched: 0, two: 0})
    assert watching.unsure == {two}
    watching.told(two)
    assert watching.unsure == set()
    watching.listed({ID: 0})
    watching.listed({two: program.pid})
    watching.listed({ID: 0})
    assert watching.unsure == {ID}


@pytest.mark.parametrize("pid", [0xFFFFFFFF, 0x80000000])
async def test_a_pid_that_is_none(log: Log, pid: int) -> None:
    watching = Watching()
    watching.watch(ID, pid)
    await asyncio.sleep(SOON_S * 2)
    assert watching.ended == []
    assert log.one("process of a container cannot be watched").fields["container_id"] == ID


async def test_not_all_descriptors_go_there(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "WATCHED_MAX", 3)
    watching = Watching()
    for number in range(9):
        watching.watch(ContainerId(str(number)), program.pid)
    program.end()
    await asyncio.sleep(SOON_S * 2)
    assert sorted(watching.ended) == ["0", "1", "2"]


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
