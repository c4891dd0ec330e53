"""When the daemons' controller looks at the ledger, and that containers' folders are there before any container is."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.mps import mps_controller as controller_module
from nri_gpu.mps.mps_controller import Demand, GpuMpsController, MpsController
from nri_gpu.mps.mps_folders import DaemonFolder, clients
from nri_gpu.policy.model import Policy
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import cancelled
from tests.support import builders as make
from tests.support import mps
from tests.support.waiting import aside, wait_for

TURNS = 10  # of the event loop: more than a look takes
WITH_MPS = Policy(mps=MpsSettings(enabled=True))


async def looked_once(state: Path, node_state: NodeState) -> MpsController:
    """A controller that has looked at the runtime's first list, and waits."""
    controller = MpsController(state, node_state)
    node_state.then(controller.follow_ledger, Changed.LEDGER)
    task = asyncio.create_task(controller.run())
    node_state.synchronized = True
    node_state.commit(make.ledger())
    await asyncio.sleep(0)
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
        await asyncio.sleep(0)
        return controller.woken.is_set()

    return asyncio.run(run())


@pytest.mark.parametrize(("mode", "woken"), [(Mode.EXCLUSIVE, False), (Mode.SHARED, False), (Mode.MPS, True)])
def test_where_mps_is_off_only_a_container_that_has_a_gpu_by_mps_wakes_it(
    tmp_path: Path, mode: Mode, *, woken: bool
) -> None:
    assert wakes(make.ledger(make.entry(1, mode=mode)), tmp_path) is woken


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder with the file system for what clients write."""
    with tempfile.TemporaryDirectory() as folder, mps.client_files(Path(folder)):
        yield Path(folder)


def following(state: Path, node_state: NodeState) -> MpsController:
    """As on a node."""
    controller = MpsController(state, node_state)
    node_state.first(controller.prepare, Changed.NODE, Changed.POLICY)
    node_state.then(controller.follow_ledger, Changed.LEDGER)
    return controller


def given(node_state: NodeState) -> set[Path]:
    """What containers are created with that get a GPU now."""
    return {Path(node_state.node.mps.folder(gpu.uuid)) for gpu in node_state.node.gpus}


def prepared(node_state: NodeState) -> bool:
    return all((folder / name).is_dir() for folder in given(node_state) for name in ("pipe", "shm"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_folders_are_there_as_soon_as_a_container_can_be_created_with_them(state: Path) -> None:
    node_state = NodeState(make.inventory())
    following(state, node_state)
    node_state.put_inventory(make.inventory())
    assert list(clients(state).iterdir()) == []
    node_state.use(WITH_MPS)
    assert prepared(node_state)
    node_state.put_inventory(make.inventory(make.gpus(8)))
    assert prepared(node_state)
    assert len(given(node_state)) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_a_folder_is_published_only_once_it_is_there(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: DaemonFolder) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(controller_module, "LOOK_S", 0.01)
    node_state = NodeState(make.inventory(), policy=WITH_MPS)
    with monkeypatch.context() as patched:
        patched.setattr(DaemonFolder, "make", full)
        task = asyncio.create_task(following(state, node_state).run())
        node_state.put_inventory(make.inventory())
        assert node_state.node.mps.unmade == dict.fromkeys(
            (gpu.uuid for gpu in node_state.node.gpus), "No space left on device"
        )
    await aside(wait_for, "room", lambda: not node_state.node.mps.unmade, 10)
    assert prepared(node_state)
    await cancelled([task])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_the_next_daemons_folders_stay_and_those_of_an_earlier_start_of_ours_go(state: Path) -> None:
    async def start() -> set[Path]:
        node_state = NodeState(make.inventory(), policy=WITH_MPS)
        task = asyncio.create_task(following(state, node_state).run())
        node_state.put_inventory(make.inventory())
        assert prepared(node_state)
        node_state.synchronized = True
        node_state.commit(make.ledger())
        await aside(wait_for, "no other folder", lambda: set(clients(state).iterdir()) == given(node_state), 10)
        await cancelled([task])
        return given(node_state)

    assert asyncio.run(start()).isdisjoint(asyncio.run(start()))


def test_a_start_that_waits_for_the_daemons_end_has_it_ended(state: Path) -> None:
    """Though its container is gone again before the ledger is looked at."""
    node_state = NodeState(make.inventory(), policy=WITH_MPS)
    controller = MpsController(state, node_state)
    folder = DaemonFolder(state, make.uuid(0), "1")
    ours = controller._controllers[make.uuid(0)] = GpuMpsController(folder, node_state, lambda: folder)
    ours.demand = Demand.IDLE
    assert "is being ended" in controller.start_hindrance(make.entry(0).grant)
    assert ours.demand is Demand.DOWN
