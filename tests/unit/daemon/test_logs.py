"""The log's lines: which fields, how quoted; and that nobody who does not read it can hold us up."""

from __future__ import annotations

import ast
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from loguru import logger

import nri_gpu
from nri_gpu.daemon import logs
from nri_gpu.daemon.logs import FIELDS

if TYPE_CHECKING:
    from loguru import Message


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Lines as the daemon formats them."""
    lines: list[str] = []

    def take(message: Message) -> None:
        lines.append(logs.line_of(message.record))

    handler = logger.add(take, level="TRACE", format=lambda _: "", catch=False)
    yield lines
    logger.remove(handler)


def test_a_fixed_phrase_and_fields_in_a_fixed_order(said: list[str]) -> None:
    logger.bind(elapsed_ms=0.12345, decision="inject", gpu_uuid="GPU-1,GPU-2", grants=3).info("GPU granted")
    assert said == ["INFO    GPU granted decision=inject gpu_uuid=GPU-1,GPU-2 grants=3 elapsed_ms=0.123\n"]


def test_a_field_that_is_empty_is_left_out(said: list[str]) -> None:
    logger.bind(cgroup="", namespace="", lost=0, fault="it ended").info("said")
    assert said == ['INFO    said fault="it ended" lost=0\n']


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain-1.2/3:x,y", "plain-1.2/3:x,y"),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "no"', '"say \\"no\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("line\nINFO    GPU granted", '"line\\nINFO    GPU granted"'),
        ("\r\t\x1b[31mred", '"\\r\\t\\x1b[31mred"'),
        ("nul\0 and \u2028 and \u202e", '"nul\\x00 and \\u2028 and \\u202e"'),
        ("\u00fcml\u00e4ut", "\u00fcml\u00e4ut"),
        ("lone \udc80", '"lone \\udc80"'),
        ("{braces} {0} <red>", '"{braces} {0} <red>"'),
        (True, "True"),
        (1.0, "1.000"),
        (None, "None"),
    ],
)
def test_a_value_can_never_look_like_another_field_or_line(said: list[str], value: object, shown: str) -> None:
    logger.bind(fault=value).info("said")
    assert said == [f"INFO    said fault={shown}\n"]


def test_unknown_fields_are_left_out(said: list[str]) -> None:
    logger.bind(env="SECRET=1", fault="x").info("said")
    assert said == ["INFO    said fault=x\n"]


def test_every_field_our_code_binds_is_one_that_is_printed() -> None:
    """By `bind`, or by LogOnce's `warning` and `guard`."""
    bound: dict[str, str] = {}
    for file in Path(nri_gpu.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="bind" | "warning" | "guard"), keywords=keywords):
                    bound |= {keyword.arg: f"{file.name}:{node.lineno}" for keyword in keywords if keyword.arg}
    assert len(bound) > 30
    assert {name: where for name, where in bound.items() if name not in FIELDS} == {}


def test_a_traceback_shows_no_values(said: list[str]) -> None:
    def handler(env: str) -> int:
        return int(len(env) / 0)

    try:
        handler("SECRET_TOKEN=" + "hunter"[::-1])
    except ZeroDivisionError:
        logger.opt(exception=True).error("bug in a handler")
    assert "ZeroDivisionError" in said[0]
    assert "retnuh" not in said[0]


# ---- as a process: stderr, the journal, and readers that do not read

PROGRAM: Final = """
import sys, time
from nri_gpu.daemon import logs
from loguru import logger
logs.set_up("INFO"{options})
{body}
"""


def speak(body: str, options: str = "", **settings: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401 - Popen's
    command = [sys.executable, "-c", PROGRAM.format(body=body, options=options)]
    return subprocess.Popen(command, **settings)


def test_lines_on_stderr_carry_the_time() -> None:
    process = speak('logger.bind(pid=1).info("hello"); logger.debug("not this")', stderr=subprocess.PIPE)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 0
    clock, rest = error.decode().split(" ", 1)
    assert len(clock) == len("12:34:56.123456")
    assert rest == "INFO    hello pid=1\n"


def test_a_reader_that_stalls_never_blocks_a_line_and_learns_what_it_missed() -> None:
    """30,000 lines into a pipe nobody reads: over at once; then the reader wakes, and the count is there."""
    body = """
began = time.monotonic()
for number in range(30_000):
    logger.bind(attempt=number).info("x" * 50)
print(time.monotonic() - began, flush=True)
sys.stdin.readline()
logger.info("one more")
time.sleep(0.2)
"""
    process = speak(body, stderr=subprocess.PIPE, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout
    assert select.select([process.stdout], [], [], 20)[0]
    assert float(process.stdout.readline()) < 10
    _, error = process.communicate(b"\n", timeout=20)
    assert process.returncode == 0
    lines = error.decode().splitlines()
    dropped = sum(int(line.rpartition("dropped=")[2]) for line in lines if "dropped=" in line)
    assert len([line for line in lines if "attempt=" in line]) + dropped + ("one more" in error.decode()) >= 30_000


@pytest.mark.parametrize("stalls", [True, False], ids=["stalls", "is gone"])
def test_a_reader_does_not_keep_us_from_ending(stalls: bool) -> None:
    reading, writing = os.pipe()
    if not stalls:
        os.close(reading)
    began = time.monotonic()
    process = speak('for _ in range(5000): logger.info("x" * 100)', stderr=writing)
    assert process.wait(timeout=20) == 0
    assert time.monotonic() - began < 5
    for each in (reading, writing)[not stalls :]:
        os.close(each)


def test_what_asyncio_says_comes_as_a_line_of_ours() -> None:
    body = 'import logging; logging.getLogger("asyncio").warning("socket.send() raised exception")'
    _, error = speak(body, stderr=subprocess.PIPE).communicate(timeout=20)
    assert b'WARNING a library logged a message fault="socket.send() raised exception" name=asyncio\n' in error
    assert logging.getLogger("asyncio").handlers == []
