from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nri_gpu.daemon.answers import FOR_ROOT
from nri_gpu.daemon.control import LIMITS, QUESTION_BYTES, admit, control_service
from nri_gpu.system.server import ServerLimits, listen
from tests.support.serving import connected, served


def broken() -> dict[str, Any]:
    raise ZeroDivisionError


@contextlib.asynccontextmanager
async def listening(folder: Path, limits: ServerLimits = LIMITS) -> AsyncIterator[Path]:
    path = folder / "control.sock"
    async with served(listen(path), control_service(path, {"status": lambda: {"n": 1}, "broken": broken}, limits)):
        yield path


async def said(path: Path, question: bytes) -> Any:  # noqa: ANN401 - parsed JSON
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(question)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return json.loads(answer) if answer else None


def owners(path: Path) -> list[tuple[int, int]]:
    """User and mode of the folder and of the socket."""
    found = [each.stat() for each in (path.parent, path)]
    return [(each.st_uid, stat.S_IMODE(each.st_mode)) for each in found]


async def test_a_question_is_answered(tmp_path: Path) -> None:
    async with listening(tmp_path) as path:
        assert await said(path, b"status\n") == {"n": 1}


KNOWN = "known: broken, status"
ERRORS = {
    "unknown": (b"stop", KNOWN),
    "empty": (b"", KNOWN),
    "no text": (b"\xff\xfe", KNOWN),
    "JSON": (b"{}", KNOWN),
    "too long": (b"x" * (LIMITS.question_bytes + 1), "at most"),
    "too long for a question": (b"x" * (QUESTION_BYTES + 1), "a question has at most 64 bytes"),
    "one whose answer has a bug": (b"broken", "bug"),
}


@pytest.mark.parametrize(("question", "error"), ERRORS.values(), ids=ERRORS)
async def test_what_is_no_question_is_told_so(tmp_path: Path, question: bytes, error: str) -> None:
    async with listening(tmp_path) as path:
        assert error in (await said(path, question + b"\n"))["error"]


async def test_only_root_gives_commands(folder: Path) -> None:
    """Whoever else may ask: the peer's uid counts, not the mode of the socket."""
    path = folder / "control.sock"
    given: list[str] = []

    async def repaired(word: str) -> dict[str, int]:
        given.append(word)
        return {"n": 2}

    service = control_service(path, {"status": dict}, commands={"repaired": repaired})
    async with served(listen(path), service):
        for each in (folder, path):
            each.chmod(0o777)
        with connected(path, 4711, 4711) as other:
            other.settimeout(10)
            other.sendall(b"repaired GPU-1\n")
            answer = await asyncio.to_thread(other.recv, 4096)
        assert json.loads(answer) == {"error": f"repaired: {FOR_ROOT}"}
        assert await said(path, b"repaired  GPU-1 \n") == {"n": 2}
        assert await said(path, b"repaired " + b"x" * 400 + b"\n") == {"n": 2}, "commands may be longer than questions"
        assert "known: repaired, status" in (await said(path, b"repair GPU-1\n"))["error"]
    assert given == ["GPU-1", "x" * 400]


async def test_an_answer_that_takes_a_moment_holds_up_nobody(tmp_path: Path) -> None:
    path, come = tmp_path / "control.sock", asyncio.Event()

    async def usage() -> dict[str, int]:
        await come.wait()
        return {"n": 3}

    service = control_service(path, {"status": lambda: {"n": 1}}, later={"usage": usage})
    async with served(listen(path), service):
        waiting = asyncio.create_task(said(path, b"usage\n"))
        assert await said(path, b"status\n") == {"n": 1}
        assert not waiting.done()
        come.set()
        assert await waiting == {"n": 3}


def test_permissions_are_the_guard(tmp_path: Path) -> None:
    """Root alone, or a group as well; it can be let in and out again."""
    path, us = tmp_path / "control.sock", os.geteuid()
    other = 4711 if us == 0 else os.getegid()
    listener = listen(path)
    for group, folder, file in ((None, 0o700, 0o600), (other, 0o710, 0o660), (None, 0o700, 0o600)):
        admit(path, group)
        assert owners(path) == [(us, folder), (us, file)]
    assert [each.stat().st_gid for each in (tmp_path, path)] == [other, other]
    listener.close()
