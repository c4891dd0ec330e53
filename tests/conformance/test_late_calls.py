"""Slow stops beside a plugin that registers, and calls whose deadline is over when their turn comes (containerd#14083).

NRI then throws daemon and guard out together, and what waits with such a call goes on unasked: it is reported and
ended. What the kubelet allocated never starts without our reply.

`make chaos` has more of it: NRI_GPU_LATE says how many CRI calls are made.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from msgspec import structs

from tests.conformance.conftest import launch_on
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.daemon import TOPOLOGIES, NriGpu
from tests.support.guard import NriGuard
from tests.support.kubelet import Kubelet
from tests.support.late_calls import APART_S, GRACE_S, SLOW, Allocated, LateCalls

MANY: Final = "NRI_GPU_LATE" in os.environ
CALLS: Final = int(os.environ.get("NRI_GPU_LATE", "40"))
MORE: Final = 500
# An older containerd lets a plugin in at any time.
HOLD_BACK: Final = packages.available()[1:]
pytestmark = pytest.mark.containerd(*(HOLD_BACK if MANY else dict.fromkeys((HOLD_BACK[0], HOLD_BACK[-1]))))

GPU: Final = "nvidia.com/gpu"
KUBELETS: Final = 4  # which GPU it allocates: none that a pod asks for
STOPS_S: Final = (SLOW - 1) * APART_S + GRACE_S  # from the first slow stop to the end of the last
LEEWAY_S: Final = 10.0  # what else takes time: processes that start, programs that end, a busy machine
PAUSE_S: Final = 4.0  # less than the first pause of a plugin whose registration had to wait
KUBELETS_ALONE: Final = '[[pool]]\nname = "kubelet"\nmodel = "*"\n'
ENDED, REGISTERED = "connection ended, reconnecting", "registered"


@contextmanager
def late_calls(runtime: packages.Runtime, base: Path, folder: Path, *, by_request: bool = True) -> Iterator[LateCalls]:
    """A containerd with daemon and guard, and a GPU that a kubelet allocated. folder: short enough for sockets."""
    (traces := base / "traces").mkdir()
    node = Containerd(runtime)
    try:
        node.boot()
        policy = f"""
            [ledger]
            created_grace_s = 5
            [guard]
            stop_ungranted = true
            stop_grace_s = 0
            cri_socket = "{node.cri_socket}"
            [kubelet]
            enabled = true
            dir = "{folder}/device-plugins"
            cdi_dir = "{node.layout.cdi}"
            """ + ("" if by_request else f'pool = "kubelet"\n{KUBELETS_ALONE}')
        launch = structs.replace(launch_on(node, base), topology=TOPOLOGIES / "pcie-8.toml").with_policy(policy)
        with NriGpu(launch) as daemon, NriGuard(launch, launch.policy) as guard:
            daemon.wait_staged()
            guard.wait_ready()
            allocated = asyncio.run(allocate(folder))
            yield LateCalls(node, daemon, guard, traces, allocated, by_request=by_request)
    finally:
        node.abandon()


async def allocate(folder: Path) -> Allocated:
    async with Kubelet(folder) as kubelet:
        await kubelet.wait_healthy(GPU, 8)
        (answer,) = (await kubelet.allocate(GPU, [kubelet.healthy(GPU)[KUBELETS]])).container_responses
        return Allocated(dict(answer.annotations), tuple(each.name for each in answer.cdi_devices))


def make_calls(late: LateCalls, capsys: pytest.CaptureFixture[str]) -> None:
    """Make all calls, and a few more where none was late at the right moment; check what came of them."""

    def thrown_out() -> bool:
        return bool(late.tally.happened["daemon thrown out"] and late.tally.happened["guard thrown out"])

    while late.tally.operations < CALLS or (late.tally.operations < CALLS + MORE and not thrown_out()):
        late.round()
    with capsys.disabled():
        print(f"\ncontainerd {late.node.runtime.release}: {late.tally}")
    assert thrown_out()
    assert max(late.tally.blocked_s) < STOPS_S + LEEWAY_S


def test_who_runs_beside_a_holder_or_without_its_gpu_is_reported_and_ended(
    runtime: packages.Runtime, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through CRI, which waits as well: as soon as a registration and then a call have come through."""
    with late_calls(runtime, tmp_path, folder) as late:
        make_calls(late, capsys)
        assert max((*late.tally.beside_s, *late.tally.without_s), default=0) < STOPS_S + LEEWAY_S


def test_where_being_away_opens_nothing_the_next_registration_is_put_off(
    runtime: packages.Runtime, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with late_calls(runtime, tmp_path, folder, by_request=False) as late:
        make_calls(late, capsys)
        assert min(pauses_s(late.daemon)) > PAUSE_S


def pauses_s(process: NriGpu) -> list[float]:
    """Seconds from each end of a connection to the next registration."""
    pauses, ended_at = [], None
    for line in process.log().splitlines():
        if ENDED in line:
            ended_at = seconds_of_day(line)
        elif f" {REGISTERED} " in line and ended_at is not None:
            pauses.append((seconds_of_day(line) - ended_at) % 86_400)
            ended_at = None
    return pauses


def seconds_of_day(line: str) -> float:
    hours, minutes, seconds = line.split()[0].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
