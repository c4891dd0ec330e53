"""What sampling each second costs, while somebody asks: the daemon's part of it, and the process that calls NVML."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.effort import Effort
from bench.figures import Figure
from bench.process import EIGHT_GPUS, cpu_s
from nri_gpu.domain.container import ContainerId
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.policy.model import DriverSettings
from nri_gpu.system.state import NodeState
from nri_gpu.usage.usage_controller import UsageController
from tests.support import builders as make
from tests.support.nvml import FakeProcess, FakeUse, build_fake_nvml, gpus_of, use
from tests.support.running import running

ASKED_EACH_S: Final = 1.0  # as `status --watch` does
SETTLED: Final = 3  # samples until what is read once is read


def figures(effort: Effort) -> Iterator[Figure]:
    """GPUs that are held, each with a process. The made-up driver's own share is in the child's."""
    for held in (1, 8):
        with tempfile.TemporaryDirectory(prefix="nri-gpu-bench-") as folder, _processes(held) as pids:
            daemon_ms, child_ms = asyncio.run(_cost_ms(Path(folder), pids, max(3.0, effort.idle_s)))
        yield Figure(f"sampling each second, GPUs that are held: {held}", daemon_ms + child_ms, "ms/s", 3, 1)
        yield Figure("  the daemon's part", daemon_ms, "ms/s")
        yield Figure("  the part of the process that calls NVML, with the made-up driver", child_ms, "ms/s")


@contextmanager
def _processes(number: int) -> Iterator[Sequence[int]]:
    sleeping = [subprocess.Popen(["sleep", "1d"]) for _ in range(number)]
    try:
        yield [each.pid for each in sleeping]
    finally:
        for each in sleeping:
            each.kill()
            each.wait()


async def _cost_ms(folder: Path, pids: Sequence[int], seconds: float) -> tuple[float, float]:
    """Milliseconds of CPU a second: of this process, and of its child."""
    inventory = load_topology(EIGHT_GPUS)
    gpus, ancestors = gpus_of(inventory)
    build_fake_nvml(folder, gpus, ancestors=ancestors, quiet=True)
    use(folder, *(FakeUse(gpu=at, processes=(FakeProcess(pid),)) for at, pid in enumerate(pids)))
    state = NodeState(inventory)
    holders = [make.container(of=f"train-{at}", id=ContainerId(f"{at:064x}")) for at in range(len(pids))]
    held = inventory.gpus[: len(pids)]
    state.ledger = make.ledger(*(make.entry_of(gpu.uuid, to=holder) for gpu, holder in zip(held, holders, strict=True)))
    controller = UsageController(DriverSettings(root=str(folder)), state)
    async with running(controller.run()):
        for _ in range(SETTLED):
            await controller.ask()
            await asyncio.sleep(1)
        [child] = set(_children()) - set(pids)
        began, before = time.process_time(), cpu_s(child)
        wall = time.monotonic()
        while (left_s := seconds - (time.monotonic() - wall)) > 0:
            await controller.ask()
            await asyncio.sleep(min(ASKED_EACH_S, left_s))
        took_s = time.monotonic() - wall
        ours, its = time.process_time() - began, cpu_s(child) - before
    assert len(controller.report().holders) == len(pids)
    return ours / took_s * 1e3, its / took_s * 1e3


def _children() -> Iterator[int]:
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())
