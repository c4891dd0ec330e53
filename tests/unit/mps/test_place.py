"""A daemon is found again by its note, and a process of the same number is not taken for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.mps.place import Place, noted_places
from nri_gpu.mps.process import Process, process_of, user_of

UUID = GpuUuid("GPU-0")


def place(tmp_path: Path) -> Place:
    made = Place(tmp_path, UUID)
    made.make()
    return made


def test_what_was_noted_is_found_while_it_lives(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = process_of(child.pid)
        assert process is not None
        place(tmp_path).note(process)
        assert Place(tmp_path, UUID).noted() == process
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Place(tmp_path, UUID).noted() is None  # dead, and its number not free yet


def test_another_process_of_that_number_is_not_it(tmp_path: Path) -> None:
    process = process_of(os.getpid())
    assert process is not None
    place(tmp_path).note(Process(process.pid, process.started - 1))
    assert Place(tmp_path, UUID).noted() is None
    assert [each.uuid for each in noted_places(tmp_path)] == [UUID]  # its GPU's mode is still to be given back


def test_a_note_that_is_none_is_no_daemon(tmp_path: Path) -> None:
    (place(tmp_path).folder / "daemon").write_text("12")
    assert Place(tmp_path, UUID).noted() is None


def test_servers_of_other_users_reach_in_and_the_state_stays_closed(tmp_path: Path) -> None:
    made = place(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (made.folder.parent, made.pipe, made.log, made.shm)}
    assert modes == {"mps": 0o700, "pipe": 0o755, "log": 0o755, "shm": 0o1777}


def test_users_are_the_hosts() -> None:
    assert user_of(os.getpid()) == os.geteuid()
    assert user_of(0) is None
    assert user_of(2**30) is None
