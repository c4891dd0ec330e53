"""Staging beside other processes: one that dies, several at once, one that keeps the lock; and between mounts."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.driver_scan import FoundDriver, scan
from nri_gpu.driver.stage import LOCK_WAIT_S, stage
from tests.support.driver_root import make_driver_root

PROJECT = Path(__file__).parents[2]
TIMEOUT_S = 60


@pytest.fixture
def found(tmp_path: Path) -> FoundDriver:
    return scan(make_driver_root(tmp_path / "root", "580.95.05"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "var/drivers"


def names(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir())


# Programs of one line or two begin like this, with the driver root and the stage folder as arguments.
BEGIN = """
import os, sys
from pathlib import Path
from nri_gpu.driver.driver_scan import scan
from nri_gpu.driver.stage import copy, hard_link, stage
found, base = scan(Path(sys.argv[1])), Path(sys.argv[2])
"""


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BEGIN + code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)


OTHER_MOUNT = """
try:
    hard_link(found.libraries[0].source.path, base / "link")
except OSError as error:
    print(error.strerror)
print(stage(found, base).generation)
"""


def test_the_kernel_refuses_links_between_mounts_and_staging_copes(found: FoundDriver, base: Path) -> None:
    base.mkdir(parents=True)
    mine = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = 'mount --bind "$3" "$3" && exec "$0" -c "$1" "$2" "$3"'  # as a unit's ReadWritePaths= are mounted
    command = ["/usr/bin/unshare", *mine, "--mount", "--propagation", "private", "/bin/sh", "-c", script]
    words: list[str | Path] = [*command, sys.executable, BEGIN + OTHER_MOUNT, found.root, base]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stdout.splitlines() == ["Invalid cross-device link", found.generation], done.stderr
    assert stage(found, base).generation == found.generation


DIES = """
def method(original, target, count=[0]):
    count[0] += 1
    if count[0] == 4:
        os._exit(9)
    copy(original, target)
stage(found, base, (method,))
"""


def test_a_process_that_dies_in_the_middle_hinders_nobody(found: FoundDriver, base: Path) -> None:
    with run_python(DIES, found.root, base) as process:
        assert process.wait(TIMEOUT_S) == 9
    assert names(base) == [f".{found.generation}.tmp", ".lock"]
    assert stage(found, base).generation == found.generation
    assert names(base) == [".lock", found.generation]


STAGES = """
def method(original, target):
    print("made", flush=True)
    copy(original, target)
stage(found, base, (method,))
"""


def test_of_processes_in_parallel_one_makes_it(found: FoundDriver, base: Path) -> None:
    processes = [run_python(STAGES, found.root, base) for _ in range(3)]
    made = [process.communicate(timeout=TIMEOUT_S)[0].count("made") for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(made) == [0, 0, len(found.libraries) + len(found.binaries)]
    assert names(base) == [".lock", found.generation]


LOCKS = """
import fcntl, sys
lock = open(sys.argv[1], "r")
fcntl.flock(lock, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(file: Path) -> Iterator[int]:
    """Somebody who may read it has it locked. Gives their pid."""
    command = [sys.executable, "-c", LOCKS, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_lock_that_somebody_keeps_is_not_waited_for_for_ever(found: FoundDriver, base: Path) -> None:
    """As the lock of an earlier version was, it is open to whoever may read it."""
    base.mkdir(parents=True)
    (base / ".lock").write_text("")
    (base / ".lock").chmod(0o644)
    with locked(base / ".lock") as pid:
        began = time.monotonic()
        with pytest.raises(DriverError, match=rf"another process \(pid {pid}\) has {base}/\.lock locked: wait until"):
            stage(found, base, wait_s=0.1)
        assert time.monotonic() - began < LOCK_WAIT_S
    assert stat.S_IMODE((base / ".lock").stat().st_mode) == 0o600
    assert stage(found, base).generation == found.generation
