"""Why there is no connection is logged once; trying again, registering anew, and stopping without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.convert import Configured
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.handlers import EVENTS
from nri_gpu.plugin.supervisor import UNLISTED, Identity, SessionFacts, explain
from nri_gpu.plugin.transport import LIMITS, ConnectionLimits
from nri_gpu.system import folder_watch as watch
from nri_gpu.ttrpc import OK
from tests.support import nri_messages as nri
from tests.support.errors import HarnessError
from tests.support.log import Log
from tests.support.nri_messages import FLAVOURS, NRI_0_6, NRI_0_10, NRI_0_12, REQUEST_TIMEOUT_NS, Flavour
from tests.support.plugin import ServedPlugin
from tests.support.scripted_runtime import until

NRI_SOCKET: Final = Path("/var/run/nri/nri.sock")
NOT_REACHED: Final = "runtime not reached, trying again"
AT_ONCE_S: Final = 0.1  # what a socket that appears may wait; in practice a millisecond or two


@contextlib.asynccontextmanager
async def unreached(folder: Path, limits: ConnectionLimits = LIMITS) -> AsyncIterator[ServedPlugin]:
    """One whose runtime has made no socket yet."""
    served = ServedPlugin(folder, limits=limits)
    try:
        yield served
    finally:
        os.seteuid(0)
        await ServedPlugin.__aexit__(served)


async def serve_late(served: ServedPlugin) -> float:
    """Seconds from the socket's appearance to a connection, with the whole handshake tried on it."""
    served.listener.close()
    began = time.monotonic()
    served.listener.open()
    runtime = await served.listener.accept()
    took_s = time.monotonic() - began
    await runtime.handshake()
    assert served.ready == 1
    return took_s


async def absent(served: ServedPlugin, log: Log) -> str:
    """The sentence on why the runtime is not reached, after a good many tries."""
    served.start()
    await until("the sentence", lambda: log.said(NOT_REACHED))
    await asyncio.sleep(0.3)  # the only way to see that nothing more is logged
    assert served.alive
    line = log.one(NOT_REACHED)
    assert line.fields["socket"] == str(served.listener.path)
    assert ["{fault}: {fix}".format(**line.fields)] == served.away
    return served.away[0]


def left_behind(served: ServedPlugin) -> None:
    served.listener.open()
    served.listener.close()


def forbidden(served: ServedPlugin) -> None:
    served.listener.open()
    served.listener.path.chmod(0o600)
    served.listener.path.parents[2].chmod(0o755)
    os.seteuid(65534)


ABSENT: Final[dict[str, tuple[Callable[[ServedPlugin], object], str, float]]] = {
    "no socket": (lambda _: None, "no NRI socket {path}: containerd is not running", AT_ONCE_S),
    "nobody listening": (
        left_behind,
        "nobody listens on {path}: it was left behind by a runtime that has stopped",
        0.3,
    ),
    "no permission": (forbidden, "no permission to connect to {path}: nri-gpu has to run as root", 0.3),
    # A new folder is noticed; the one within it by the next look.
    "no folder": (lambda served: shutil.rmtree(served.listener.path.parents[1]), "no NRI socket {path}", 0.3),
    "no socket but a file": (lambda served: served.listener.path.write_text(""), "nobody listens on {path}", 0.3),
}


@pytest.mark.parametrize(("arrange", "words", "within_s"), ABSENT.values(), ids=ABSENT)
async def test_no_runtime(
    folder: Path, log: Log, arrange: Callable[[ServedPlugin], object], words: str, within_s: float
) -> None:
    if arrange is forbidden and os.geteuid() != 0:
        pytest.skip("another user is needed to be refused")
    inner = folder / "run" / "nri"
    inner.mkdir(parents=True)
    async with unreached(inner) as served:
        arrange(served)
        assert words.format(path=served.listener.path) in await absent(served, log)
        os.seteuid(0)
        inner.mkdir(parents=True, exist_ok=True)
        assert await serve_late(served) < within_s


async def test_a_folder_that_goes_away_while_watched(folder: Path) -> None:
    inner = folder / "nri"
    inner.mkdir()
    async with unreached(inner) as served:
        served.start()
        await asyncio.sleep(0.05)
        shutil.rmtree(inner)
        await asyncio.sleep(0.05)
        inner.mkdir()
        await serve_late(served)


async def test_without_inotify_it_looks_now_and_then(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has few inotify instances, and others may have taken them all."""

    def none_left() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(watch, "_inotify_init", none_left)
    async with unreached(folder) as served:
        await absent(served, log)
        assert await serve_late(served) < 0.5


async def test_a_new_reason_is_a_new_line(folder: Path, log: Log) -> None:
    async with unreached(folder) as served:
        served.start()
        await until("the first sentence", lambda: len(log.said(NOT_REACHED)) == 1)
        left_behind(served)
        await until("the second", lambda: len(log.said(NOT_REACHED)) == 2)
        served.listener.path.unlink()
        await until("the third", lambda: len(log.said(NOT_REACHED)) == 3)
        assert ["no NRI socket" in away for away in served.away] == [True, False, True]


async def test_no_runtime_for_minutes_is_an_error_once(folder: Path, log: Log) -> None:
    """Also where it connects now and then and never synchronizes."""
    async with unreached(folder, ConnectionLimits(stuck_s=0.05)) as served:
        served.start()
        await until("the error", lambda: len(log.said(NOT_REACHED)) == 2)
        served.listener.open()
        (await served.listener.accept()).close()
        await until("the end", lambda: log.said("connection ended, reconnecting"))
        await (await served.listener.accept()).handshake()
    assert [line.level for line in log.warnings()] == ["WARNING", "ERROR", "WARNING"]
    assert "start containerd" in log.warnings()[1].fields["fix"]


async def test_a_backlog_that_is_full(folder: Path, log: Log) -> None:
    """A runtime that accepts nobody: connecting fails in a way of its own, and is tried again like any other."""
    async with unreached(folder) as served:
        served.listener._backlog = 0
        served.listener.open()
        crowd = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for other in crowd:
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                other.connect(str(served.listener.path))
        served.start()
        await until("a line", lambda: log.warnings())
        assert len(log.warnings()) == 1
        for other in crowd:
            other.close()
        served.listener.close()
        served.listener.open()
        await (await served.listener.accept()).handshake()


async def test_restart_of_the_runtime(folder: Path, log: Log) -> None:
    """Its socket goes and comes back: two lines, then ready again with the ledger it tells, registered anew."""
    pod = nri.asking("1")
    async with ServedPlugin(folder) as served:
        first = await served.connected()
        assert isinstance(await first.create(pod, nri.container(pod)), pb.CreateContainerResponse)
        served.listener.close()
        served.listener.path.unlink()
        first.close()
        await until("the plugin to notice", lambda: len(served.away) == 2)
        served.identity = Identity("other", "90")
        served.listener.open()
        registered = await (await served.listener.accept()).handshake()
        assert (registered.name, registered.index) == ("other", "90")
        assert (served.plugin.ledger.entries, served.ready) == ({}, 2)
    assert [line.text for line in log.warnings()] == ["connection ended, reconnecting", NOT_REACHED]


async def test_the_facts_of_the_last_connection(folder: Path) -> None:
    async with ServedPlugin(folder) as served:
        assert served.supervisor.facts == SessionFacts()
        runtime = await served.connected()
        facts = served.supervisor.facts
        assert facts.synchronize is not None
        assert (facts.synchronize.whole, facts.synchronize.parts) == (True, 1)
        assert facts.answered is not None
        assert max(facts.synchronize.began, facts.answered) <= time.monotonic()
        runtime.close()
        again = await served.listener.accept()
        assert served.supervisor.facts == facts  # until there is more to tell
        await again.register()
        part = pb.SynchronizeRequest(more=True).SerializeToString()
        assert (await again.call("Synchronize", part)).status.ok
        again.close()
        await served.listener.accept()
        cut = served.supervisor.facts.synchronize
        assert cut is not None
        assert (cut.whole, cut.parts, cut.size_bytes) == (False, 1, len(part))


@pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS)
@pytest.mark.parametrize("configure_first", [False, True], ids=["reply first", "configure first"])
async def test_registers_in_either_order(folder: Path, log: Log, flavour: Flavour, configure_first: bool) -> None:
    config = '[plugin]\nindex = "11"\n'
    async with ServedPlugin(folder) as served:
        runtime = await served.listener.accept()
        registered = await runtime.register(flavour, configure_first=configure_first, config=config)
        await runtime.synchronize()
        assert (registered.name, registered.index) == ("nri-gpu", "10")
        assert registered.events == sum(1 << (event - 1) for event in EVENTS) & flavour.known_mask
        told = flavour.configure
        introduction = ("containerd", told["runtime_version"], told.get("NRI_version", ""))
        assert served.configured == [Configured(*introduction, told.get("request_timeout", 0), config)]
        assert served.ready == 1
    line = log.one("registered")
    assert line.fields["nri_version"] == told.get("NRI_version", "unknown")
    assert line.fields["runtime_version"] == told["runtime_version"]
    assert log.warnings() == []


async def test_a_runtime_that_hangs_up_after_configure_is_asked_for_less(folder: Path) -> None:
    """Whatever its version made us think: one that does not know a bit drops the plugin, and fails open."""
    async with ServedPlugin(folder, limits=ConnectionLimits(cut_short_waits_s=(0.01,))) as served:
        masks = []
        for _ in range(3):
            runtime = await served.listener.accept()
            masks.append((await runtime.register(NRI_0_10)).events)
            runtime.close()
    validate = 1 << (Event.VALIDATE_CONTAINER_ADJUSTMENT - 1)
    assert [bool(mask & validate) for mask in masks] == [True, False, True]


async def test_a_runtime_that_lists_nothing_for_long_is_waited_for(folder: Path, log: Log) -> None:
    """As containerd while it stops a container: a new connection would wait longer, and be asked for less."""
    async with ServedPlugin(folder, limits=ConnectionLimits(synchronize_s=0.05)) as served:
        runtime = await served.listener.accept()
        await runtime.register(NRI_0_10)
        await asyncio.sleep(0.3)
        assert log.one("runtime does not list its containers yet").fields["fault"] == UNLISTED
        assert served.away == [UNLISTED]
        await runtime.synchronize()
        assert await runtime.event(Event.RUN_POD_SANDBOX, nri.pod()) == OK
        assert (served.ready, served.away) == (1, [UNLISTED])


async def test_a_runtime_that_has_nothing_to_wait_for_is_not_waited_for(folder: Path, log: Log) -> None:
    """As containerd 1.7.24, which keeps open what it could not synchronize, and calls it never."""
    async with ServedPlugin(folder, limits=ConnectionLimits(synchronize_s=0.05, cut_short_waits_s=(0.01,))) as served:
        for _ in range(2):
            runtime = await served.listener.accept()
            await runtime.register(NRI_0_6)
            await runtime.ended()
        await served.connected(NRI_0_6)
        assert "it has sent no part of its list" in served.away[-1]
    assert not log.said("runtime does not list its containers yet")


async def test_stopping_answers_what_is_in_flight(folder: Path, log: Log) -> None:
    pod = nri.asking("1")
    async with ServedPlugin(folder) as served:
        runtime = await served.connected()
        await runtime.write(runtime.request("CreateContainer", nri.create(pod, nri.container(pod))))
        stopping = asyncio.create_task(served.supervisor.stop(5.0))
        (answer,) = await runtime.answers(1)
        assert answer.status.ok
        began = time.monotonic()
        # A runtime's next call may be right behind the answer to its last.
        assert (await runtime.call("PostCreateContainer")).status.ok
        await runtime.ended()
        await stopping
        assert time.monotonic() - began < 3.0  # and not all that it was given
        await until("the end of the supervisor", lambda: not served.alive)
    assert log.warnings() == []


@pytest.mark.parametrize("flavour", [NRI_0_10, NRI_0_12], ids=["nri 0.10", "nri 0.12"])
async def test_stopping_answers_a_validation_and_leaves_by_an_event(folder: Path, flavour: Flavour) -> None:
    """A runtime that validates fails a creation whose validator is gone, and forgets one at the end of a request."""
    of, refused = nri.asking("1"), nri.asking("1", "ungranted")
    made, without = nri.container(of), nri.container(refused)
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(flavour)
        reply = await runtime.create(of, made)
        assert isinstance(reply, pb.CreateContainerResponse)
        stopping = asyncio.create_task(served.supervisor.stop(5.0))
        await asyncio.sleep(0.4)  # other plugins are asked
        assert await runtime.validate(of, made, {"10-nri-gpu": reply}) == ""
        assert not (await runtime.event(Event.START_CONTAINER, refused, without)).ok  # answered: silence would start it
        began = time.monotonic()
        with pytest.raises(HarnessError, match="the plugin closed the connection"):
            await runtime.event(Event.START_CONTAINER, of, made)
        await stopping
        assert time.monotonic() - began < 0.9  # sooner than without an event
        assert served.phases()[made.id] == "running"


async def test_stopping_before_a_runtime_that_validates_does_not_wait_for_events(folder: Path) -> None:
    async with ServedPlugin(folder) as served:
        await served.connected(NRI_0_12)
        began = time.monotonic()
        await served.supervisor.stop(5.0)
        assert time.monotonic() - began < 3  # a second without any


async def test_a_synchronize_that_is_always_slow_ends_one_connection(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been too late for the runtime, which says nothing of it; but it must not go on like that forever."""
    async with ServedPlugin(folder) as served:
        monkeypatch.setattr(served.plugin, "synchronized", lambda *_: time.sleep(REQUEST_TIMEOUT_NS * 0.9e-9))
        await (await served.connected()).ended()
        runtime = await served.connected()
        assert await runtime.event(Event.RUN_POD_SANDBOX, nri.pod()) == OK
        assert [each for each in served.away if "stood still for" in each] == served.away
        assert (served.ready, len(served.away)) == (2, 1)


async def test_stopping_has_a_limit_while_calls_keep_coming(folder: Path) -> None:
    async with ServedPlugin(folder) as served:
        runtime = await served.connected()
        began = time.monotonic()
        stopping = asyncio.create_task(served.supervisor.stop(0.3))
        with contextlib.suppress(BrokenPipeError):  # it has stopped between the look and the call
            while not stopping.done() and time.monotonic() - began < 10:
                await runtime.write(runtime.request("Shutdown"))
                await asyncio.sleep(0.02)
        await stopping
        assert time.monotonic() - began < 8  # the calls end after ten


async def test_stopping_does_not_wait_for_a_runtime_that_does_not_read(folder: Path) -> None:
    pod = nri.asking("device=99")
    async with ServedPlugin(folder) as served:
        runtime = await served.connected()
        for _ in range(400):  # answers fill the socket's buffers, and some are left with us
            await runtime.write(runtime.request("CreateContainer", nri.create(pod, nri.container(pod))))
        began = time.monotonic()
        await served.supervisor.stop(0.5)
        assert time.monotonic() - began < 3


REASONS = {
    errno.ENOENT: (
        "containerd is not running, or listens elsewhere",
        "start containerd, or set plugin.socket in the policy to its NRI socket",
    ),
    errno.EPERM: ("no permission to connect", "nri-gpu has to run as root"),
    errno.ECONNREFUSED: ("nobody listens", "start the runtime"),
    errno.ENOTSOCK: ("cannot connect", "set plugin.socket in the policy to the runtime's NRI socket"),
}


@pytest.mark.parametrize(("number", "words"), REASONS.items())
def test_every_other_reason_has_its_sentence_and_its_fix(number: int, words: tuple[str, str]) -> None:
    why, fix = explain(OSError(number, ""), NRI_SOCKET, ())
    assert (words[0] in why, fix) == (True, words[1])


def test_nri_that_is_off_is_told_from_a_runtime_that_is_not_there(tmp_path: Path) -> None:
    why, fix = explain(FileNotFoundError(errno.ENOENT, ""), NRI_SOCKET, (tmp_path,))
    assert f"containerd runs ({tmp_path}) but there is no NRI socket {NRI_SOCKET}: NRI is off" in why
    assert 'disable = false under [plugins."io.containerd.nri.v1.nri"]' in fix
