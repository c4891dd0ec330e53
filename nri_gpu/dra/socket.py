"""The daemon's socket for `nri-gpu dra`: each connection asks one question of `messages.py`, and has one answer.

For root alone. A client that sends garbage, too much, or nothing harms nobody else.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
from loguru import logger

from nri_gpu.domain.resource_claim import AllocatedClaim, usable_uid
from nri_gpu.domain.text import quoted
from nri_gpu.dra.messages import Answer, AskPrepare, AskUnprepare, AskView, ClaimFault, Question
from nri_gpu.system.acceptor import Acceptor, listen
from nri_gpu.system.tasks import cancelled

QUESTION_MAX: Final = 1 << 20  # bytes
OPEN_MAX: Final = 256  # more than the pods of a node, each of which may be prepared at once
PATIENCE_S: Final = 5.0  # for a question to come, and for an answer to be taken
TOO_MANY: Final = ClaimFault("nri-gpu's daemon is asked too much at once; try again", passing=True)


class DraSocket:
    """Listens while it is open. answer: raises nothing but bugs; cancelled for a view that nobody waits for."""

    def __init__(
        self, path: Path, answer: Callable[[Question], Awaitable[Answer]], *, patience_s: float = PATIENCE_S
    ) -> None:
        self._path = path
        self._answer = answer
        self._patience_s = patience_s
        self._acceptor: Acceptor | None = None

    def open(self) -> None:
        """Listen, in the running event loop. Raises: OSError."""
        self._acceptor = Acceptor("dra socket", str(self._path), listen(self._path), self._serve)

    async def close(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=QUESTION_MAX)
        try:
            question = await self._read(reader)
            answer = question if isinstance(question, ClaimFault) else await self._answered(question, reader)
            async with asyncio.timeout(self._patience_s):
                writer.write(msgspec.json.encode(answer) + b"\n")
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError):  # TimeoutError is an OSError; the client went without a question or an answer
            pass
        finally:
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> Question | ClaimFault:
        """The question, or why there is none. Raises: TimeoutError; EOFError: the client went."""
        if self._acceptor and self._acceptor.serving > OPEN_MAX:
            return TOO_MANY
        try:
            async with asyncio.timeout(self._patience_s):
                question: Question = msgspec.json.decode(await reader.readuntil(), type=Question)
                return _fault(question) or question
        except asyncio.LimitOverrunError:
            return ClaimFault(f"a question has at most {QUESTION_MAX} bytes")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return ClaimFault(
                f"nri-gpu's daemon cannot read this question, daemon and driver are of two versions: {error}"
            )

    async def _answered(self, question: Question, reader: asyncio.StreamReader) -> Answer:
        """Raises: EOFError: nobody waits for the view any more. What is being prepared is brought to its end."""
        answering = asyncio.create_task(self._answer_or_bug(question))
        gone = [asyncio.create_task(reader.read(1))] if isinstance(question, AskView) else []
        try:
            await asyncio.wait({answering, *gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise EOFError
            return answering.result()
        finally:
            await cancelled([answering, *gone])

    async def _answer_or_bug(self, question: Question) -> Answer:
        try:
            return await self._answer(question)
        except Exception:  # a client must not be able to end the daemon
            logger.bind(method=type(question).__name__).opt(exception=True).error("bug in an answer")
            return ClaimFault("a bug of nri-gpu; the log of its daemon has the traceback")


def _fault(question: Question) -> ClaimFault | None:
    """Return why the UID of its claim cannot be one, which markers and files carry; or None."""
    match question:
        case AskPrepare(AllocatedClaim(uid=uid)) | AskUnprepare(uid) if not usable_uid(uid):
            why = f"the claim's UID {quoted(uid)} is not of letters, digits and dashes: ask with its metadata.uid"
            return ClaimFault(why)
    return None
