"""A successor stands by before its predecessor ends: who knows of whom, by locks alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.cli.main import main
from nri_gpu.domain.errors import Exit
from nri_gpu.records.state_folder import StateFolder
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


def test_the_predecessor_sees_its_successor_until_that_has_taken_over(tmp_path: Path) -> None:
    predecessor, successor, third = (Succession(tmp_path) for _ in range(3))
    assert not predecessor.awaited()
    assert successor.announce()
    assert (predecessor.awaited(), successor.succeeds, predecessor.succeeds) == (True, True, False)
    assert not third.announce()
    successor.settled()
    assert (predecessor.awaited(), successor.succeeds) == (False, False)
    assert third.announce()
    third.settled()


def test_a_successor_that_dies_is_waited_for_no_longer(tmp_path: Path) -> None:
    predecessor = Succession(tmp_path)
    with subprocess.Popen([sys.executable, "-c", LOCKS, str(tmp_path)], stdout=subprocess.PIPE) as successor:
        assert successor.stdout
        successor.stdout.readline()
        assert predecessor.awaited()
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(predecessor.passed(), 0.1))
        successor.kill()
    asyncio.run(asyncio.wait_for(predecessor.passed(), 5))


def test_a_daemon_that_is_not_to_stand_by_says_who_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = StateFolder(tmp_path / "state")
    state.open()
    launch = Launch(tmp_path, tmp_path / "nri.sock")
    assert main(["run", *launch.arguments()]) == Exit.UNAVAILABLE
    assert "another nri-gpu" in capsys.readouterr().err
    state.close()


@pytest.fixture
def predecessor(tmp_path: Path) -> Iterator[NriGpu]:
    """A daemon that has its state folder, and waits for a runtime."""
    with NriGpu(Launch(tmp_path, tmp_path / "nri.sock")) as running:
        running.wait_logged("runtime not reached")
        yield running


def test_a_successor_feeds_its_watchdog_is_ready_to_probes_and_ends_when_told(predecessor: NriGpu) -> None:
    with predecessor.next() as successor:
        successor.wait_ready()
        assert "STATUS=standing by" in successor.notified
        wait_for("a fed watchdog", lambda: successor.has_notified("WATCHDOG=1"), 20)
        state = str(predecessor.launch.state)
        assert main(["status", "--state-dir", state]) == Exit.FINDING
        assert main(["status", "--state-dir", state, "--probe"]) == Exit.OK
        successor.hang_up()
        assert successor.terminate() == 0
        assert main(["status", "--state-dir", state, "--probe"]) == Exit.FINDING
        successor.start()
        successor.wait_ready()
        assert predecessor.terminate() == 0  # no kubelet is served, so nothing is waited for
        successor.wait_logged("runtime not reached")
        assert successor.terminate() == 0


def test_a_predecessor_that_is_killed_has_its_place_taken(predecessor: NriGpu) -> None:
    with predecessor.next() as successor:
        successor.wait_ready()
        predecessor.kill()
        successor.wait_logged("runtime not reached")
