"""The audit log: every decision with all that decided it, in two files of bounded size.

Nothing here happens before a reply. Events are noted in memory. A moment later one thread encodes and writes all that
were noted: a disk may hang, and the event loop has one turn for any number of them. As one thread writes all batches,
lines stand in the order in which they were noted. A file begins with node, policy and ledger, so that each can be
replayed alone. A bug here ends nothing but a record.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Decision
from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.node import Node
from nri_gpu.domain.value import encode
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.records.audit_limits import RECORD_MAX, PodShares, cut_record, left_out_record
from nri_gpu.records.audit_records import (
    NodeRecord,
    PolicyRecord,
    RepairRecord,
    changed_record,
    decision_record,
    ledger_record,
)
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import LogOnce

FILE: Final = "audit.jsonl"
OLD_FILE: Final = "audit.1.jsonl"
DELAY_S: Final = 0.25
# Notes that are not written yet. On a disk that hangs, decisions beyond that are lost and counted, and the ledger is
# written again in full.
WAITING_MAX: Final = 2000
# Of the thread, behind each line: without it a request waits for up to 5 ms until Python runs the event loop again.
NAP_S: Final = 50e-6
GRANTS_AT_ONCE: Final = 20  # in one record: more would keep the event loop from running too long


class _Decided(Struct, frozen=True):
    container: Container
    decision: Decision
    node: Node
    at: float
    now: float


class _Synchronized(Struct, frozen=True):
    ledger: Ledger


_Note = _Decided | PolicyRecord | Ledger | _Synchronized | RepairRecord
_Record = Mapping[str, object] | Struct


class AuditLog:
    """The audit log of a daemon: it notes events, and writes them."""

    def __init__(
        self,
        folder: Path,  # for the file and the previous one
        most_bytes: int,  # of each file
        wall: Callable[[], float],
        *,
        delay_s: float = DELAY_S,  # from a note to its line, in seconds
    ) -> None:
        self._path, self._old_path = folder / FILE, folder / OLD_FILE
        self._most_bytes = most_bytes
        self._wall = wall
        self._delay_s = delay_s
        self._notes: deque[_Note] = deque()
        self._forgotten = 0  # decisions, since the last batch
        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs
        self._timer: asyncio.TimerHandle | None = None
        self._batch: Future[None] | None = None  # that the thread took last
        self._thread = ThreadPoolExecutor(1, "nri-gpu-audit")
        # What follows is the thread's.
        self._lost = 0
        self._bytes = 0  # of the file
        self._shares = PodShares(most_bytes)
        self._begun = False  # whether node, policy and ledger are written in it
        self._faults = LogOnce()
        self._bug = ""  # that was logged last
        # The last of each in the file.
        self._node: Node | None = None
        self._policy = PolicyRecord("", "")
        self._ledger = Ledger()

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """Note that a request was answered. now: seconds on the ledger's clock."""
        self._note(_Decided(container, decision, node, self._wall(), now))

    def policy_changed(self, policy: PolicyRecord) -> None:
        """Note that decisions are by this policy from now on."""
        self._note(policy)

    def repaired(self, gpu_uuid: str, due: str) -> None:
        """Note that root said a GPU was reset."""
        self._note(RepairRecord(self._wall(), gpu_uuid, due))

    def follow(self, state: NodeState) -> None:
        state.first(lambda: self._note(state.ledger), Changed.LEDGER)

    def synchronized(self, ledger: Ledger) -> None:
        """Note that the ledger was rebuilt from the runtime's list."""
        self._note(_Synchronized(ledger))

    async def run(self) -> None:
        """Write until cancelled, and then the notes that are left."""
        self._loop = asyncio.get_running_loop()
        self._soon()
        try:
            await self._loop.create_future()
        finally:
            self._loop = None
            if self._timer:
                self._timer.cancel()
            await self.written()
            while self._notes:  # of tasks that end beside this one
                await self.written()
            self._thread.shutdown(wait=False)

    async def written(self) -> None:
        """Return when every note is written, or could not be."""
        await asyncio.shield(asyncio.wrap_future(self._write_batch()))

    def _note(self, note: _Note) -> None:
        if len(self._notes) >= WAITING_MAX:
            self._forget()
        self._notes.append(note)
        self._soon()

    def _soon(self) -> None:
        if self._loop and self._notes and not self._timer:
            self._timer = self._loop.call_later(self._delay_s, self._write_soon)

    def _write_soon(self) -> None:
        self._timer = None
        if self._batch and not self._batch.done():  # no second one waits in memory for a disk that hangs
            self._soon()
        elif self._notes:
            self._write_batch()

    def _write_batch(self) -> Future[None]:
        """Let the thread write what was noted, behind what it has."""
        notes, self._notes = self._notes, deque()
        lost, self._forgotten = self._forgotten, 0
        self._batch = self._thread.submit(self._append, notes, lost)
        return self._batch

    def _forget(self) -> None:
        """Drop all notes but the newest policy and the newest ledger, by which the next decisions are made."""
        self._forgotten += sum(isinstance(note, _Decided) for note in self._notes)
        newest: dict[type, _Note] = {}
        for note in self._notes:
            match note:
                case PolicyRecord():
                    newest[PolicyRecord] = note
                case Ledger():
                    newest[Ledger] = _Synchronized(note)
                case _Synchronized():
                    newest[Ledger] = note
        self._notes = deque(newest.values())

    def _append(self, notes: deque[_Note], lost: int) -> None:
        """Write the lines of the notes, in the thread. lost: decisions that are not among them any more."""
        self._lost += lost
        try:
            self._write_lines([line for note in notes for line in self._noted(note)])
        except OSError as error:
            self._begun = False  # something may be missing: write node, policy and ledger again
            self._faults.warning(
                "audit log not written; nothing else depends on it", fault_of(error), path=str(self._path)
            )
            return
        except Exception as error:
            self._failed(error)
            return
        self._faults.clear()
        if self._lost:
            logger.bind(path=str(self._path), dropped=self._lost).warning("audit log: decisions lost")
            self._lost = 0

    def _noted(self, note: _Note) -> Iterator[str]:
        """Yield the lines of a note, or a line break for one that meets a bug."""
        try:
            for line in self._lines(note):
                yield line
                time.sleep(NAP_S)
        except Exception as error:
            self._lost += isinstance(note, _Decided)
            self._failed(error)
            yield "\n"

    def _lines(self, note: _Note) -> Iterator[str]:
        if self._begun and self._bytes > self._most_bytes:
            self._begun = False
            self._shares.clear()
            yield _TURN
        if not self._begun:
            self._begun, self._bytes = True, 0
            # A line break first: the line before may have been cut short.
            yield "\n"
            if self._node:
                yield _line(NodeRecord(node=encode(self._node)))
            yield _line(self._policy)
            yield from map(_line, _ledger_records(self._ledger))
        if isinstance(note, _Decided):
            yield from self._decision_lines(note)
        else:
            yield from map(_line, self._records(note))

    def _decision_lines(self, note: _Decided) -> Iterator[str]:
        """Yield a decision's line, cut if it is too long, or how many are left out if its pod had its share."""
        if self._node is not note.node:
            self._node = note.node
            yield _line(NodeRecord(node=encode(note.node)))
        pod = note.container.pod
        if left_out := self._shares.leave_out(pod):
            if left_out & (left_out - 1) == 0:  # a power of two
                yield _line(left_out_record(pod, note.at, left_out))
            return
        record = decision_record(note.container, note.decision, note.at, note.now)
        line = _line(record)
        if len(line) > RECORD_MAX:
            line = _line(cut_record(note.container, record.answer, note.at, len(line)))
        self._shares.add(pod, len(line))
        yield line

    def _records(self, note: PolicyRecord | Ledger | _Synchronized | RepairRecord) -> Iterator[_Record]:
        match note:
            case PolicyRecord():
                self._policy = note
                yield note
            case _Synchronized(ledger):
                self._ledger = ledger
                yield from _ledger_records(ledger)
            case Ledger():
                changed = changed_record(self._ledger, note)
                self._ledger = note
                if changed:
                    yield changed
            case RepairRecord():
                yield note

    def _failed(self, error: Exception) -> None:
        """Log a bug, once. Something may be missing, so node, policy and ledger are written again."""
        self._begun = False
        if self._bug != (bug := repr(error)):
            self._bug = bug
            logger.bind(path=str(self._path)).opt(exception=error).error(
                "bug in the audit log; nothing else depends on it"
            )

    def _write_lines(self, lines: Iterable[str]) -> None:
        for turn, part in groupby(lines, lambda line: line == _TURN):
            if turn:
                with suppress(FileNotFoundError):
                    self._path.replace(self._old_path)
                continue
            with open(os.open(self._path, _FLAGS, 0o600), "ab") as file:  # noqa: PTH123 - with a mode of our own
                file.write("".join(part).encode())
                file.flush()
                self._bytes = os.fstat(file.fileno()).st_size


_TURN: Final = ""  # among lines: a new file begins here
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def _line(record: _Record) -> str:
    return json.dumps(to_builtins(record), separators=(",", ":")) + "\n"


def _ledger_records(ledger: Ledger) -> Iterator[_Record]:
    """Yield the whole ledger, a few grants in each record: the first record replaces, the next ones add."""
    entries = iter(ledger.entries.items())
    first = replace(ledger, entries=dict(islice(entries, GRANTS_AT_ONCE)), live={})
    yield ledger_record(first)
    while more := dict(islice(entries, GRANTS_AT_ONCE)):
        yield {**ledger_record(Ledger(more, processes=ledger.processes)), "kind": "changed"}
