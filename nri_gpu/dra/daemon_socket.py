"""The daemon's socket for `nri-gpu dra`: each connection asks one question of `questions.py`, and has one answer.

The socket is for root alone. A client that sends garbage, too much, or nothing harms nobody else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from nri_gpu.domain.resource_claim import AllocatedClaim, usable_uid
from nri_gpu.domain.text import quoted
from nri_gpu.dra.questions import Answer, AskPrepare, AskUnprepare, AskView, ClaimFault, Question
from nri_gpu.system.server import Peer, ServerLimits, Service

# More than the pods of a node, each of which may be prepared at once; root alone connects.
LIMITS: Final = ServerLimits(places=256, each=256, question_bytes=1 << 20, patience_s=5.0)


def dra_service(path: Path, answer: Callable[[Question], Awaitable[Answer]], limits: ServerLimits = LIMITS) -> Service:
    """Return the service of the socket. answer: is cancelled for a view that nobody waits for any more."""

    async def answered(line: bytes, peer: Peer) -> list[bytes]:
        try:
            question: Question = msgspec.json.decode(line, type=Question)
            if fault := _fault(question):
                return [_line(fault)]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            sentence = "nri-gpu's daemon cannot read this question, daemon and driver are of two versions"
            return [_line(ClaimFault(f"{sentence}: {error}"))]
        # A started preparation always finishes.
        answering = peer.while_there(answer(question)) if isinstance(question, AskView) else answer(question)
        return [_line(await answering)]

    return Service(
        name="dra socket",
        path=str(path),
        limits=limits,
        answer=answered,
        busy=_line(ClaimFault("nri-gpu's daemon has too many requests at once; try again", passing=True)),
        too_long=_line(ClaimFault(f"a question has at most {limits.question_bytes} bytes")),
        bug=_line(ClaimFault("a bug of nri-gpu; the log of its daemon has the traceback")),
    )


def _fault(question: Question) -> ClaimFault | None:
    """Return why the UID of a question's claim, which markers and files carry, cannot be a UID; or None."""
    match question:
        case AskPrepare(AllocatedClaim(uid=uid)) | AskUnprepare(uid) if not usable_uid(uid):
            why = f"the claim's UID {quoted(uid)} is not of letters, digits and dashes: ask with its metadata.uid"
            return ClaimFault(why)
    return None


def _line(answer: Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"
