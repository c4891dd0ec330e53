"""When the daemons' controller looks at the ledger: it changes several times for each container with a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.claim import Mode
from nri_gpu.mps.controller import MpsController
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import cancelled
from tests.support import builders as make

TURNS = 10  # of the event loop: more than a look takes


async def looked_once(state: Path, node_state: NodeState) -> MpsController:
    """A controller that has looked at the runtime's first list, and waits."""
    controller = MpsController(state, node_state)
    node_state.subscribe(controller.follow_ledger, Changed.LEDGER)
    task = asyncio.create_task(controller.run())
    node_state.synchronized = True
    node_state.commit(make.ledger())
    assert controller.woken.is_set()  # whatever policy says: an earlier daemon may have left something
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert not controller.woken.is_set()
    await cancelled([task])
    return controller


def wakes(ledger: Ledger, state: Path) -> bool:
    """Whether this ledger, after an empty one, wakes a controller without MPS."""

    async def run() -> bool:
        node_state = NodeState(make.inventory())
        controller = await looked_once(state, node_state)
        node_state.commit(ledger)
        return controller.woken.is_set()

    return asyncio.run(run())


@pytest.mark.parametrize(("mode", "woken"), [(Mode.EXCLUSIVE, False), (Mode.SHARED, False), (Mode.MPS, True)])
def test_where_mps_is_off_only_a_container_that_has_a_gpu_by_mps_wakes_it(
    tmp_path: Path, mode: Mode, *, woken: bool
) -> None:
    assert wakes(make.ledger(make.entry(1, mode=mode)), tmp_path) is woken
