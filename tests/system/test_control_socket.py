"""A real daemon's control socket under many connections of one user, and without descriptors."""

from __future__ import annotations

import contextlib
import grp
import resource
import socket
import time
from pathlib import Path

from nri_gpu.cli.ask_daemon import ask
from tests.support.daemon import Launch, NriGpu
from tests.support.serving import connected
from tests.support.waiting import wait_for


def test_a_member_of_the_group_with_many_connections_keeps_nobody_from_status(folder: Path) -> None:
    """As liveness probes of other people's manifests ask: each of them is answered."""
    folder.chmod(0o711)
    group = grp.getgrnam("daemon")
    launch = Launch(folder / "d", folder / "no-runtime").with_policy(f'[control]\ngroup = "{group.gr_name}"\n')
    with NriGpu(launch) as daemon, contextlib.ExitStack() as stack:
        launch.base.chmod(0o711)
        path = launch.state / "control.sock"
        wait_for("the control socket", lambda: path.exists() and path.stat().st_gid == group.gr_gid, 10)
        for _ in range(12):
            for _ in range(64):
                with contextlib.suppress(BlockingIOError):  # its queue is full
                    stack.enter_context(connected(path, 4711, group.gr_gid))
            assert ask(path, "status", dict)
        assert daemon.log().count("too many connections at once") == 1


def test_without_descriptors_it_says_so_once_and_goes_on_when_there_are_some(tmp_path: Path) -> None:
    """The server of asyncio says it with a hundred tracebacks a second, each of which may be written to a full disk."""
    with NriGpu(Launch(tmp_path, tmp_path / "no-runtime")) as daemon, contextlib.ExitStack() as stack:
        path = daemon.launch.state / "control.sock"
        wait_for("the control socket", path.exists, 10)
        daemon.wait_logged("inventory changed")
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        opened = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (opened, before[1]))
        known = daemon.log().count("\n")
        asking = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(5)]
        for each in asking:
            each.connect(str(path))
            each.sendall(b"status\n")
        daemon.wait_logged("socket accepts no connections")
        time.sleep(2.5)
        assert daemon.log().count("\n") < known + 20  # what else a daemon says in its first seconds
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        for each in asking:
            each.settimeout(10)
            assert each.recv(1)
        assert "attempt=" in daemon.wait_logged("socket accepts connections again")
        assert daemon.log().count("socket accepts") == 2
