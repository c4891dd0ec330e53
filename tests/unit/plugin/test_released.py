"""The daemon's part in handing GPUs over: what a release, a look and a reload do to what others are told."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import pytest

from nri_gpu.domain.container import Cgroup, ContainerId, FirstProcess, PodUid
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.events import Gone
from nri_gpu.ledger.holders import Releasing
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.processes import FIRST_PAUSE_S, LONGEST_PAUSE_S, ContainerProcesses, Means
from nri_gpu.nri.subscription import Event
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import ForeignSettings, HandoverSettings, Policy, Unknown
from nri_gpu.system.cgroups import UNIFIED, ContainerCgroups
from tests.support import nri_messages as nri
from tests.support.handover import HandoverBench
from tests.support.ledgers import after

ENDS = (Event.STOP_CONTAINER, Event.REMOVE_CONTAINER, Event.STOP_POD_SANDBOX, Event.REMOVE_POD_SANDBOX)


@pytest.mark.parametrize("kind", ENDS, ids=lambda kind: kind.name.lower())
def test_the_next_pod_waits_for_a_look_that_finds_nobody(kind: Event) -> None:
    bench = HandoverBench()
    bench.run_and_end(kind)
    assert bench.left == 1
    assert "was just released by ml/first: whether processes still hold it is not known yet" in bench.withheld
    bench.look(2)
    assert "was just released by ml/first: 2 processes still hold it" in bench.withheld
    bench.look(0, began=0.0)
    assert "2 processes still hold it" in bench.withheld
    bench.look(0)
    assert bench.withheld == ""


class Cgroups(ContainerCgroups):
    """Each container's process is in a cgroup of its own, and another one with it."""

    def first_process(self, pid: int, container_id: ContainerId) -> FirstProcess | None:
        return FirstProcess(pid, 1, Cgroup(UNIFIED, container_id)) if pid else None

    def lives(self, process: FirstProcess) -> bool:
        return False

    def pids(self, process: FirstProcess, most: int) -> tuple[int, ...]:
        return process.pid, process.pid + 1


def test_processes_of_a_monitor_are_not_waited_for() -> None:
    policy = Policy(foreign=ForeignSettings(monitors=Globs(("ml/exporter",))))
    bench = HandoverBench(policy=policy, cgroups=Cgroups())
    of = nri.pod("exporter")
    made = nri.container(of)
    made.pid = 40
    made.linux.devices.add(path="/dev/nvidia0", type="c", major=195, minor=0)
    bench.create(of, made)
    bench.tell(Event.START_CONTAINER, of, made)
    bench.run_and_end()
    bench.look(3, started=(900, 901, 902), pids=(39, 40, 41))
    assert "1 process still holds it" in bench.withheld
    bench.look(2, started=(901, 902), pids=(40, 41))
    assert bench.withheld == ""
    bench.run_and_end()
    bench.look(1)  # in a pod without the host's PIDs, all count
    assert "1 process still holds it" in bench.withheld


def test_who_was_there_before_the_container_is_not_waited_for() -> None:
    """A display server holds a context on each GPU of a workstation."""
    bench = HandoverBench()
    _, made = bench.run()
    bench.state.commit(bench.state.ledger.with_processes({ContainerId(made.id): FirstProcess(900, started=500)}))
    bench.plugin.apply(Gone(bench.clock(), (ContainerId(made.id),)))
    bench.clock.now += 1
    bench.look(2, started=(100, 500))
    assert "1 process still holds it" in bench.withheld
    bench.look(2)  # nobody can see when they started
    assert "2 processes still hold it" in bench.withheld
    bench.look(1, started=(100,))
    assert bench.withheld == ""


USUAL: Final = HandoverSettings()
# Processes known before, whether the node is simulated, the settings, and whether the next pod waits.
WAITS: Final[dict[str, tuple[int | None, bool, HandoverSettings, bool]]] = {
    "a file that tells of no processes": (None, True, USUAL, False),
    "policy does not wait": (1, False, HandoverSettings(wait=False), False),
    "nobody can tell, and policy offers then": (None, False, HandoverSettings(unknown=Unknown.OFFER), False),
    "a file that tells of some": (0, True, USUAL, True),
    "a driver that cannot tell": (None, False, USUAL, True),
}


@pytest.mark.parametrize(("known", "simulated", "settings", "waits"), WAITS.values(), ids=WAITS)
def test_who_is_waited_for(known: int | None, simulated: bool, settings: HandoverSettings, waits: bool) -> None:
    bench = HandoverBench(known, simulated=simulated, policy=Policy(handover=settings))
    bench.run_and_end()
    assert ("just released" in bench.withheld) is waits
    assert bench.left == waits


def test_a_reload_may_end_the_waiting() -> None:
    bench = HandoverBench()
    bench.run_and_end()
    bench.plugin.state.use(Policy(handover=HandoverSettings(wait=False)))
    bench.look(2)  # each reload asks for one
    assert bench.withheld == ""


def test_looks_come_at_once_then_more_and_more_rarely_until_the_grace_is_over() -> None:
    table, means = ContainerProcesses(), Means(60.0, looks_at_gpus=True)
    ledger = Ledger().with_releasing({GpuUuid("GPU-1"): Releasing(PodUid("uid"), "ns/pod", 0.0, 10.0)})
    now, looks = 0.0, []
    while ledger.releasing:
        ledger = after(ledger, *table.overdue(now, ledger))
        found = table.next(now, ledger, means)
        looks += [now] if found.gpus else []
        now = table.due(now, ledger, means) or now
    pauses = [after - before for before, after in pairwise(looks)]
    assert looks[0] == 0.0
    assert pauses == pytest.approx([min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(len(pauses))])
    assert 8.0 < looks[-1] <= 10.0
    assert table.due(now, ledger, means) is None
