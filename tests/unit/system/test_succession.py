"""The next daemon is there before the last one goes: who knows of whom, by locks alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.cli.main import main
from nri_gpu.daemon.state_folder import StateFolder
from nri_gpu.domain.errors import Exit
from nri_gpu.system.succession import Succession
from tests.support.daemon import Launch, NriGpu
from tests.support.waiting import wait_for

LOCKS = """
import sys, time
from pathlib import Path
from nri_gpu.system.succession import Succession
assert Succession(Path(sys.argv[1])).announce()
print(flush=True)
time.sleep(60)
"""


def test_the_last_one_sees_the_next_until_that_has_taken_over(tmp_path: Path) -> None:
    last, following, third = (Succession(tmp_path) for _ in range(3))
    assert not last.awaited()
    assert following.announce()
    assert (last.awaited(), following.succeeds, last.succeeds) == (True, True, False)
    assert not third.announce()
    following.settled()
    assert (last.awaited(), following.succeeds) == (False, False)
    assert third.announce()
    third.settled()


def test_a_next_one_that_dies_is_waited_for_no_longer(tmp_path: Path) -> None:
    last = Succession(tmp_path)
    with subprocess.Popen([sys.executable, "-c", LOCKS, str(tmp_path)], stdout=subprocess.PIPE) as following:
        assert following.stdout
        following.stdout.readline()
        assert last.awaited()
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(last.passed(), 0.1))
        following.kill()
    asyncio.run(asyncio.wait_for(last.passed(), 5))


def test_one_that_is_not_to_stand_by_says_who_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = StateFolder(tmp_path / "state")
    state.open()
    launch = Launch(tmp_path, tmp_path / "nri.sock")
    assert main(["run", *launch.arguments()]) == Exit.UNAVAILABLE
    assert "another nri-gpu" in capsys.readouterr().err
    state.close()


@pytest.fixture
def last(tmp_path: Path) -> Iterator[NriGpu]:
    """A daemon that has its state folder, and waits for a runtime."""
    with NriGpu(Launch(tmp_path, tmp_path / "nri.sock")) as running:
        running.wait_logged("runtime not reached")
        yield running


def test_one_that_stands_by_feeds_its_watchdog_is_ready_to_probes_and_ends_when_told(last: NriGpu) -> None:
    with last.next() as following:
        following.wait_ready()
        assert "STATUS=standing by" in following.notified
        wait_for("a fed watchdog", lambda: following.has_notified("WATCHDOG=1"), 20)
        state = str(last.launch.state)
        assert main(["status", "--state-dir", state]) == Exit.FINDING
        assert main(["status", "--state-dir", state, "--probe"]) == Exit.OK
        following.hang_up()
        assert following.terminate() == 0
        assert main(["status", "--state-dir", state, "--probe"]) == Exit.FINDING
        following.start()
        following.wait_ready()
        assert last.terminate() == 0  # no kubelet is served, so nothing is waited for
        following.wait_logged("runtime not reached")
        assert following.terminate() == 0


def test_a_last_one_that_is_killed_has_its_place_taken(last: NriGpu) -> None:
    with last.next() as following:
        following.wait_ready()
        last.kill()
        following.wait_logged("runtime not reached")
