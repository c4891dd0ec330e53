from __future__ import annotations

from collections.abc import Sequence

import pytest

from nri_gpu.domain.claim import NumaBinding
from nri_gpu.domain.container import Container
from nri_gpu.domain.gpu import Gpu, Unit
from nri_gpu.domain.node import Loader, NumaNode
from nri_gpu.injection.plan import UNBOUND, Cpuset, Injection, cpuset_of, plan
from tests.support import builders as make

NODES = (NumaNode(0, "0-15,32-47"), NumaNode(1, "16-31"), NumaNode(2, "", memory=True), NumaNode(3, "48", memory=False))
ZERO, ONE, LONE, BARE, NOWHERE, UNREAD = (make.gpu(at, numa_node=node) for at, node in enumerate((0, 1, 2, 3, None, 9)))
PART = make.mig_gpu(6, numa_node=1).parts[0]

BOUND: dict[str, tuple[Sequence[Unit], NumaBinding, Cpuset]] = {
    "cpus": ((ZERO,), NumaBinding.CPUS, Cpuset(cpus="0-15,32-47")),
    "memory": ((ZERO,), NumaBinding.MEMORY, Cpuset(mems="0")),
    "both": ((ONE,), NumaBinding.BOTH, Cpuset("16-31", "1")),
    "of a MIG device": ((PART,), NumaBinding.BOTH, Cpuset("16-31", "1")),
    "of two nodes": ((ONE, ZERO), NumaBinding.BOTH, Cpuset("0-15,32-47,16-31", "0,1")),
    "of one node twice": ((ONE, PART), NumaBinding.BOTH, Cpuset("16-31", "1")),
    "none": ((ZERO,), NumaBinding.NONE, UNBOUND),
    "a node without CPUs": ((LONE,), NumaBinding.BOTH, Cpuset("", "2")),
    "a node without CPUs beside one": ((ZERO, LONE), NumaBinding.BOTH, Cpuset("0-15,32-47", "0,2")),
    "a node without memory": ((BARE,), NumaBinding.BOTH, Cpuset("48", "")),
    "no node is told": ((NOWHERE,), NumaBinding.BOTH, UNBOUND),
    "of one no node is told": ((ZERO, NOWHERE), NumaBinding.BOTH, UNBOUND),
    "the node could not be read": ((UNREAD,), NumaBinding.BOTH, UNBOUND),
    "no GPU": ((), NumaBinding.BOTH, UNBOUND),
}


@pytest.mark.parametrize(("units", "binding", "cpuset"), BOUND.values(), ids=BOUND)
def test_what_a_container_is_kept_to(units: Sequence[Unit], binding: NumaBinding, cpuset: Cpuset) -> None:
    assert cpuset_of(units, NODES, binding, pinned=False) == cpuset
    assert cpuset_of(units, NODES, binding, pinned=True) == UNBOUND


def share(gpu: Gpu, container: Container, numa: NumaBinding) -> Injection:
    return Injection(
        container=container,
        gpus=(gpu,),
        capabilities=frozenset(),
        inventory=make.inventory([gpu], numa=NODES),
        tree=None,
        loader=Loader.FOLDERS,
        void=False,
        numa=numa,
    )


def test_it_is_part_of_the_plan() -> None:
    edits = plan(share(ZERO, make.container("1"), NumaBinding.BOTH))
    assert (edits.cpuset_cpus, edits.cpuset_mems) == ("0-15,32-47", "0")


def test_plans_of_two_policies_are_two() -> None:
    plan(share(ZERO, make.container("1"), NumaBinding.BOTH))
    assert plan(share(ZERO, make.container("1"), NumaBinding.NONE)).cpuset_cpus == ""
    assert plan(share(ZERO, make.container("1", pinned=True), NumaBinding.BOTH)).cpuset_cpus == ""
