"""A registration is put off where the last one had to wait, and being away opens nothing; a file tells the guard."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.plugin.guard_state import DaemonState
from nri_gpu.plugin.registration_pause import FILE, AwayFile
from nri_gpu.plugin.supervisor import PUT_OFF
from nri_gpu.plugin.transport import ConnectionLimits
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from nri_gpu.system.state import NodeState
from tests.support import builders
from tests.support.log import Log
from tests.support.plugin import ServedPlugin

CLUSTER = parse_policy(
    {"kubelet": {"enabled": True, "pool": "cluster"}, "pool": [{"name": "cluster", "model": ["*"]}]}, "f"
)
PAUSE_S = 0.4


@pytest.mark.parametrize(
    ("held_back", "opens_nothing", "waits"),
    [(True, True, True), (True, False, False), (False, True, False)],
    ids=["it waits", "being away opens something", "it had not to wait"],
)
async def test_when_the_next_registration_waits(
    folder: Path, held_back: bool, opens_nothing: bool, waits: bool
) -> None:
    limits = ConnectionLimits(held_back_s=0.1, held_back_waits_s=(PAUSE_S,))
    async with ServedPlugin(folder, limits=limits, opens_nothing=opens_nothing) as served:
        runtime = await served.listener.accept()
        await runtime.register()
        await asyncio.sleep(0.2 * held_back)
        await runtime.synchronize()
        began = time.monotonic()
        runtime.close()
        await served.connected()
        assert (time.monotonic() - began >= PAUSE_S) is waits
        assert (served.away[-1] == PUT_OFF) is waits


def test_the_file_says_what_holds_now(folder: Path, log: Log) -> None:
    allocated = Allocated((AllocatedDevice("nvidia.com/gpu", "GPU-1"),))
    by_annotation = builders.entry(0)
    by_kubelet = builders.ledger(replace(by_annotation, allocation=allocated))
    state = NodeState(builders.inventory(), policy=CLUSTER, later=lambda action: action())
    faults = ["no runtime is connected yet"]
    away, guard = AwayFile(folder, state, lambda: faults[-1]), DaemonState(folder, None)

    def holds() -> bool:
        assert away.opens_nothing is guard.away_opens_nothing()
        return away.opens_nothing

    state.commit(by_kubelet)
    assert not holds()
    faults.append("")
    away.look()
    assert holds()
    state.commit(builders.ledger(by_annotation))
    assert not holds()
    state.commit(by_kubelet)
    assert holds()
    state.use(Policy.default())
    assert not holds()
    state.use(CLUSTER)
    assert AwayFile(folder, state, lambda: faults[0]).opens_nothing is False
    assert (folder / FILE).exists()  # what the daemon before it found still holds
    assert not log.warnings()
