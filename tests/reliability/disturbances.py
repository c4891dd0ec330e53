"""What is done to daemon, guard and node while containers are created: each a function that is called again and again.

A disturbance that lasts is over when its function returns; what must hold afterwards is checked by the chaos test's own
evidence.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from nri_gpu.domain.names import CONTROL_SOCKET
from tests.support.cgroup import Cgroup, host_cgroup
from tests.support.chaos import ChaosRun
from tests.support.daemon import NriGpu
from tests.support.errors import HarnessError
from tests.support.waiting import wait_for

Disturbance = Callable[[ChaosRun], None]
RUNTIME_GIVES_UP_S: Final = 2.0  # on a plugin that does not answer
SERVES_S: Final = 20.0
IDLE_CLIENTS: Final = 300
FEW_DESCRIPTORS: Final = 4  # beside those that are open already
INVENTORY_CHILD: Final = "nri_gpu.inventory.nvml_program"
# Where a cgroup with a limit of memory can be made, and the name of its limit.
MEMORY: Final = {
    Cgroup.V1: (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    Cgroup.V2: (Path("/sys/fs/cgroup"), "memory.max"),
}
LITTLE_BYTES: Final = 4096
HOUR_S: Final = 3600
GOOD_POLICY: Final = "schema = 1\n"


def pause(run: ChaosRun, least_s: float = 0.3, most_s: float = 1.0) -> None:
    time.sleep(run.dice.uniform(least_s, most_s))


# ---- killed and stopped


def kill_daemon(run: ChaosRun) -> None:
    """At any moment; it is away for up to half a second."""
    run.kill_daemon()


def kill_guard(run: ChaosRun) -> None:
    pause(run, 0.5, 2.0)
    run.guard.kill()
    run.tally.happened["guard killed"] += 1
    pause(run, 0.0, 0.5)
    run.guard.start()


def kill_both_in_turn(run: ChaosRun) -> None:
    """The next one when the last one serves again, so one of them is always there."""
    run.kill_daemon()
    run.daemon.wait_ready()
    sessions = run.guard.log().count("guarding")
    kill_guard(run)
    wait_for("the guard", lambda: run.guard.log().count("guarding") > sessions, SERVES_S, run.guard.log)


def stop_daemon(run: ChaosRun) -> None:
    """SIGSTOP for longer than the runtime waits, then SIGCONT."""
    _stop(run, run.daemon)
    run.tally.happened["daemon stopped"] += 1


def stop_guard(run: ChaosRun) -> None:
    _stop(run, run.guard)
    run.tally.happened["guard stopped"] += 1


def _stop(run: ChaosRun, who: NriGpu) -> None:
    pause(run, 0.3, 1.0)
    os.kill(who.pid, signal.SIGSTOP)
    time.sleep(RUNTIME_GIVES_UP_S + run.dice.uniform(0.3, 1.5))
    os.kill(who.pid, signal.SIGCONT)


def kill_inventory_child(run: ChaosRun) -> None:
    """The process that has the driver's library."""
    pause(run, 0.1, 0.8)
    for child in _children(run.daemon.pid):
        with suppress(OSError):  # it ended by itself
            if INVENTORY_CHILD in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                os.kill(child, signal.SIGKILL)
                run.tally.happened["inventory child killed"] += 1


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def kill_runtime(run: ChaosRun) -> None:
    pause(run, 1.0, 2.5)
    run.restart_runtime(kill=True)


# ---- files


def fill_state(run: ChaosRun) -> None:
    """Not a byte more goes into the state folder; the daemon is killed and started meanwhile."""
    with _filled(run.daemon.launch.state):
        run.tally.happened["state folder full"] += 1
        pause(run, 0.5, 1.5)
        run.kill_daemon()
        with suppress(HarnessError):
            run.daemon.wait_ready()
        pause(run)
    pause(run)


def fill_stage(run: ChaosRun) -> None:
    """The driver is another one, and there is no room for its files; then there is room."""
    launch = run.daemon.launch
    assert launch.driver_root
    with _filled(launch.base / "drivers"):
        for library in launch.driver_root.rglob("libcuda.so.*"):
            library.touch()
        run.daemon.hang_up()
        run.tally.happened["stage folder full"] += 1
        pause(run, 1.0, 2.0)
        if run.dice.random() < 0.5:
            run.kill_daemon()
            run.daemon.wait_ready()
            pause(run)
    run.daemon.hang_up()
    run.daemon.wait_staged()
    pause(run)


@contextmanager
def _filled(folder: Path) -> Iterator[None]:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))
    try:
        yield
    finally:
        filler.unlink()


def make_state_read_only(run: ChaosRun) -> None:
    """Every file of the state folder, for who opens it now: EROFS. The daemon is killed and started meanwhile."""
    state = run.daemon.launch.state
    with read_only(state):
        run.tally.happened["state folder read-only"] += 1
        pause(run, 0.5, 1.5)
        run.kill_daemon()
        pause(run, 1.0, 2.0)
    run.daemon.kill()
    run.daemon.start()
    run.daemon.wait_ready()
    pause(run)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A read-only view of a folder over it.

    Made beside it first: a view through which somebody has a file open for writing cannot be made read-only.
    """
    beside = folder.with_name(f"{folder.name}-read-only")
    beside.mkdir(exist_ok=True)
    with _bound(folder, beside):
        subprocess.run(["mount", "-o", "remount,bind,ro", beside], check=True)
        with _bound(beside, folder):  # read-only as that one is
            yield


@contextmanager
def _bound(source: Path, place: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", source, place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


# ---- what a process may use


def exhaust_descriptors(run: ChaosRun) -> None:
    """Idle clients take the last descriptors of the daemon, and stay for a while."""
    pid = run.daemon.pid
    has = len([*Path(f"/proc/{pid}/fd").iterdir()])
    subprocess.run(["prlimit", "--pid", str(pid), f"--nofile={has + FEW_DESCRIPTORS}:"], check=True)
    with ExitStack() as stack:
        for _ in range(IDLE_CLIENTS):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with suppress(OSError):  # its queue is full
                client.connect(str(run.daemon.launch.state / CONTROL_SOCKET))
                run.tally.happened["idle clients"] += 1
        pause(run, 1.0, 3.0)
    subprocess.run(["prlimit", "--pid", str(pid), "--nofile=1024:"], check=True)
    pause(run)


def exhaust_memory(run: ChaosRun) -> None:
    """The daemon is put into a cgroup that has no memory left, until the kernel kills it; then it is started again."""
    with _no_memory() as group:
        (group / "cgroup.procs").write_text(str(run.daemon.pid))
        wait_for("the kernel to kill the daemon", lambda: _asked_until_killed(run), SERVES_S)
    run.tally.happened["daemon killed by the kernel for memory"] += 1
    pause(run, 0.0, 0.5)
    run.daemon.start()
    run.daemon.wait_ready()
    pause(run, 0.5, 1.5)


def _asked_until_killed(run: ChaosRun) -> bool:
    """Whether it is dead; else it is asked something, so that it needs memory."""
    died = run.daemon.ended()
    if died is None:
        for _ in range(20):
            with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
                client.settimeout(0.2)
                client.connect(str(run.daemon.launch.state / CONTROL_SOCKET))
                client.sendall(b"status\n")
                client.recv(1 << 20)
    elif died != -signal.SIGKILL:
        raise HarnessError(f"the daemon ended with {died}")
    return died is not None


@contextmanager
def _no_memory() -> Iterator[Path]:
    root, limit = MEMORY[host_cgroup()]
    group = root / f"nri-gpu-reliability-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(LITTLE_BYTES))
        yield group
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            os.kill(int(left), signal.SIGKILL)
        wait_for("its cgroup to be empty", lambda: not (group / "cgroup.procs").read_text(), SERVES_S)
        group.rmdir()


# ---- the clock


def step_clock(run: ChaosRun) -> None:
    """Hours forwards or backwards, for the daemon and the guard alone."""
    pause(run, 0.2, 0.8)
    hours = run.dice.choice((-30 * 24, -25, -3, -1, 0, 1, 3, 25, 30 * 24))
    set_clock(run.daemon.launch.base.parent / "clock", hours * HOUR_S)
    run.tally.happened["clock stepped"] += 1


def set_clock(file: Path, off_s: int) -> None:
    """What libfaketime reads: seconds to add to the machine's time. Whole at any moment."""
    fresh = file.with_suffix(".new")
    fresh.write_text(f"{off_s:+d}\n")
    fresh.rename(file)


# ---- the policy


def break_policy(run: ChaosRun) -> None:
    """Another wrong file in its place, then the good one again; each time the daemon is told to read it."""
    policy = run.daemon.launch.policy
    assert policy
    BREAKS[run.dice.choice([*BREAKS])](policy)
    run.daemon.hang_up()
    run.tally.happened["policy broken"] += 1
    pause(run)
    if run.dice.random() < 0.3:
        run.kill_daemon()
        run.daemon.wait_ready()
    mend_policy(run)
    pause(run, 0.2, 0.6)


def mend_policy(run: ChaosRun) -> None:
    policy = run.daemon.launch.policy
    assert policy
    _clear(policy)
    policy.write_text(GOOD_POLICY)
    run.daemon.hang_up()


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(policy: Path) -> None:
        _clear(policy)
        make(policy)

    return change


def _huge(policy: Path) -> None:
    with policy.open("wb") as file:
        file.truncate(8 << 30)


BREAKS: Final[Mapping[str, Callable[[Path], object]]] = {
    "not TOML": lambda policy: policy.write_text('[defaults\nmode = "sha'),
    "an unknown key": lambda policy: policy.write_text("schema = 1\n[defaults]\nmoed = 1\n"),
    "cut short": lambda policy: policy.write_text('schema = 1\n[defaults]\nmode = "'),
    "not UTF-8": lambda policy: policy.write_bytes(b"\xff\xfe\0schema = 1"),
    "removed": lambda policy: policy.unlink(),
    "8 GiB of zeros": _instead(_huge),
    "a folder": _instead(Path.mkdir),
    "a link to nowhere": _instead(lambda policy: policy.symlink_to("/nowhere/at/all")),
    "a link to itself": _instead(lambda policy: policy.symlink_to(policy)),
    "a pipe": _instead(lambda policy: os.mkfifo(policy)),
    "/dev/zero": _instead(lambda policy: policy.symlink_to("/dev/zero")),
    "nested a thousand deep": lambda policy: policy.write_text("x = " + "[" * 100_000),
}
