"""The chart's probes, run as they stand against the real processes: who is restarted, and who is not."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.chart import container
from tests.support.daemon import ENVIRONMENT, Launch, NriGpu
from tests.support.guard import NriGuard
from tests.support.kubeconfig import kubeconfig
from tests.support.little import NriGpuInLittle
from tests.support.waiting import wait_for

# A call that never returns, in the thread of the event loop.
STUCK = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))"
LIMIT_S = 4  # instead of the chart's 30
LONG_S = 30.0
CPU_MOST_S = 0.020
COMPONENTS = ("daemon", "guard", "dra")


class NriDra(NriGpu):
    """A driver process that waits for its daemon."""

    def program(self) -> list[str]:
        access = self.launch.base / "kubeconfig"
        access.write_text(json.dumps(kubeconfig({"server": "https://127.0.0.1:1"}, {"token": "t"})))
        given = ("--kubeconfig", access, "--state-dir", self.launch.state, "--run-dir", self.launch.run_dir)
        return [sys.executable, "-m", "nri_gpu", "dra", *map(str, given)]


def launch(folder: Path) -> Launch:
    (folder / "sitecustomize.py").write_text(STUCK)
    path = {"PYTHONPATH": f"{folder}:{ENVIRONMENT['PYTHONPATH']}"}
    return Launch(folder / "d", folder / "no-runtime", run_dir=folder / "run", environment=path)


@contextmanager
def running(component: str, folder: Path) -> Iterator[tuple[int, Callable[[str, int | None], bool]]]:
    """Yield its PID, and whether a probe of it succeeds."""
    beside = launch(folder)
    with {"daemon": NriGpu, "guard": NriGuard, "dra": NriDra}[component](beside) as process:
        run_dir = process.run_dir if isinstance(process, NriGuard) else folder / "run"

        def succeeds(kind: str, limit_s: int | None = None) -> bool:
            return probe(component, kind, run_dir, limit_s) == 0

        wait_for("its first sign of life", lambda: succeeds("livenessProbe"), LONG_S)
        yield process.pid, succeeds


def command(component: str, kind: str, run_dir: Path, limit_s: int | None = None) -> list[str]:
    """The chart's, with the file of that folder and perhaps with another limit."""
    shell, option, script, file, limit, *word = container(component, "claims")[kind]["exec"]["command"]
    return [shell, option, script, str(run_dir / Path(file).name), str(limit_s or limit), *word]


def probe(component: str, kind: str, run_dir: Path, limit_s: int | None = None) -> int:
    done = subprocess.run(command(component, kind, run_dir, limit_s), stderr=subprocess.DEVNULL, check=False)
    return done.returncode


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGUSR1], ids=["SIGSTOP", "a loop stuck in a call"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_who_hangs_is_restarted_and_who_was_stopped_is_alive_again(
    folder: Path, component: str, how: signal.Signals
) -> None:
    with running(component, folder) as (pid, succeeds):
        os.kill(pid, how)
        wait_for("the probe to fail", lambda: not succeeds("livenessProbe", LIMIT_S), LONG_S)
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            wait_for("the probe to succeed", lambda: succeeds("livenessProbe", LIMIT_S), LONG_S)
        os.kill(pid, signal.SIGKILL)


def test_a_full_run_ages_nothing(folder: Path) -> None:
    """State folder and liveness file lie on one tmpfs without a free byte."""
    given = launch(folder)
    with NriGpuInLittle(replace(given, run_dir=given.state / "run"), 512) as daemon:
        inside = daemon.folder / "run"
        wait_for("its first sign of life", lambda: probe("daemon", "livenessProbe", inside) == 0, LONG_S)
        daemon.fill()
        assert not (daemon.folder / "late").write_bytes(b"")
        with pytest.raises(OSError, match="No space left"):
            (daemon.folder / "late").write_bytes(bytes(4096))
        _assert_written_on(inside)


def test_a_process_without_descriptors_ages_nothing(folder: Path) -> None:
    with NriGpu(launch(folder)) as daemon:
        daemon.wait_logged("inventory changed")
        opened = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (opened, opened))
        _assert_written_on(folder / "run")


def _assert_written_on(run_dir: Path) -> None:
    """Over the same bytes, as many as before."""
    file = run_dir / "alive"
    before, text = file.stat(), file.read_text()
    wait_for("two later times", lambda: int(file.read_text().split()[0]) > int(text.split()[0]) + 3, LONG_S)
    after = file.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)


def test_who_stands_by_has_a_file_of_its_own_and_is_ready(folder: Path) -> None:
    """The one that waits can hang alone; and the one that serves nobody is not ready."""
    with NriGpu(launch(folder)) as daemon:
        following = daemon.next()
        own, others = folder / "run", following.launch.base / "run"
        wait_for("its first sign of life", lambda: probe("daemon", "livenessProbe", own) == 0, LONG_S)
        assert probe("daemon", "readinessProbe", own) == 1
        with following:
            wait_for("the next to be ready", lambda: probe("daemon", "readinessProbe", others) == 0, LONG_S)
            os.kill(following.pid, signal.SIGSTOP)
            wait_for("it to fail", lambda: probe("daemon", "livenessProbe", others, LIMIT_S) == 1, LONG_S)
            assert probe("daemon", "livenessProbe", own) == 0
            os.kill(following.pid, signal.SIGCONT)


ALIVE = {
    "now": (0, "ready", True),
    "in time": (25, "ready", True),
    "old": (35, "ready", False),
    "of a clock that is ahead": (-90, "ready", True),
    "waits": (0, "waits", False),
}


@pytest.mark.parametrize(("age_s", "word", "ready"), ALIVE.values(), ids=ALIVE)
def test_ready_is_who_says_so_and_lives(tmp_path: Path, age_s: int, word: str, ready: bool) -> None:
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    (tmp_path / "alive").write_text(f"{int(uptime_s - age_s):10d} {word}\n")
    assert (probe("guard", "readinessProbe", tmp_path) == 0) == ready
    assert (probe("guard", "livenessProbe", tmp_path) == 0) == (age_s <= 30)


@pytest.mark.parametrize("text", ["", "\n", "never ready\n", None])
def test_who_wrote_nothing_that_is_a_time_is_not_alive(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "alive").write_text(text)
    assert probe("dra", "livenessProbe", tmp_path)


def test_a_probe_takes_20_ms_of_a_processor_at_most(tmp_path: Path) -> None:
    (tmp_path / "alive").write_text(f"{2**31 - 1:10d} ready\n")
    costs = []
    for _ in range(20):
        program = command("daemon", "readinessProbe", tmp_path)
        _, status, used = os.wait4(os.posix_spawnp(program[0], program, os.environ), 0)
        assert status == 0
        costs.append(used.ru_utime + used.ru_stime)
    assert sorted(costs)[10] < CPU_MOST_S
