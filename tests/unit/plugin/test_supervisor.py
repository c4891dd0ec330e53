"""No socket, no permission, nobody there: said once, tried for ever, connected at once when the runtime is there."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.events import Event
from nri_gpu.plugin import supervisor as supervise
from nri_gpu.plugin.supervisor import Identity, explain
from nri_gpu.system import inotify as watch
from tests.support import nri_messages as nri
from tests.support.errors import HarnessError
from tests.support.log import Log
from tests.support.nri_messages import NRI_0_10, NRI_0_12, Flavour
from tests.support.plugin import Station
from tests.support.scripted_runtime import until

NRI_SOCKET: Final = Path("/var/run/nri/nri.sock")
NOT_REACHED: Final = "runtime not reached, trying again"
AT_ONCE_S: Final = 0.1  # what a socket that appears may wait; in practice a millisecond or two


def no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "RUNTIME_SOCKETS", (Path("/nowhere/containerd.sock"),))


async def serve_late(station: Station) -> float:
    """Seconds from the socket's appearance to a connection, with the whole handshake tried on it."""
    began = time.monotonic()
    station.listener.open()
    runtime = await station.listener.accept()
    took_s = time.monotonic() - began
    await runtime.handshake()
    assert station.ready == 1
    return took_s


async def absent(station: Station, log: Log) -> str:
    """The sentence on why the runtime is not reached, after a good many tries."""
    station.start()
    await until("the sentence", lambda: log.said(NOT_REACHED))
    await asyncio.sleep(0.6)  # the only way to see that nothing more is said
    assert station.alive
    assert len(log.said(NOT_REACHED)) == len(station.away) == 1
    line = log.one(NOT_REACHED)
    assert line.fields["socket"] == str(station.listener.path)
    assert line.fields["fault"] == station.away[0]
    return station.away[0]


async def leave(station: Station) -> None:
    await Station.__aexit__(station)


async def test_no_socket(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    no_runtime(monkeypatch)
    station = Station(folder)
    try:
        sentence = await absent(station, log)
        assert sentence.startswith(f"no NRI socket {station.listener.path}: containerd is not running")
        assert await serve_late(station) < AT_ONCE_S
    finally:
        await leave(station)


async def test_no_folder_for_the_socket(folder: Path, log: Log) -> None:
    inner = folder / "run" / "nri"
    station = Station(inner)
    try:
        await absent(station, log)
        inner.mkdir(parents=True)
        assert await serve_late(station) < 0.3  # a new folder is noticed; the one within it by the next look
    finally:
        await leave(station)


async def test_nobody_listening(folder: Path, log: Log) -> None:
    station = Station(folder)
    station.listener.open()
    station.listener.close()
    try:
        assert await absent(station, log) == (
            f"nobody listens on {station.listener.path}: it was left behind by a runtime that has stopped"
        )
        assert await serve_late(station) < 0.3
    finally:
        await leave(station)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed to be refused")
async def test_no_permission(folder: Path, log: Log) -> None:
    station = Station(folder)
    station.listener.open()
    os.chmod(station.listener.path, 0o600)  # noqa: PTH101 - quick, and nobody else is on this loop
    os.chmod(folder, 0o755)  # noqa: PTH101 - as above
    os.seteuid(65534)
    try:
        sentence = await absent(station, log)
        assert sentence == f"no permission to connect to {station.listener.path}: nri-gpu has to run as root"
        os.seteuid(0)
        runtime = await station.listener.accept()
        await runtime.handshake()
    finally:
        os.seteuid(0)
        await leave(station)


async def test_something_that_is_no_socket(folder: Path, log: Log) -> None:
    station = Station(folder)
    station.listener.path.write_text("")
    try:
        assert "nobody listens" in await absent(station, log)
    finally:
        await leave(station)


async def test_a_new_reason_is_a_new_line(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    no_runtime(monkeypatch)
    station = Station(folder)
    try:
        await absent(station, log)
        station.listener.open()
        station.listener.close()
        await until("the second sentence", lambda: len(log.said(NOT_REACHED)) == 2)
        station.listener.path.unlink()
        await until("the third", lambda: len(log.said(NOT_REACHED)) == 3)
        assert [away.split()[0] for away in station.away] == ["no", "nobody", "no"]
    finally:
        await leave(station)


async def test_restart_of_the_runtime(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket goes and comes back: two lines, then ready again with the ledger it tells."""
    no_runtime(monkeypatch)
    pod = nri.asking("1")
    async with Station(folder) as station:
        first = await station.connected()
        made = nri.container(pod)
        reply = await first.create(pod, made)
        assert isinstance(reply, pb.CreateContainerResponse)
        station.listener.close()
        station.listener.path.unlink()
        first.close()
        await until("the plugin to notice", lambda: len(station.away) == 2)
        station.listener.open()
        again = await station.listener.accept()
        await again.handshake()
        assert station.plugin.ledger.entries == {}
        assert station.ready == 2
    assert [line.text for line in log.warnings()] == ["connection ended, reconnecting", NOT_REACHED]


async def test_a_backlog_that_is_full(folder: Path, log: Log) -> None:
    """A runtime that accepts nobody: connecting fails in a way of its own, and is tried again like any other."""
    station = Station(folder)
    station.listener._backlog = 0
    station.listener.open()
    crowd = []
    for _ in range(2):
        other = socket.socket(socket.AF_UNIX)
        other.setblocking(False)
        try:
            other.connect(str(station.listener.path))
        except BlockingIOError:
            other.close()
            break
        crowd.append(other)
    try:
        station.start()
        await until("a line", lambda: log.warnings())
        assert len(log.warnings()) == 1
        for other in crowd:
            other.close()
        for _ in crowd:
            (await station.listener.accept()).close()
        runtime = await station.listener.accept()
        await runtime.handshake()
    finally:
        await leave(station)


async def test_without_inotify_it_looks_now_and_then(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has few inotify instances, and others may have taken them all."""

    def none_left() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(watch, "_inotify_init", none_left)
    station = Station(folder)
    try:
        await absent(station, log)
        assert await serve_late(station) < 0.5
    finally:
        await leave(station)


async def test_a_folder_that_goes_away_while_watched(folder: Path) -> None:
    inner = folder / "nri"
    inner.mkdir()
    station = Station(inner)
    station.start()
    try:
        await asyncio.sleep(0.05)
        shutil.rmtree(inner)
        await asyncio.sleep(0.05)
        inner.mkdir()
        await serve_late(station)
    finally:
        await leave(station)


async def test_identity_is_asked_for_at_each_registration(folder: Path) -> None:
    async with Station(folder) as station:
        first = await station.listener.accept()
        assert (await first.handshake()).index == "10"
        station.identity = Identity("other", "90")
        first.close()
        again = await station.listener.accept()
        registered = await again.handshake()
        assert (registered.name, registered.index) == ("other", "90")


async def test_stopping_answers_what_is_in_flight(folder: Path, log: Log) -> None:
    pod = nri.asking("1")
    async with Station(folder) as station:
        runtime = await station.connected()
        await runtime.write(runtime.request("CreateContainer", nri.create(pod, nri.container(pod))))
        stopping = asyncio.create_task(station.supervisor.stop(5.0))
        (answer,) = await runtime.answers(1)
        assert answer.status.ok
        began = time.monotonic()
        # A runtime's next call may be right behind the answer to its last.
        assert (await runtime.call("PostCreateContainer")).status.ok
        await runtime.ended()
        await stopping
        assert time.monotonic() - began < 1.0
        await until("the end of the supervisor", lambda: not station.alive)
    assert log.warnings() == []


@pytest.mark.parametrize("flavour", [NRI_0_10, NRI_0_12], ids=["nri 0.10", "nri 0.12"])
async def test_stopping_answers_a_validation_and_leaves_by_an_event(folder: Path, flavour: Flavour) -> None:
    """A runtime that validates fails a creation whose validator is gone, and forgets one at the end of a request."""
    of, refused = nri.asking("1"), nri.asking("1", "ungranted")
    made, without = nri.container(of), nri.container(refused)
    async with Station(folder) as station:
        runtime = await station.connected(flavour)
        reply = await runtime.create(of, made)
        assert isinstance(reply, pb.CreateContainerResponse)
        stopping = asyncio.create_task(station.supervisor.stop(5.0))
        await asyncio.sleep(0.4)  # other plugins are asked
        assert await runtime.validate(of, made, {"10-nri-gpu": reply}) == ""
        assert not (await runtime.event(Event.START_CONTAINER, refused, without)).ok  # answered: silence would start it
        began = time.monotonic()
        with pytest.raises(HarnessError, match="the plugin closed the connection"):
            await runtime.event(Event.START_CONTAINER, of, made)
        await stopping
        assert time.monotonic() - began < 0.3
        assert station.phases()[made.id] == "running"


async def test_stopping_before_a_runtime_that_validates_does_not_wait_for_events(folder: Path) -> None:
    async with Station(folder) as station:
        await station.connected(NRI_0_12)
        await asyncio.sleep(1.1)  # quiet
        began = time.monotonic()
        await station.supervisor.stop(5.0)
        assert time.monotonic() - began < 0.3


async def test_stopping_has_a_limit_while_calls_keep_coming(folder: Path) -> None:
    async with Station(folder) as station:
        runtime = await station.connected()
        await runtime.call("Shutdown")
        began = time.monotonic()
        stopping = asyncio.create_task(station.supervisor.stop(0.3))
        while not stopping.done():
            await runtime.write(runtime.request("Shutdown"))
            await asyncio.sleep(0.02)
            if time.monotonic() - began > 3:
                break
        await stopping
        assert 0.2 < time.monotonic() - began < 1.0


async def test_stopping_does_not_wait_for_a_runtime_that_does_not_read(folder: Path) -> None:
    pod = nri.asking("device=99")
    async with Station(folder) as station:
        runtime = await station.connected()
        for _ in range(400):  # answers fill the socket's buffers, and some are left with us
            await runtime.write(runtime.request("CreateContainer", nri.create(pod, nri.container(pod))))
        began = time.monotonic()
        await station.supervisor.stop(0.5)
        assert time.monotonic() - began < 1.5


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOENT, "no NRI socket"),
        (errno.EACCES, "has to run as root"),
        (errno.EPERM, "has to run as root"),
        (errno.ECONNREFUSED, "nobody listens"),
        (errno.ENOTSOCK, "cannot connect"),
    ],
)
def test_every_reason_has_its_sentence(monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    no_runtime(monkeypatch)
    sentence = explain(OSError(number, os.strerror(number)), NRI_SOCKET)
    assert words in sentence
    assert str(NRI_SOCKET) in sentence


def test_nri_that_is_off_is_told_from_a_runtime_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    (folder / "containerd.sock").touch()
    monkeypatch.setattr(supervise, "RUNTIME_SOCKETS", (folder / "containerd.sock",))
    sentence = explain(FileNotFoundError(errno.ENOENT, ""), NRI_SOCKET)
    assert "NRI is off" in sentence
    assert "disable = false" in sentence
    assert 'plugins."io.containerd.nri.v1.nri"' in sentence
