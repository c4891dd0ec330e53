"""What is done to daemon, guard and node while containers are created: each a function that is called again and again.

A disturbance that lasts is over when its function returns; what must hold afterwards is checked by the chaos test's own
evidence.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.support.chaos import ChaosRun
from tests.support.daemon import NriGpu
from tests.support.waiting import wait_for

Disturbance = Callable[[ChaosRun], None]
RUNTIME_GIVES_UP_S: Final = 2.0  # on a plugin that does not answer
SERVES_S: Final = 20.0
AIMS: Final = 16
GOOD_POLICY: Final = "schema = 1\n"


def pause(run: ChaosRun, least_s: float = 0.3, most_s: float = 1.0) -> None:
    time.sleep(run.dice.uniform(least_s, most_s))


# ---- killed and stopped


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


def aim(run: ChaosRun) -> None:
    """Kill the daemon in the middle of marked creations, when nobody else acts."""
    run.aim(AIMS)


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


# ---- files


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
