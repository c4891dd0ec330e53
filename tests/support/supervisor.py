"""The supervisor: a small process that starts one private containerd, and takes everything away when its owner is gone.

Run as `python -m tests.support.supervisor BASE v1|v2` in a mount namespace of its own; `Supervisor` is the owner's side
of it. It speaks lines: "ready" at first; to "start PATH-OF-CONTAINERD NAME=VALUE..." it answers the new pid, or a
sentence. The end of its standard input, which also comes when the owner is killed with SIGKILL, means: kill, unmount,
remove. Exit code 1: something stayed, its log names it.

It is a subreaper: shims and containers that lost their parent become its children, so whatever lives below it is ours,
and nothing of ours lives elsewhere.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support import cleanup
from tests.support.config import Layout
from tests.support.errors import HarnessError

PROJECT: Final = Path(__file__).resolve().parents[2]
TEAR_DOWN_TIMEOUT_S: Final = 60.0
PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
# Shims put their sockets, and runc its state, into this fixed folder; a private one keeps us apart from the host's.
SHARED_STATE: Final = Path("/run/containerd")


class Daemon:
    """A process that is not our child: signalled and awaited by pidfd, so its number cannot be mistaken."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        if self.alive():
            signal.pidfd_send_signal(self._fd, number)

    def alive(self) -> bool:
        return not self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        return bool(select.select([self._fd], [], [], timeout_s)[0])

    def close(self) -> None:
        os.close(self._fd)


class Supervisor:
    """A running supervisor for one layout. Closing it, or our death, takes everything of that layout away."""

    def __init__(self, layout: Layout, cgroup: str) -> None:
        self._layout = layout
        with layout.supervisor_log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--propagation", "slave", "--"),
                    *(sys.executable, "-m", "tests.support.supervisor", str(layout.base), cgroup),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": str(PROJECT)},
                cwd="/",
                start_new_session=True,  # Ctrl-C in a terminal is for the owner alone
            )
        self._expect("ready")

    @property
    def pid(self) -> int:
        # unshare(1) replaces itself by the program, so its pid is the supervisor's
        return self._process.pid

    def start(self, program: Path, environment: Mapping[str, str]) -> Daemon:
        """Start containerd with the layout's configuration. Raises: HarnessError with the supervisor's sentence."""
        answer = self._ask(" ".join(("start", str(program), *map("=".join, environment.items()))) + "\n")
        if not answer.isdecimal():
            raise HarnessError(answer or f"the supervisor of {self._layout.base} is gone: {self._log()}")
        return Daemon(int(answer))

    def close(self) -> None:
        """Tear everything down. Raises: HarnessError with what stayed."""
        try:
            self._process.communicate(timeout=TEAR_DOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        if self._process.returncode:
            raise HarnessError(f"the supervisor of {self._layout.base} could not clean up: {self._log()}")

    def _ask(self, line: str) -> str:
        assert self._process.stdin  # both ends were asked for
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(line)
            self._process.stdin.flush()
        return self._read()

    def _expect(self, word: str) -> None:
        if (said := self._read()) != word:
            self._process.communicate(timeout=TEAR_DOWN_TIMEOUT_S)
            raise HarnessError(f"the supervisor did not start ({said!r}): {self._log()}")

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def _log(self) -> str:
        log = self._layout.supervisor_log
        return log.read_text()[-2000:] if log.exists() else ""


def main() -> int:
    layout, cgroup = Layout(Path(sys.argv[1])), sys.argv[2]
    _hold_lock(layout.lock)
    _become_subreaper()
    _mount_privately(layout, cgroup)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGCHLD, lambda *_: cleanup.reap())
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            print(_answer(layout, line), flush=True)
    except (EOFError, BrokenPipeError):
        pass  # told by SIGTERM, or the owner no longer reads: both mean the end
    return _tear_down(layout)


def _end(*_: object) -> None:
    raise EOFError


def _hold_lock(lock: Path) -> None:
    # Held until this process ends, so `cleanup.sweep` can tell an abandoned folder. Made under another name, for
    # the sweeper must never see it unlocked.
    fresh = lock.with_suffix(".fresh")
    fcntl.flock(os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX)
    fresh.rename(lock)


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _mount_privately(layout: Layout, cgroup: str) -> None:
    layout.root.mkdir(exist_ok=True)
    _mount("tmpfs", layout.root)
    SHARED_STATE.mkdir(mode=0o711, exist_ok=True)
    _mount("tmpfs", SHARED_STATE)
    if cgroup == "v2" and not (cleanup.CGROUPS / "cgroup.controllers").exists():
        _mount("cgroup2", cleanup.CGROUPS)


def _mount(kind: str, target: Path) -> None:
    subprocess.run(["mount", "-t", kind, "none", target], check=True)


def _answer(layout: Layout, line: str) -> str:
    try:
        _, program, *environment = line.split()
        return str(_start(layout, program, dict(each.split("=", 1) for each in environment)))
    except (OSError, ValueError) as fault:
        return f"cannot start containerd: {fault}"


def _start(layout: Layout, program: str, environment: Mapping[str, str]) -> int:
    log = os.open(layout.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        return os.posix_spawn(
            program,
            [program, "--config", str(layout.config)],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these, a child should not
        )
    finally:
        os.close(log)


def _tear_down(layout: Layout) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    cleanup.kill_all(lambda: cleanup.descendants(os.getpid()))
    cleanup.reap()
    cleanup.unmount_below(layout.base)
    cleanup.remove_cgroups(layout.base.name)
    left = cleanup.leftovers(layout.base, os.getpid())
    if left or cleanup.cgroups_named(layout.base.name):
        print(f"could not take away:\n{left}", file=sys.stderr, flush=True)
        return 1
    shutil.rmtree(layout.base, ignore_errors=True)
    return 1 if layout.base.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
