"""The table of the processes on GPUs that `nri-gpu status --processes` prints below its page, for root alone."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import convert

from nri_gpu.cli.ask_daemon import answer_of
from nri_gpu.cli.page import Column, Grid, Line, Row, Tone
from nri_gpu.daemon.answers import DaemonStatus, ProcessesAnswer, ProcessStatus

COLUMNS: Final = tuple(map(Column, ("GPU", "PID", "USER", "COMM", "MEMORY", "POD", "CONTAINER")))
MIB: Final = 2**20


def ask_for_processes(state_dir: Path) -> ProcessesAnswer:
    """Return the processes on GPUs. Raises: CommandError: 69 if the daemon cannot be asked, 77 for all but root."""
    return answer_of(state_dir, "processes", lambda found: convert(found, ProcessesAnswer))


def processes_lines(answer: ProcessesAnswer, status: DaemonStatus) -> Iterator[Line | Grid]:
    """Yield the table, and why it may lack some."""
    places = {unit.uuid: unit.place for unit in status.gpus}
    yield Line("")
    if answer.processes:
        yield Grid(COLUMNS, tuple(_row(each, places.get(each.gpu_uuid, each.gpu_uuid)) for each in answer.processes))
    else:
        yield Line("no process on a GPU", Tone.FAINT)
    if answer.fault:
        yield Line(f"processes: some may be missing: {answer.fault}", Tone.WARN)


def _row(process: ProcessStatus, place: str) -> Row:
    memory = "-" if process.memory_bytes is None else f"{process.memory_bytes / MIB:,.0f} MiB"
    pod = f"{process.namespace}/{process.pod}" if process.pod else "-"
    container = process.container or process.container_id[:12] or "-"
    return (place, str(process.pid), _user(process.uid), process.comm, memory, pod, container)


def _user(uid: int | None) -> str:
    """Return a user's name, or the number of one that has no name here, such as a container's."""
    try:
        return "-" if uid is None else pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
