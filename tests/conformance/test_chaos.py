"""Whatever dies at whatever moment: the ledger is what the kernel allows, and nobody runs without what it asked for.

`make chaos` has more of it: NRI_GPU_CHAOS says how many containers are created.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.text import counted
from tests.support import packages
from tests.support.chaos import AIMED, UNSERVED, WINDOW, ChaosRun, chaos_run
from tests.support.marks import on_newest
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

CREATES: Final = int(os.environ.get("NRI_GPU_CHAOS", "60"))
ROUNDS: Final = max(3, CREATES // 30)
SEED: Final = 4
AIMS: Final = max(8, CREATES // 10)
GUARD_SAYS: Final = "container runs without the GPUs it asked for"
DAEMON_SAYS: Final = "container asked for GPUs but was created without nri-gpu"


@pytest.fixture
def chaos(runtime: packages.Runtime, tmp_path: Path) -> Iterator[ChaosRun]:
    with chaos_run(runtime, tmp_path, SEED) as run:
        yield run


@pytest.mark.short
def test_the_daemon_killed_every_other_second(chaos: ChaosRun, capsys: pytest.CaptureFixture[str]) -> None:
    """And containerd restarted in the middle, once in peace and once by SIGKILL; the guard lives all the while."""
    restarts = {ROUNDS // 3: False, 2 * ROUNDS // 3: True}
    for number in range(ROUNDS):
        chaos.create_while_killing(CREATES // ROUNDS, restart=restarts.get(number))
        chaos.settle()
        chaos.end_pods()
        chaos.settle()
    chaos.check_nothing_is_left()
    with capsys.disabled():
        print(f"\ncontainerd {chaos.node.runtime.release}, cgroup {chaos.node.cgroup}: {chaos.tally}")
    assert not chaos.tally.unexpected
    assert chaos.tally.happened["daemon killed"] >= 2


def test_with_both_killed_all_that_got_away_are_reported(chaos: ChaosRun) -> None:
    with chaos.guard_away():
        chaos.daemon.kill()
        chaos.guard.kill()
        chaos.create_unserved(30)
        running, created = chaos.evidence.ungranted()
        chaos.guard.start()
    assert running
    assert chaos.tally.happened[UNSERVED] >= len(running) + len(created)  # and those whose program is not there
    wait_for("all to be reported", lambda: chaos.guard.log().count(GUARD_SAYS) >= len(running), 20, chaos.guard.log)
    chaos.daemon.start()
    chaos.daemon.wait_ready()

    assert chaos.guard.log().count(GUARD_SAYS) == len(running)
    said = [line for line in chaos.guard.log().splitlines() if GUARD_SAYS in line]
    assert {line.rpartition("container_id=")[2] for line in said} == running
    assert chaos.daemon.log().count(DAEMON_SAYS) == len(running) + len(created)
    assert chaos.daemon.has_notified(f"{counted(len(running), 'container')} without the GPUs asked for")
    chaos.settle()


@on_newest
def test_with_both_dead_half_of_the_time_nothing_required_is_created_unserved(
    runtime: packages.Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runtime's own validator is on, and each pod that asks requires nri-gpu; the other pods wait for nobody."""
    with chaos_run(runtime, tmp_path, SEED, required=True) as run:
        run.create_while(4 * CREATES, lambda _: run.starve())  # most are refused at once
        run.aim(AIMS)
        run.settle()
        run.end_pods()
        run.settle()
        run.check_nothing_is_left()
    with capsys.disabled():
        print(f"\ncontainerd {runtime.release}: {run.dead_s:.0f} s dead, {run.served_s:.0f} s served, {run.tally}")
    assert not run.tally.unexpected
    assert run.dead_s >= run.served_s > 0
    assert run.tally.happened["create refused, required and not connected"]
    assert run.tally.happened[UNSERVED] == 0
    aimed = {what: often for what, often in run.tally.happened.items() if what.startswith(AIMED)}
    assert sum(aimed.values()) == AIMS
    assert aimed[f"{AIMED}, refused"]
    assert run.tally.happened[WINDOW] >= aimed.get(f"{AIMED}, without a grant", 0)
