"""The journal's native protocol, on a socket of the test's own and on a real journald."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import pytest

from nri_gpu.daemon.journald import entry
from tests.support import sandbox
from tests.support.journald import journald
from tests.support.waiting import wait_for

# Logs each line of its input as Python says it, so that a test decides when.
SPEAKER: Final = """
import sys
from pathlib import Path
from nri_gpu.daemon import logs
from loguru import logger
logs.set_up("INFO", journal={launched}, journal_socket=Path({address!r}))
for line in sys.stdin:
    exec(line)
    print("said", flush=True)
"""
BOUND: Final = "logger.bind(gpu_uuid='GPU-1,GPU-2', pod_name='web', elapsed_ms=0.5, fault='two\\nlines')"
Entry = list[tuple[str, str]]


class Speaker:
    """A process that logs what it is told.

    launched: its stderr is not read; else systemd says that stderr is the journal. within: makes another command of it.
    """

    def __init__(
        self,
        address: Path,
        stderr: int | IO[bytes],
        *,
        launched: bool = False,
        within: Callable[[list[str]], list[str]] = list,
    ) -> None:
        end = os.fstat(stderr if isinstance(stderr, int) else stderr.fileno())
        stream = {} if launched else {"JOURNAL_STREAM": f"{end.st_dev}:{end.st_ino}"}
        self.process = subprocess.Popen(
            within([sys.executable, "-c", SPEAKER.format(launched=launched, address=str(address))]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | stream,
        )

    def say(self, statement: str) -> None:
        """Run this there, to its end."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(statement.encode() + b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"said\n"

    def end(self) -> None:
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0


@contextmanager
def listening(address: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(address))
        journal.settimeout(20)
        yield journal
    address.unlink()


@contextmanager
def speaking(address: Path, *, launched: bool = False) -> Iterator[tuple[Speaker, IO[bytes]]]:
    """A speaker, and what it writes to stderr."""
    reading, writing = os.pipe()
    speaker = Speaker(address, writing, launched=launched)
    os.close(writing)
    with os.fdopen(reading, "rb") as stderr, speaker.process:
        yield speaker, stderr
        speaker.end()


def decoded(data: bytes) -> Entry:
    """By the protocol's document."""
    fields: Entry = []
    while data:
        line, _, data = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(data[:8], "little")
            value, newline, data = data[8 : 8 + size], data[8 + size : 9 + size], data[9 + size :]
            assert newline == b"\n"
        fields.append((name.decode(), value.decode()))
    return fields


def values(fields: Entry, name: str) -> list[str]:
    return [value for each, value in fields if each == name]


@pytest.mark.parametrize("launched", [True, False], ids=["launched by the runtime", "stderr is the journal"])
def test_every_field_of_a_line_is_one_of_the_entry(tmp_path: Path, launched: bool) -> None:
    with (
        listening(tmp_path / "journal") as journal,
        speaking(tmp_path / "journal", launched=launched) as (speaker, out),
    ):
        speaker.say(f"{BOUND}.warning('gpu lost')")
        assert decoded(journal.recv(65536)) == [
            ("MESSAGE", 'WARNING gpu lost pod_name=web gpu_uuid=GPU-1,GPU-2 elapsed_ms=0.500 fault="two\\nlines"'),
            ("PRIORITY", "4"),
            ("SYSLOG_IDENTIFIER", "nri-gpu"),
            ("POD_NAME", "web"),
            ("GPU_UUID", "GPU-1"),
            ("GPU_UUID", "GPU-2"),
            ("ELAPSED_MS", "0.500"),
            ("FAULT", "two\nlines"),
        ]
        speaker.end()
        assert out.read() == b""


def test_no_value_can_pass_for_a_field() -> None:
    fields = [("FAULT", "x\nPRIORITY=0\n"), ("PATH", ""), ("NAME", "a=b\0\x1b"), ("REASON", "lone \udc80")]
    sent = decoded(entry(6, "said\nPRIORITY=0\n", fields))
    ours = [("MESSAGE", "said\nPRIORITY=0"), ("PRIORITY", "6"), ("SYSLOG_IDENTIFIER", "nri-gpu")]
    assert sent == [*ours, *fields[:3], ("REASON", "lone \\udc80")]


def test_a_bug_is_one_entry_with_its_traceback(tmp_path: Path) -> None:
    with listening(tmp_path / "journal") as journal, speaking(tmp_path / "journal") as (speaker, _):
        speaker.say("logger.opt(exception=ValueError('no')).error('bug in a handler')")
        fields = decoded(journal.recv(65536))
    assert values(fields, "MESSAGE") == ["ERROR   bug in a handler\nValueError: no"]
    assert values(fields, "PRIORITY") == ["3"]


def test_stderr_that_is_not_the_journal_any_more_is_written_to(tmp_path: Path) -> None:
    """A shell in between gave us another stderr and left the variable (systemd.exec(5))."""
    address, log = tmp_path / "journal", tmp_path / "log"
    with listening(address), speaking(address) as (speaker, _):
        speaker.say(f"import os; os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT), 2)")
        speaker.say(f"logs.set_up('INFO', journal_socket=Path({str(address)!r})); logger.info('hello')")
        clock, _, line = log.read_text().partition(" ")
    assert (len(clock), line) == (len("12:34:56.123456"), "INFO    hello\n")


def test_without_the_journal_lines_go_to_stderr_and_come_back_with_it(tmp_path: Path) -> None:
    address = tmp_path / "journal"
    with speaking(address) as (speaker, stderr):
        speaker.say("logger.info('one')")
        with listening(address) as journal:
            speaker.say("logger.info('two')")
            assert values(decoded(journal.recv(65536)), "MESSAGE") == ["INFO    two"]
        speaker.say("logger.bind(path='/x').info('three')")
        speaker.end()
        assert stderr.read() == b"INFO    one\nINFO    three path=/x\n"


def test_a_journal_that_stalls_never_blocks_a_line_and_learns_what_it_missed(tmp_path: Path) -> None:
    with listening(tmp_path / "journal") as journal, speaking(tmp_path / "journal") as (speaker, stderr):
        speaker.say("for number in range(5_000): logger.bind(attempt=number).info('said')")
        numbers: list[int] = []
        dropped = 0

        def read() -> None:
            nonlocal dropped
            journal.settimeout(0)
            with pytest.raises(BlockingIOError):
                while fields := decoded(journal.recv(65536)):
                    numbers.extend(map(int, values(fields, "ATTEMPT")))
                    dropped += sum(map(int, values(fields, "DROPPED")))

        def caught_up() -> bool:
            read()
            speaker.say("logger.info('more')")
            return dropped > 0

        wait_for("the count of lines that were lost", caught_up, 20)
        read()
        assert numbers == list(range(len(numbers)))
        # Of the lines in between, some were lost too.
        assert len(numbers) >= 1_000
        assert len(numbers) + dropped >= 5_000
        read()
        speaker.end()
        assert stderr.read() == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="a journald of one's own needs root")
@pytest.mark.parametrize("boxed", [False, True], ids=["plain", "in the unit's sandbox"])
def test_journalctl_finds_lines_by_gpu(tmp_path: Path, boxed: bool) -> None:
    """A real journald, whose stream is our stderr as systemd would have it."""

    def within(program: list[str]) -> list[str]:
        return sandbox.command(program, keep=[tmp_path]) if boxed else program

    with journald(tmp_path) as journal, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.connect(str(journal.stream))
        stream.sendall(b"nri-gpu\n\n6\n1\n0\n0\n0\n")  # identifier, unit, priority, prefixes, no forwarding
        speaker = Speaker(journal.socket, stream.fileno(), within=within)
        speaker.say(f"{BOUND}.info('GPU granted')")
        speaker.say("logger.bind(gpu_uuid='GPU-3', fault='y' * 300_000).warning('gpu lost')")
        speaker.end()
        wait_for("all lines", lambda: len(journal.read("--identifier=nri-gpu")) == 2, 20)
        for uuid in ("GPU-1", "GPU-2"):
            [found] = journal.read("--identifier=nri-gpu", f"GPU_UUID={uuid}")
            assert found["MESSAGE"] == (
                'INFO    GPU granted pod_name=web gpu_uuid=GPU-1,GPU-2 elapsed_ms=0.500 fault="two\\nlines"'
            )
            assert (found["PRIORITY"], found["POD_NAME"], found["FAULT"]) == ("6", "web", "two\nlines")
            assert found["GPU_UUID"] == ["GPU-1", "GPU-2"]
        [large] = journal.read("--priority=warning", "POD_NAME=web", "+", "GPU_UUID=GPU-3")
        assert large["FAULT"] == "y" * 300_000
