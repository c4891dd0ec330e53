"""What the guard reads of the daemon's folder: the key only where it is root's alone, the policy when it changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.daemon.state_folder import StateFolder
from nri_gpu.plugin.guard import DaemonState
from nri_gpu.policy.model import Policy
from tests.support.log import Log

KEY = bytes(range(32))


def state(folder: Path, read: Callable[[], Policy] = Policy.default) -> DaemonState:
    return DaemonState(folder, (folder / "policy.last", folder / "policy.toml"), read)


def test_the_key_that_the_daemon_made_and_no_copy_of_it(tmp_path: Path) -> None:
    reader = state(tmp_path)
    assert reader.key() is None
    made = StateFolder(tmp_path).key()
    assert reader.key() == made
    (tmp_path / "key").write_bytes(KEY)
    assert reader.key() == KEY
    (tmp_path / "key").unlink()
    assert reader.key() is None


def readable(file: Path) -> None:
    file.write_bytes(KEY)
    file.chmod(0o644)


def linked(file: Path) -> None:
    file.with_name("other").write_bytes(KEY)
    file.with_name("other").chmod(0o600)
    file.symlink_to("other")


def piped(file: Path) -> None:
    os.mkfifo(file, 0o600)


def short(file: Path) -> None:
    file.write_bytes(KEY[1:])
    file.chmod(0o600)


def long(file: Path) -> None:
    file.write_bytes(KEY + b"x")
    file.chmod(0o600)


@pytest.mark.parametrize("make", [readable, linked, piped, short, long, Path.mkdir])
def test_what_is_no_key_of_the_daemons(tmp_path: Path, log: Log, make: Callable[[Path], None]) -> None:
    make(tmp_path / "key")
    assert state(tmp_path).key() is None
    assert all(line.fields["path"] == str(tmp_path / "key") for line in log.warnings())


def test_the_policy_is_read_again_when_it_changed(tmp_path: Path) -> None:
    reads = []

    def read() -> Policy:
        reads.append(1)
        return Policy.default()

    reader = state(tmp_path, read)
    for expected, change in ((1, None), (2, "policy.toml"), (3, "policy.last"), (4, "policy.last")):
        if change:
            (tmp_path / change).write_text("#" * expected)
        reader.policy()
        reader.policy()
        assert len(reads) == expected
