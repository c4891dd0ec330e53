"""What the daemon cannot see of containers' processes: it frees no GPU, it is said once, and it is looked at again."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.container import TOLD_WITHIN_S, Cgroup, ContainerId, FirstProcess, PodUid
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.events import Created, LedgerEvent, ProcessesFound, Started, Stopped, Synchronized
from nri_gpu.ledger.holders import Releasing
from nri_gpu.ledger.processes import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PAUSE_S,
    STUCK_AFTER_S,
    WALK_LATE_S,
    WALK_PAUSE_S,
    WARNED_AFTER_S,
    Began,
    Told,
)
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.process_looks import ProcessLooks
from nri_gpu.system import folder_watch
from nri_gpu.system.cgroups import EVENTS, ContainerCgroups, Mounted
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support import nri_messages as nri
from tests.support.ledgers import after
from tests.support.log import Log
from tests.support.plugin import Bench
from tests.support.scripted_runtime import until
from tests.unit.plugin.test_exits import NO_PID, Program
from tests.unit.plugin.test_lost import STILL_RUNS

RUNS, LOST, UNLISTED = IDS = tuple(map(ContainerId, ("runs", "lost", "unlisted")))
WALK: Final = "nri-gpu-cgroups"  # the thread
NOT_WALKED: Final = "cgroups not walked: containers that the runtime does not list keep their GPUs"
NOT_WATCHED: Final = "process of a container cannot be watched"


def cgroups_in(folder: Path) -> ContainerCgroups:
    return ContainerCgroups([Mounted("0:1", "/", str(folder), "cgroup2", frozenset())], same_pids=True)


def put_cgroup(folder: Path, *, populated: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EVENTS).write_text(f"populated {int(populated)}\n")


class Looks(ProcessLooks):
    """With the real clock and real descriptors, beside containers that run with a GPU each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, NodeState(Inventory(taken_at=0))
        self.gpu_looks: list[float] = []
        super().__init__(
            self.state,
            cgroups_in(folder),
            self.take,
            lambda: True,
            time.monotonic,
            asyncio.get_running_loop().call_soon,
            lambda: self.gpu_looks.append(self.now),
        )
        for number, id_ in enumerate(IDS):
            made = make.container(of=f"pod-{id_}", id=id_)
            self.take(Created(self.now, made, make.grant(number, to=made)), Started(self.now, id_))

    @property
    def now(self) -> float:
        return time.monotonic()

    def take(self, *events: LedgerEvent) -> None:
        self.state.commit(after(self.state.ledger, *events))

    def lose(self, ago_s: float = 0.0) -> None:
        """The runtime says that it is over; a process of it is left."""
        put_cgroup(self.folder / LOST, populated=True)
        self.take(ProcessesFound(self.now, {LOST: FirstProcess(0, 0, Cgroup("", f"/{LOST}"))}))
        self.take(Stopped(self.now - ago_s, LOST))

    def unlist(self) -> None:
        entries = tuple(each for id_, each in self.state.ledger.entries.items() if id_ == RUNS)
        self.take(Synchronized(self.now, frozenset({RUNS}), entries, unsought=frozenset({UNLISTED})))

    @property
    def held(self) -> set[ContainerId]:
        return {id_ for id_, each in self.state.ledger.entries.items() if each.holds}


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_without_a_descriptor_left_none_is_free_until_there_is_one(tmp_path: Path, log: Log) -> None:
    """Neither pidfds nor inotify nor a walk work then."""
    looks = Looks(tmp_path)
    with no_descriptor_left():
        looks.saw(Began(RUNS, os.getpid()))
        looks.take(ProcessesFound(looks.now, {LOST: FirstProcess(0, 0, Cgroup("", f"/{LOST}"))}))
        looks.take(Stopped(looks.now, LOST))
        looks.unlist()
        await asyncio.sleep(WALK_PAUSE_S * 2.5)
        assert looks.held == set(IDS)
    await until("the rest to be free", lambda: looks.held == {RUNS})
    assert log.one(NOT_WATCHED).fields["container_id"] == RUNS
    assert "Too many open files" in log.one(NOT_WALKED).fields["fault"]


@pytest.mark.parametrize("pid", [-1, 0xFFFFFFFF, 1 << 70])
async def test_a_pid_that_is_none_tells_nothing(tmp_path: Path, log: Log, pid: int) -> None:
    looks = Looks(tmp_path)
    looks.saw(Began(RUNS, pid))
    await until("it to be said", lambda: log.said(NOT_WATCHED))
    looks.saw(Began(LOST, NO_PID))
    await until("another to be over", lambda: looks.held == {RUNS, UNLISTED})
    assert log.one(NOT_WATCHED).fields["container_id"] == RUNS


@pytest.mark.parametrize("told", [False, True])
async def test_a_watch_ends_with_what_it_is_for(tmp_path: Path, *, told: bool) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - proc has no use for Path
    looks, program = Looks(tmp_path), Program()
    looks.saw(Began(RUNS, program.pid))
    looks.lose()
    await until("both to be watched", lambda: len(os.listdir("/proc/self/fd")) == len(before) + 2)  # noqa: PTH208
    program.end()
    put_cgroup(tmp_path / LOST, populated=False)
    if told:
        looks.take(Stopped(looks.now, RUNS))
        looks.saw(Told(RUNS))
    await until("both to be free", lambda: looks.held == {UNLISTED})
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


async def test_the_end_of_its_process_before_is_not_its_end(tmp_path: Path) -> None:
    """It starts again by the same id in the turn in which its first end is read."""
    looks, program = Looks(tmp_path), Program()
    looks.saw(Began(RUNS, program.pid))
    await asyncio.sleep(PAUSE_S)
    ours, theirs = os.pipe()

    def start_again() -> None:
        os.read(ours, 1)
        looks.saw(Began(RUNS, os.getpid()))

    asyncio.get_running_loop().add_reader(ours, start_again)
    os.write(theirs, b"1")
    program.end()
    await asyncio.sleep(TOLD_WITHIN_S * 1.1)
    assert RUNS in looks.held
    for each in (ours, theirs):
        os.close(each)


async def test_where_no_cgroup_can_be_watched_they_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has no watch left (fs.inotify.max_user_watches)."""

    def refused(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(folder_watch._libc, "inotify_add_watch", refused)
    looks = Looks(tmp_path)
    looks.lose(STUCK_AFTER_S)
    await asyncio.sleep(PAUSE_S * 2)
    put_cgroup(tmp_path / LOST, populated=False)
    await until("it to be free", lambda: LOST not in looks.held)


async def test_the_processes_of_a_lost_container_are_read_once_for_its_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    """It may have thousands of cgroups, and each request is followed by a look."""
    pids, asked = ContainerCgroups.pids, list[FirstProcess]()

    def counted(cgroups: ContainerCgroups, process: FirstProcess, most: int) -> tuple[int, ...]:
        asked.append(process)
        return pids(cgroups, process, most)

    monkeypatch.setattr(ContainerCgroups, "pids", counted)
    looks = Looks(tmp_path)
    looks.lose(WARNED_AFTER_S)
    await until("the warning", lambda: log.said(STILL_RUNS))
    for _ in range(3):
        looks.look()
    assert len(asked) == len(log.said(STILL_RUNS)) == 1


async def test_a_walk_that_cannot_begin_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    """The process may have no more threads (TasksMax)."""
    start, refused = threading.Thread.start, [1, 2]

    def limited(thread: threading.Thread) -> None:
        if refused and thread.name == WALK:
            refused.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    looks = Looks(tmp_path)
    looks.unlist()
    await asyncio.sleep(0.1)
    assert UNLISTED in looks.held
    await until("it to be free", lambda: looks.held == {RUNS})
    assert log.one(NOT_WALKED).fields["fault"] == "can't start new thread"


async def test_released_gpus_are_looked_at_at_once_and_again(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    released = Releasing(PodUid("uid"), "ns/pod", looks.now, 10.0)
    looks.state.commit(looks.state.ledger.with_releasing({GpuUuid("GPU-1"): released}))
    await until("two looks", lambda: len(looks.gpu_looks) > 1)
    assert FIRST_PAUSE_S <= looks.gpu_looks[1] - looks.gpu_looks[0] < LONGEST_PAUSE_S


# --- through the plugin -----------------------------------------------------------------------------------------------


class Hanging:
    """A cgroup of v2 whose file the kernel does not answer for, until it `answers`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file = folder / EVENTS
        os.mkfifo(self._file)

    def answers(self, text: str = "populated 0\n") -> None:
        """Now, and whoever asks later."""
        held = os.open(self._file, os.O_RDWR)
        self._file.unlink()
        self._file.write_text(text)
        os.write(held, text.encode())
        os.close(held)


async def test_while_a_walk_hangs_requests_are_answered_and_none_is_free(tmp_path: Path, log: Log) -> None:
    bench = Bench(cgroups=cgroups_in(tmp_path))
    bench.granted("device=0", "first")
    hanging = Hanging(tmp_path / "container-first-main")
    for number in range(3):  # the runtime restarts, again and again
        bench.synchronize()
        bench.clock.now += WALK_LATE_S
        bench.plugin.processes.look()
        assert "gpu-busy" in bench.refused(nri.asking("device=0", "second"))
        bench.create(nri.asking(f"device={number + 1}", f"other-{number}"))
    assert "has not finished" in log.one(NOT_WALKED).fields["fault"]
    hanging.answers()
    await until("the GPU to be free", lambda: GpuUuid(bench.node.gpus[0].uuid) not in bench.plugin.ledger.usage())


def test_the_process_may_end_while_a_walk_hangs(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path / UNLISTED)

    async def begin() -> None:
        Looks(tmp_path).unlist()
        await until("the walk", lambda: [each for each in threading.enumerate() if each.name == WALK])

    asyncio.run(begin())
    hanging.answers()
    for each in threading.enumerate():
        if each.name == WALK:
            each.join()


async def test_a_listed_process_that_ends_before_the_look_at_it_leaves_its_cgroup_to_be_looked_for(
    tmp_path: Path,
) -> None:
    """Others of the container may live on, as in a shared PID namespace."""
    bench = Bench(cgroups=cgroups_in(tmp_path))
    of, made = bench.granted("device=0", "first")
    put_cgroup(tmp_path / made.id, populated=True)
    bench.plugin.same_pids = True
    bench.synchronize([of], [nri.running(made, NO_PID)])
    bench.tell(Event.STOP_CONTAINER, of, made)
    assert bench.phases() == {made.id: "lost"}
    await until("its cgroup to be found", lambda: made.id in bench.plugin.ledger.processes)
    put_cgroup(tmp_path / made.id, populated=False)
    await until("the GPU to be free", lambda: not bench.plugin.ledger.usage())


async def test_one_that_starts_after_a_list_without_it_is_not_lost_any_more(tmp_path: Path) -> None:
    bench = Bench(cgroups=cgroups_in(tmp_path))
    of, made = bench.granted("device=0", "first")
    bench.tell(Event.START_CONTAINER, of, made)
    bench.synchronize([of])
    assert bench.plugin.ledger.lost.keys() == {made.id}
    bench.tell(Event.START_CONTAINER, of, made)
    assert bench.phases() == {made.id: "running"}
    assert bench.plugin.ledger.lost == {}
