"""Whose folder it is: the observer's own lock, and a daemon's, which it looks at and never takes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nri_gpu.cli.observe_command import is_service
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.observe.observe_process import LOCK, RunFolderError, daemon_in, lock_folder, paced
from nri_gpu.policy.model import Policy
from nri_gpu.records.state_folder import StateFolder
from nri_gpu.system.server import listen

OURS = f" (pid {os.getpid()})"


def test_a_run_folder_is_one_observers(folder: Path) -> None:
    run_dir = folder / "run"
    lock = lock_folder(run_dir)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    with pytest.raises(RunFolderError, match=r"another observer.*: stop that one") as caught:
        lock_folder(run_dir)
    assert caught.value.code == Exit.UNAVAILABLE
    os.close(lock)
    os.close(lock_folder(run_dir))


def test_a_run_folder_that_cannot_be_made(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot be used: .*give another --run-dir"):
        lock_folder(folder / "file" / "run")


def test_a_daemon_is_told_by_its_lock(folder: Path) -> None:
    state = StateFolder(folder / "state")
    assert daemon_in(state.path) is None
    state.open()
    assert daemon_in(state.path) == OURS
    state.close()
    assert daemon_in(state.path) is None
    state.open()  # nobody has taken it meanwhile
    state.close()


def test_else_by_its_socket(folder: Path) -> None:
    """Where the lock's holder is not shown, as in another PID namespace."""
    (folder / LOCK).write_text("")
    listening = listen(folder / CONTROL_SOCKET)
    assert daemon_in(folder) == ""
    listening.close()
    assert daemon_in(folder) is None


@pytest.mark.parametrize(
    ("variables", "service"),
    [((), False), (("NOTIFY_SOCKET",), True), (("INVOCATION_ID",), True), (("KUBERNETES_SERVICE_HOST",), True)],
)
def test_in_a_terminal_it_is_no_service(
    monkeypatch: pytest.MonkeyPatch, variables: tuple[str, ...], service: bool
) -> None:
    for name in ("NOTIFY_SOCKET", "INVOCATION_ID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "x")
    assert is_service() is service


def test_gpus_are_described_as_often_as_processes_are_looked_at() -> None:
    default = Policy.default()
    policy = paced(default)
    assert policy.inventory.refresh_s == default.observe.look_s
    assert policy.observe == default.observe
