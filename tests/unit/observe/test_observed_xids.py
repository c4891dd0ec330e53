"""XIDs that an observer hears: only where the policy says so, the last of each GPU, and how many of each class."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.domain.node import Inventory
from nri_gpu.health.xids import ActionClass
from nri_gpu.observe.observed_xids import KEPT, ObservedXids
from nri_gpu.policy.model import DriverSettings, Policy
from nri_gpu.policy.observe_settings import ObserveSettings
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.nvml import FakeGpu, build_fake_nvml
from tests.support.running import running
from tests.support.scripted_runtime import until

XID = EventType.XID


def listener(root: Path, *, xids: bool) -> tuple[ObservedXids, list[str], NodeState]:
    """A listener on a node with one GPU, and what it told."""
    told: list[str] = []
    policy = replace(Policy.default(), observe=ObserveSettings(xids=xids))
    state = NodeState(Inventory(taken_at=0, gpus=(make.gpu(0),)), policy=policy)
    driver = DriverSettings(root=str(root))
    return ObservedXids(driver, state, lambda: told.append("xid"), lambda: told.append("doubt")), told, state


def test_the_last_of_each_gpu_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    xids, told, _ = listener(tmp_path, xids=True)
    for number in range(2 * KEPT):
        xids.take(GpuEvent(make.uuid(0), XID, 79 if number % 2 else 31, None, None))
    assert [xid for xid, _ in xids.last[make.uuid(0)]] == [31, 79] * (KEPT // 2)
    assert xids.counts == {(make.uuid(0), ActionClass.RESET): KEPT, (make.uuid(0), ActionClass.RESTART): KEPT}
    assert len(told) == 2 * KEPT


def test_what_is_no_xid_and_of_no_gpu_is_left_out(tmp_path: Path) -> None:
    xids, told, _ = listener(tmp_path, xids=True)
    xids.take(GpuEvent(make.uuid(0), XID + 1, 79, None, None))
    xids.take(GpuEvent(make.uuid(7), XID, 79, None, None))
    assert not (xids.last or xids.counts or told)


async def test_nvml_is_held_open_only_where_the_policy_says_so(tmp_path: Path) -> None:
    """That keeps a GPU from being reset, so a reload ends it, too."""
    root = build_fake_nvml(tmp_path / "driver", [FakeGpu()])
    xids, _, state = listener(root, xids=False)
    state.then(xids.follow)
    async with running(xids.run()):
        xids.follow()
        assert xids.starts == 0
        state.use(replace(Policy.default(), observe=ObserveSettings(xids=True)))
        xids.follow()
        await until("a listening process", lambda: xids.starts == 1)
