"""The audit log: every decision with all that decided it, in two files of bounded size.

Nothing here happens before a reply. Events are noted in memory. A moment later one thread encodes and writes all that
were noted: a disk may hang, and the event loop has one turn for any number of them. As one thread writes all batches,
lines stand in the order in which they were noted. A file begins with node, policy and ledger, so that each can be
replayed alone. A bug here ends nothing but a record.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    CordonedRecord,
    NodeRecord,
    PolicyRecord,
    RepairRecord,
    changed_record,
    decision_record,
    ledger_record,
)
from nri_gpu.records.batches import DELAY_S, Batches, open_to_append
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import LogOnce

FILE: Final = "audit.jsonl"
OLD_FILE: Final = "audit.1.jsonl"
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


class _Changed(Struct, frozen=True):
    ledger: Ledger
    at: float


class _Synchronized(_Changed, frozen=True):
    pass


class _Forgotten(Struct, frozen=True):
    decisions: int


_Note = _Decided | PolicyRecord | _Changed | RepairRecord | CordonedRecord | _Forgotten
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
        self._batches = Batches[_Note](self._append, "nri-gpu-audit", delay_s)
        self.run, self.written = self._batches.run, self._batches.written
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
        self._at = wall()  # when that ledger was noted

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """Note that a request was answered. now: seconds on the ledger's clock."""
        self._note(_Decided(container, decision, node, self._wall(), now))

    def policy_changed(self, policy: PolicyRecord) -> None:
        """Note that decisions are by this policy from now on."""
        self._note(policy)

    def repaired(self, gpu_uuid: str, due: str) -> None:
        """Note that root said a GPU was reset."""
        self._note(RepairRecord(self._wall(), gpu_uuid, due))

    def cordoned(self, gpu_uuid: str, by: str, why: str, ended: str) -> None:
        """Note that root took a GPU out of use. ended: how it came back into use, or empty."""
        self._note(CordonedRecord(self._wall(), gpu_uuid, by, why, ended))

    def follow(self, state: NodeState) -> None:
        state.first(lambda: self._note(_Changed(state.ledger, self._wall())), Changed.LEDGER)

    def synchronized(self, ledger: Ledger) -> None:
        """Note that the ledger was rebuilt from the runtime's list."""
        self._note(_Synchronized(ledger, self._wall()))

    def _note(self, note: _Note) -> None:
        if len(self._batches.notes) >= WAITING_MAX:
            self._forget()
        self._batches.note(note)

    def _forget(self) -> None:
        """Drop all notes but the newest policy and the newest ledger, by which the next decisions are made."""
        forgotten, newest = 0, dict[type, _Note]()
        for note in self._batches.notes:
            match note:
                case _Decided():
                    forgotten += 1
                case _Forgotten(decisions):
                    forgotten += decisions
                case PolicyRecord():
                    newest[PolicyRecord] = note
                case _Changed(ledger, at):
                    newest[Ledger] = _Synchronized(ledger, at)
        self._batches.notes = deque([_Forgotten(forgotten), *newest.values()])

    def _append(self, notes: deque[_Note]) -> None:
        """Write the lines of the notes, in the thread."""
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
            if self._node:
                yield _line(NodeRecord(node=encode(self._node)))
            yield _line(self._policy)
            yield from map(_line, _ledger_records(self._ledger, self._at))
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

    def _records(self, note: PolicyRecord | _Changed | RepairRecord | CordonedRecord | _Forgotten) -> Iterator[_Record]:
        match note:
            case PolicyRecord():
                self._policy = note
                yield note
            case _Changed(ledger, at):
                before, self._ledger, self._at = self._ledger, ledger, at
                if isinstance(note, _Synchronized):
                    yield from _ledger_records(ledger, at)
                elif changed := changed_record(before, ledger, at):
                    yield changed
            case RepairRecord() | CordonedRecord():
                yield note
            case _Forgotten(decisions):
                self._lost += decisions

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
            with open_to_append(self._path) as file:
                file.write("".join(part).encode())
                file.flush()
                self._bytes = os.fstat(file.fileno()).st_size


_TURN: Final = ""  # among lines: a new file begins here


def _line(record: _Record) -> str:
    return json.dumps(to_builtins(record), separators=(",", ":")) + "\n"


def _ledger_records(ledger: Ledger, at: float) -> Iterator[_Record]:
    """Yield the whole ledger, a few grants in each record: the first record replaces, the next ones add."""
    entries = iter(ledger.entries.items())
    first = replace(ledger, entries=dict(islice(entries, GRANTS_AT_ONCE)), live={})
    yield ledger_record(first, at)
    while more := dict(islice(entries, GRANTS_AT_ONCE)):
        yield {**ledger_record(Ledger(more, processes=ledger.processes), at), "kind": "changed"}
