"""The next attempt at a container that ran, by what a runtime tells of the last one's end.

CRI-O's order at a plugin, for a container that exits by itself (server/container_create.go, container_start.go,
container_stop.go of its 1.37): CreateContainer, StartContainer, CreateContainer of the next attempt.
"""

from __future__ import annotations

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.nri.subscription import Event
from tests.support import nri_messages as nri
from tests.support.plugin import Bench
from tests.unit.plugin.lasting import Cgroups


def attempt(bench: Bench, number: int) -> frozenset[GpuUuid]:
    """Create and start that attempt at a container that asks for any GPU. Returns what is held then."""
    of = nri.asking("1", "first")
    made: pb.Container = nri.container(of)
    made.id = f"attempt-{number}"
    bench.tell(Event.START_CONTAINER, of, nri.running(nri.adjusted(made, bench.create(of, made))))
    return frozenset(bench.plugin.ledger.usage())


@pytest.mark.parametrize(("runtime", "held"), [("cri-o", 1), ("containerd", 4)])
def test_one_that_exited_holds_nothing_once_the_next_is_created(runtime: str, held: int) -> None:
    bench = Bench()
    bench.plugin.runtime = runtime
    assert [len(attempt(bench, number)) for number in range(4)][-1] == held


async def test_one_whose_processes_live_on_keeps_its_gpu_for_the_next() -> None:
    bench = Bench(cgroups=Cgroups())
    bench.plugin.runtime = "cri-o"
    assert attempt(bench, 1) == attempt(bench, 2)
    assert bench.phases() == {"attempt-1": "lost", "attempt-2": "running"}
