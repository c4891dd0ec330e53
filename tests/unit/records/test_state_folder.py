"""The state folder: private, one daemon at a time, a key that survives restarts and is made anew when broken."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.dra.claims_file import ClaimsFile
from nri_gpu.health.health_file import load_health
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.records.ledger_file import read_ledger, write_ledger
from nri_gpu.records.state_folder import StateError, StateFolder
from nri_gpu.system.storage import KEY_BYTES
from nri_gpu.verify.node_snapshot import read_snapshot
from tests.support.log import Log
from tests.support.plugin import KEY


@contextmanager
def opened(folder: Path) -> Iterator[StateFolder]:
    state = StateFolder(folder)
    state.open()
    yield state
    state.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_made_with_its_parents_and_private(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        with opened(tmp_path / "run" / "nri-gpu") as state:
            state.key()
            write_ledger(state.path / "ledger.json", Ledger())
    finally:
        os.umask(old_mask)
    modes = {path.name: mode(path) for path in state.path.iterdir()}
    assert modes == {"lock": 0o600, "key": 0o600, "ledger.json": 0o600}
    assert mode(state.path) == 0o700


FORGED = b"k" * KEY_BYTES


def readable(file: Path) -> None:
    file.write_bytes(FORGED)
    file.chmod(0o644)


def theirs(file: Path) -> None:
    readable(file)
    file.chmod(0o600)
    os.chown(file, 65534, -1)


def linked(file: Path) -> None:
    readable(file.with_name("other"))
    file.symlink_to("other")


def holding(content: bytes) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        file.touch(0o600)
        file.write_bytes(content)

    return make


NO_KEY: dict[str, tuple[Callable[[Path], None], str]] = {
    "readable": (readable, "its mode 0644 lets users other than root use it"),
    "another owner": (theirs, "it belongs to user 65534"),
    "empty": (holding(b""), "it is not 32 bytes long"),
    "short": (holding(b"short"), "it is not 32 bytes long"),
    "long": (holding(b"x" * (KEY_BYTES + 1)), "it is not 32 bytes long"),
    "fifo": (os.mkfifo, "not a regular file"),
    "link": (linked, "cannot be opened: Too many levels of symbolic links"),
}


@pytest.mark.parametrize(("make", "fault"), NO_KEY.values(), ids=NO_KEY)
def test_a_bad_key_is_made_anew(tmp_path: Path, make: Callable[[Path], None], fault: str) -> None:
    """As the guard has it: one that others could use forges grants. What a link leads to is not touched."""
    file = tmp_path / "key"
    make(file)
    with opened(tmp_path) as state:
        key = state.key()
        assert fault in state.key_fault
    assert len(key) == KEY_BYTES
    assert key != FORGED
    found = file.lstat()
    assert (found.st_uid, stat.filemode(found.st_mode), mode(tmp_path)) == (os.geteuid(), "-rw-------", 0o700)
    if (tmp_path / "other").exists():
        assert mode(tmp_path / "other") == 0o644
    with opened(tmp_path) as again:
        assert again.key() == key == file.read_bytes()
        assert not again.key_fault


def test_the_lock_is_closed_to_others_and_leads_nowhere(tmp_path: Path) -> None:
    """Whoever can open it can hold it, and no daemon would start."""
    lock = tmp_path / "lock"
    lock.touch(0o644)
    with opened(tmp_path):
        assert mode(lock) == 0o600
    lock.unlink()
    lock.symlink_to("other")
    with pytest.raises(StateError, match="cannot be used: Too many levels of symbolic links"):
        StateFolder(tmp_path).open()
    assert not (tmp_path / "other").exists()


ANOTHER = rf"another nri-gpu \(pid {os.getpid()}\) runs with state folder"


def test_a_lock_that_cannot_be_written_still_locks(tmp_path: Path) -> None:
    """On a full disk; who holds it is told by the kernel."""

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", no_space)
        with opened(tmp_path), pytest.raises(StateError, match=ANOTHER):
            StateFolder(tmp_path).open()


def test_a_key_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with pytest.raises(StateError, match=r"key .*/key cannot be read or made: it is a folder"):
        StateFolder(tmp_path).key()


def test_one_daemon_at_a_time(tmp_path: Path) -> None:
    first, second = StateFolder(tmp_path), StateFolder(tmp_path)
    first.open()
    with pytest.raises(StateError, match=ANOTHER) as caught:
        second.open()
    assert caught.value.taken
    first.close()
    second.open()
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    second.close()
    second.close()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_folder_that_is_removed_or_replaced_while_it_is_open(tmp_path: Path, log: Log, replaced: bool) -> None:
    with opened(tmp_path / "state") as state:
        state.key()
        state.watch(0.01)
        await asyncio.sleep(0.05)
        assert not log.lines
        state.path.rename(tmp_path / "elsewhere")
        if replaced:
            other = StateFolder(state.path)
            other.open()
            other.close()
        await asyncio.sleep(0.1)
    line = log.one("state folder removed or replaced while nri-gpu runs")
    assert (line.level, line.fields["path"]) == ("ERROR", str(state.path))
    assert not state.lost  # as it is closed


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"cannot be used: (File exists|Not a directory); correct that, or") as caught:
        StateFolder(tmp_path / "file").open()
    assert not caught.value.taken


def test_a_place_where_only_root_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # the tests may run as root
    with pytest.raises(StateError, match="cannot be used: Permission denied; run as root, or"):
        StateFolder(tmp_path / "state").open()


READERS: Final[dict[str, Callable[[Path], object]]] = {
    "health.json": lambda folder: load_health(folder / "health.json")[0].records,
    "snapshot.json": lambda folder: read_snapshot(folder, KEY),
    "ledger.json": lambda folder: read_ledger(folder / "ledger.json", 1.0),
    "claims.json": lambda folder: ClaimsFile(folder, "boot").read(),
}


@pytest.mark.parametrize(("name", "read"), READERS.items(), ids=READERS)
def test_a_pipe_in_the_place_of_a_file_that_is_read_at_a_start_is_no_file_and_hangs_nobody(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / name)
    with suppress(ValueError):
        assert not read(tmp_path)
    writer = os.open(tmp_path / name, os.O_RDWR)  # somebody who writes nothing
    with suppress(ValueError):
        assert not read(tmp_path)
    os.close(writer)
