"""The state folder: private, one daemon at a time, a key that survives restarts and is made anew when broken."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.allocation.grant import KEY_BYTES
from nri_gpu.allocation.ledger import Ledger
from nri_gpu.daemon.ledger_file import write_ledger
from nri_gpu.daemon.state_folder import StateError, StateFolder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_made_with_its_parents_and_private(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        state = StateFolder(tmp_path / "run" / "nri-gpu")
        state.open()
        state.key()
        write_ledger(state.path / "ledger.json", Ledger())
    finally:
        os.umask(old_mask)
    assert mode(state.path) == 0o700
    assert mode(state.path / "key") == 0o600
    assert mode(state.path / "ledger.json") == 0o600
    assert {path.name for path in state.path.iterdir()} == {"lock", "key", "ledger.json"}
    state.close()


def theirs(file: Path) -> None:
    file.chmod(0o600)
    os.chown(file, 65534, -1)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda file: file.chmod(0o644), "its mode 0644 lets others than root use it"),
        (theirs, "it belongs to user 65534"),
    ],
    ids=["readable", "another owner"],
)
def test_a_key_that_others_could_use_is_made_anew(tmp_path: Path, change: Callable[[Path], None], fault: str) -> None:
    """As the guard has it: such a key forges grants."""
    (tmp_path / "key").write_bytes(b"k" * KEY_BYTES)
    change(tmp_path / "key")
    state = StateFolder(tmp_path)
    state.open()
    assert state.key() != b"k" * KEY_BYTES
    assert state.key_fault == fault
    found = (tmp_path / "key").stat()
    assert (found.st_uid, mode(tmp_path / "key"), mode(tmp_path)) == (os.geteuid(), 0o600, 0o700)
    state.close()


def test_the_lock_is_closed_to_others_and_leads_nowhere(tmp_path: Path) -> None:
    """Whoever can open it can hold it, and no daemon would start."""
    (tmp_path / "lock").write_text("")
    (tmp_path / "lock").chmod(0o644)
    state = StateFolder(tmp_path)
    state.open()
    assert mode(tmp_path / "lock") == 0o600
    state.close()
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to("other")
    with pytest.raises(StateError, match="cannot be used: Too many levels of symbolic links"):
        state.open()
    assert not (tmp_path / "other").exists()


def test_the_key_outlives_the_daemon(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        state = StateFolder(tmp_path)
        state.open()
        keys.append(state.key())
        state.close()
    assert keys[0] == keys[1]
    assert len(keys[0]) == KEY_BYTES


@pytest.mark.parametrize("broken", [b"", b"short", b"x" * (KEY_BYTES + 1)])
def test_a_broken_key_is_made_anew(tmp_path: Path, broken: bytes) -> None:
    (tmp_path / "key").write_bytes(broken)
    (tmp_path / "key").chmod(0o600)
    state = StateFolder(tmp_path)
    fresh = state.key()
    assert len(fresh) == KEY_BYTES
    assert state.key_fault == "it is not 32 bytes long"
    again = StateFolder(tmp_path)
    assert again.key() == fresh == (tmp_path / "key").read_bytes()
    assert not again.key_fault


def _link(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(bytes(KEY_BYTES))
    other.chmod(0o644)
    file.symlink_to(other)


@pytest.mark.parametrize(
    ("make", "fault"),
    [(os.mkfifo, "not a regular file"), (_link, "cannot be opened: Too many levels of symbolic links")],
    ids=["fifo", "link"],
)
def test_what_is_no_file_is_no_key_and_nothing_of_it_is_touched(
    tmp_path: Path, make: Callable[[Path], None], fault: str
) -> None:
    make(tmp_path / "key")
    state = StateFolder(tmp_path)
    assert state.key() == (tmp_path / "key").read_bytes() != bytes(KEY_BYTES)
    assert fault in state.key_fault
    assert not (tmp_path / "key").is_symlink()
    if (tmp_path / "other").exists():
        assert (tmp_path / "other").stat().st_mode & 0o777 == 0o644


def test_a_lock_that_cannot_be_written_still_locks(tmp_path: Path) -> None:
    """On a full disk; who holds it is told by the kernel."""
    state = StateFolder(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda *_: _no_space())
        state.open()
    with pytest.raises(StateError, match=rf"another nri-gpu \(pid {os.getpid()}\) runs with state folder"):
        StateFolder(tmp_path).open()
    state.close()


def _no_space() -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_key_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with pytest.raises(StateError, match=r"key .*/key cannot be read or made: Is a directory"):
        StateFolder(tmp_path).key()


def test_one_daemon_at_a_time(tmp_path: Path) -> None:
    first, second = StateFolder(tmp_path), StateFolder(tmp_path)
    first.open()
    with pytest.raises(StateError, match=rf"another nri-gpu \(pid {os.getpid()}\) runs with state folder") as caught:
        second.open()
    assert caught.value.taken
    first.close()
    second.open()
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    second.close()
    second.close()


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"cannot be used: (File exists|Not a directory); run as root") as caught:
        StateFolder(tmp_path / "file").open()
    assert not caught.value.taken
