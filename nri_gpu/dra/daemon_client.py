"""The driver process's side of the daemon's socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec

from nri_gpu.domain.errors import NriGpuError, cause_of
from nri_gpu.dra.questions import DRA_SOCKET, VIEW_WAIT_S, Answer, AskView, Question

TIMEOUT_S: Final = 5.0
ANSWER_MAX: Final = 16 << 20  # bytes


class DaemonAwayError(NriGpuError):
    """A daemon that did not answer. The error's sentence says why, and what to do."""


class DaemonClient:
    """A client of the daemon of a state folder. timeout_s: for an answer; a view has VIEW_WAIT_S more."""

    def __init__(self, state_dir: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self._path = state_dir / DRA_SOCKET
        self._timeout_s = timeout_s

    async def ask(self, question: Question) -> Answer:
        """Ask one question, on a connection of its own, and return the answer. Raises: DaemonAwayError."""
        wait_s = self._timeout_s + (VIEW_WAIT_S if isinstance(question, AskView) else 0)
        try:
            async with asyncio.timeout(wait_s):
                line = await self._exchange(msgspec.json.encode(question) + b"\n")
                answer: Answer = msgspec.json.decode(line, type=Answer)
                return answer
        except (FileNotFoundError, ConnectionRefusedError):
            why = "does not listen: start it with --dra (policy: dra.enabled), or wait until it has started"
        except PermissionError:
            why = "answers root alone: run nri-gpu dra as root"
        except TimeoutError:
            why = f"did not answer within {wait_s:g} s"
        except OSError as error:
            why = f"went away: {cause_of(error)}"
        except (ValueError, RecursionError) as error:  # no line at all, too: the daemon ended
            why = f"sent no answer that this version knows, or exited: {error}"
        raise DaemonAwayError(f"nri-gpu's daemon at {self._path} {why}")

    async def _exchange(self, question: bytes) -> bytes:
        """Send a question, and return the line that answers it. Raises: OSError; ValueError: the answer is too long."""
        reader, writer = await asyncio.open_unix_connection(self._path, limit=ANSWER_MAX)
        try:
            writer.write(question)
            return await reader.readline()
        finally:
            writer.close()
