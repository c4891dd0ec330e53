"""What a service manager hears: by path or abstract name, and nothing where there is none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from nri_gpu.system.service_manager import Notifier


def manager(address: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(address)
    listening.settimeout(5)
    return listening


def every_word(notifier: Notifier) -> None:
    notifier.ready("serving /run/nri.sock")
    notifier.status("not connected")
    notifier.alive()
    notifier.stopping()


WORDS = [b"READY=1\nSTATUS=serving /run/nri.sock", b"STATUS=not connected", b"WATCHDOG=1", b"STOPPING=1"]


@pytest.mark.parametrize("form", ["path", "abstract name"])
def test_every_word_arrives(folder: Path, form: str) -> None:
    name = str(folder / "notify")
    with manager(name if form == "path" else f"\0{name}") as listening:
        notifier = Notifier({"NOTIFY_SOCKET": name if form == "path" else f"@{name}"})
        every_word(notifier)
        assert [listening.recv(4096) for _ in WORDS] == WORDS
        notifier.close()


def test_silence_where_nobody_listens(folder: Path) -> None:
    every_word(Notifier({}))
    gone = Notifier({"NOTIFY_SOCKET": str(folder / "nobody")})
    every_word(gone)
    gone.close()
    gone.close()
    every_word(gone)


def test_a_manager_that_does_not_read_holds_nobody_up(folder: Path) -> None:
    with manager(str(folder / "notify")):
        notifier = Notifier({"NOTIFY_SOCKET": str(folder / "notify")})
        for _ in range(10_000):
            notifier.alive()
        notifier.close()


def test_a_status_is_one_line(folder: Path) -> None:
    """A runtime's own words are part of it, and must not become assignments of their own."""
    with manager(str(folder / "notify")) as listening:
        notifier = Notifier({"NOTIFY_SOCKET": str(folder / "notify")})
        notifier.status("not connected: no\nREADY=1")
        assert listening.recv(4096) == b"STATUS=not connected: no READY=1"
        notifier.close()


@pytest.mark.parametrize(
    ("environ", "expected_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": ""}, None),
    ],
)
def test_watchdog(environ: dict[str, str], expected_s: float | None) -> None:
    assert Notifier(environ).watchdog_s == expected_s
