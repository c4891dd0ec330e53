"""The control socket: local, and guarded by file permissions. One question a connection, one answer.

    client: `status` and a line break          daemon: one JSON document, then it closes

Questions are words in a table, and change nothing; `usage` has GPUs sampled for some seconds, and probes do not ask it.
Commands are root's alone: `repaired`, `cordon`, `uncordon` change something, and `processes` is not for others to read.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import to_builtins

from nri_gpu.daemon.answers import FOR_ROOT, InventoryAnswer, SamplingStatus
from nri_gpu.daemon.view import View, sampling_of, status_of
from nri_gpu.domain.errors import fault_of
from nri_gpu.system.server import Peer, ServerLimits, Service, listen, serve
from nri_gpu.system.state import NodeState

Answer = Callable[[], object]  # what JSON is made of
Later = Callable[[], Awaitable[object]]  # the same, awaited
Command = Callable[[str], Awaitable[object]]  # what JSON is made of, given the rest of the line
ROOT: Final = 0
LIMITS: Final = ServerLimits(places=8, each=3, root=2, question_bytes=512, patience_s=5.0)
QUESTION_BYTES: Final = 64  # of what is no command


def control_service(
    path: Path,
    table: Mapping[str, Answer],
    limits: ServerLimits = LIMITS,
    *,
    commands: Mapping[str, Command] = {},
    later: Mapping[str, Later] = {},
) -> Service:
    """Return the protocol of the control socket.

    table: question -> answer. commands: those that only root may give. later: questions whose answer takes a moment.
    """

    async def answer(question: bytes, peer: Peer) -> list[bytes]:
        asked = question.decode(errors="replace").strip()
        word, _, rest = asked.partition(" ")
        if word in commands:
            if peer.who != ROOT:
                return [_error(f"{word}: {FOR_ROOT}")]
            return [_line(to_builtins(await commands[word](rest.strip())))]
        if len(question) > QUESTION_BYTES:
            return [_error(f"a question has at most {QUESTION_BYTES} bytes")]
        if asked in later:
            return [_line(to_builtins(await later[asked]()))]
        if asked not in table:
            known = sorted((*table, *commands, *later))
            return [_error(f"unknown request {asked!r}, known: {', '.join(known)}")]
        return [_line(to_builtins(table[asked]()))]

    return Service(
        name="control socket",
        path=str(path),
        limits=limits,
        answer=answer,
        busy=_error("too many connections at once; try again"),
        too_long=_error(f"a command has at most {limits.question_bytes} bytes"),
        bug=_error("a bug of nri-gpu; its log has the traceback"),
    )


def _error(sentence: str) -> bytes:
    return _line({"error": sentence})


def _line(answer: object) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def admit(path: Path, group: int | None) -> None:
    """Let this group connect, too; it may enter the folder, not list it. None: only root. Raises: OSError."""
    for each, alone, together in ((path.parent, 0o700, 0o710), (path, 0o600, 0o660)):
        # A hardened unit may not change groups, and with Group= in it has nothing to change.
        if group is not None and each.stat().st_gid != group:
            os.chown(each, -1, group)
        each.chmod(alone if group is None else together)


class ControlSocket:
    """The answers on the control socket of a daemon or an observer.

    commands: root's alone. sampled: returns once GPUs that are held have a fresh sample, or soon after.
    """

    def __init__(
        self,
        path: Path,
        node_state: NodeState,
        view: Callable[[], View],
        commands: Mapping[str, Command],
        sampled: Callable[[], Awaitable[None]],
    ) -> None:
        self._path = path
        self._commands = commands
        self._node_state = node_state
        self._questions: Mapping[str, Answer] = {
            "status": lambda: status_of(view()),
            "inventory": lambda: InventoryAnswer(node_state.node.inventory),
        }

        async def usage() -> SamplingStatus:
            await sampled()
            return sampling_of(view().usages)

        self._later: Mapping[str, Later] = {"usage": usage}
        self._listening = False

    async def run(self) -> None:
        """Serve until cancelled. Without a socket there is no `status`, and everything else works."""
        try:
            listener = listen(self._path)
        except OSError as error:
            bound = logger.bind(path=str(self._path), fault=fault_of(error))
            bound.warning("no control socket: nri-gpu status does not work")
            await asyncio.Event().wait()
            return
        self._listening = True
        self.policy_changed()
        try:
            await serve(
                listener, control_service(self._path, self._questions, commands=self._commands, later=self._later)
            )
        finally:
            self._listening = False

    def policy_changed(self) -> None:
        """Let the group connect that the policy now names."""
        if not self._listening:
            return
        try:
            admit(self._path, self._group())
        except OSError as error:
            fault = f"control.group: {fault_of(error)}; in a systemd unit set Group= to it, in a drop-in"
            logger.bind(path=str(self._path), fault=fault).warning("only root can ask for status")

    def _group(self) -> int | None:
        name = self._node_state.policy.control.group
        if not name:
            return None
        import grp  # only where there is a group to look up

        try:
            return grp.getgrnam(name).gr_gid
        except KeyError:
            logger.bind(fault=f"control.group: no group {name!r} on this host").warning("only root can ask for status")
            return None
