"""The plugin alone, over the real wire: latencies are ratios to a plugin that does nothing, in the same run, in turns.

A busy machine is then busy for both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import metrics, usage, warm
from bench.effort import Effort
from bench.figures import Figure, percentile
from bench.kubelet import Pair
from bench.process import CHILDREN, Running, daemon, nothing, nvml_daemon
from bench.requests import REQUEST_BYTES, life, node
from nri_gpu.policy.plugin_settings import REQUEST_BYTES as REQUEST_LIMIT_BYTES
from tests.support import hostile

TITLE: Final = f"The plugin alone; 8 GPUs (simulated), requests of {REQUEST_BYTES} bytes, back to back"
BATCH: Final = 50  # of one contender, before it is the other's turn
WORST_TRIES: Final = 3
NAMES: Final = ("inventory child", "event child")
CHILD: Final = ((24, 18), (24, 18))  # MiB, must and aim of inventory child and event child: ours, no reference has any


@dataclass
class Contest:
    """Seconds per request of two plugins that take turns."""

    ours: list[float]
    theirs: list[float]

    def figures(self, name: str) -> Iterator[Figure]:
        """p50 and p99, and their ratios. Without budget: what counts is the share of create + start (containerd.py)."""
        for percent in (50, 99):
            ours, theirs = percentile(self.ours, percent), percentile(self.theirs, percent)
            yield Figure(f"{name}, p{percent}", ours * 1e6, "us")
            yield Figure("  the same, a plugin that does nothing", theirs * 1e6, "us")
            yield Figure("  ratio", ours / theirs, "x")


def figures(effort: Effort) -> Iterator[Figure]:
    """All of this part, as they are found."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-bench-") as name:
        folder = Path(name)
        yield from _start_figures(folder, effort)
        ours, theirs = daemon(folder), nothing(folder)
        when_ready(ours)
        yield from _memory_figures(ours, theirs, "when ready")
        yield from _idle_figures(ours, effort)
        granted, plain = contest(ours, theirs, "all", effort), contest(ours, theirs, "", effort)
        yield from granted.figures("request to reply, 8-GPU grant")
        yield from plain.figures("request to reply, no annotation")
        yield from contest(ours, theirs, "all", effort, _post_start_s).figures("PostStartContainer, request to reply")
        yield _worst_figure(ours)
        yield from _memory_figures(ours, theirs, f"after {6 * (effort.requests + effort.warm_up)} requests")
        ours.stop()
        theirs.stop()
        yield from _nvml_figures(folder, effort)
        yield from warm.figures(folder, effort)
        yield from metrics.figures(folder, when_ready)
        yield from usage.figures(effort)
        yield from Pair(folder, when_ready).figures(effort)
        yield from _synchronize_figures(folder, effort)


def _one_life(plugin: Running, number: int, claim: str) -> float:
    asked = life(number, claim)
    answer, took_s = plugin.link.call("CreateContainer", asked.create)
    if not answer.status.ok:
        raise RuntimeError(f"bench needs its grants: {answer.status}")
    plugin.link.call("StateChange", asked.remove)
    return took_s


def _post_start_s(plugin: Running, number: int, claim: str) -> float:
    """Tell that a container runs, and return the seconds until the answer: they are part of each container's start."""
    asked = life(number, claim)
    plugin.link.call("CreateContainer", asked.create)
    _, took_s = plugin.link.call("StateChange", asked.post_start)
    plugin.link.call("StateChange", asked.remove)
    return took_s


def contest(
    ours: Running,
    theirs: Running,
    claim: str,
    effort: Effort,
    one_s: Callable[[Running, int, str], float] = _one_life,
) -> Contest:
    """Both answer the same requests; each container is new, and gone again before the next.

    one_s: makes the requests of one container and returns the seconds that count.
    """
    found = Contest([], [])
    number = 0
    while len(found.ours) < effort.requests + effort.warm_up:
        for plugin, samples in ((ours, found.ours), (theirs, found.theirs)):
            for _ in range(BATCH):
                number += 1
                samples.append(one_s(plugin, number, claim))
    return Contest(found.ours[effort.warm_up :], found.theirs[effort.warm_up :])


def reply_s(folder: Path, claim: str, count: int) -> float:
    """Seconds from request to reply: the median of `count` creations, of a daemon of its own."""
    plugin = daemon(folder, "reply")
    try:
        when_ready(plugin)
        return statistics.median(_one_life(plugin, number, claim) for number in range(count))
    finally:
        plugin.stop()


def when_ready(plugin: Running) -> None:
    """Synchronized, its node known and its files staged: until then it refuses."""
    plugin.link.call("Synchronize", b"")
    while True:
        asked = life(0, "all")
        answer, _ = plugin.link.call("CreateContainer", asked.create)
        plugin.link.call("StateChange", asked.remove)
        if answer.status.ok:
            return
        time.sleep(0.02)


def _start_figures(folder: Path, effort: Effort) -> Iterator[Figure]:
    """From exec to registered: the median of some starts, in turns."""
    for name, starter, budget in (("nri-gpu", daemon, (200.0, 110.0)), ("does nothing", nothing, (None, None))):
        took = []
        for number in range(effort.starts):
            plugin = starter(folder, f"{name[:4]}-{number}")
            took.append(plugin.registered_s)
            plugin.stop()
        yield Figure(f"exec to registered, {name}", statistics.median(took) * 1e3, "ms", *budget)


def _memory_figures(ours: Running, theirs: Running, moment: str) -> Iterator[Figure]:
    """Resident memory: RSS counts shared pages in full, PSS by their share."""
    rss, pss = ours.memory_mib()
    yield Figure(f"resident (RSS), {moment}", rss, "MiB", 35, 28)
    yield Figure("  the same as PSS", pss, "MiB")
    yield Figure("  RSS of a plugin that does nothing", theirs.memory_mib()[0], "MiB")


def _idle_figures(ours: Running, effort: Effort) -> Iterator[Figure]:
    """CPU while nobody asks anything, once what a start puts off is done."""
    time.sleep(effort.settle_s)
    before = ours.cpu_s()
    time.sleep(effort.idle_s)
    used_s = ours.cpu_s() - before
    yield Figure(f"CPU when idle, over {effort.idle_s:.1f} s", used_s * 1e3 / effort.idle_s, "ms/s", 0.5, 0.0)


def _nvml_figures(folder: Path, effort: Effort) -> Iterator[Figure]:
    """The same node through NVML: the daemon, and the two processes that have the driver's library.

    That library is made up and small: a driver's own comes on top of the children, and of no other.
    """
    plugin = nvml_daemon(folder)
    time.sleep(effort.settle_s)
    total = 0.0
    for name, child, budget in (("nri-gpu", "", (35, 28)), *zip(NAMES, CHILDREN, CHILD, strict=True)):
        rss, pss = plugin.memory_mib(child)
        total += pss
        yield Figure(f"resident (RSS) with NVML, {name}", rss, "MiB", *budget)
        yield Figure("  the same as PSS", pss, "MiB")
    yield Figure("  all three as PSS", total, "MiB")
    plugin.stop()


def _worst_figure(ours: Running) -> Figure:
    """The slowest of requests that are as large as policy lets them be, each hostile in another field."""
    took_s = {}
    for field in hostile.FIELDS:
        payload = hostile.request(field, REQUEST_LIMIT_BYTES)
        took_s[field] = min(ours.link.call("CreateContainer", payload)[1] for _ in range(WORST_TRIES))
    worst = max(took_s, key=took_s.__getitem__)
    return Figure("request to reply, the worst of 448 KiB", took_s[worst] * 1e3, "ms", 50.0, 20.0, note=worst)


def _synchronize_figures(folder: Path, effort: Effort) -> Iterator[Figure]:
    """A whole node at once, a tenth of it with annotations, within a fifth of the runtime's timeout of 2 s."""
    count = effort.synchronized
    parts = node(count, asking=count // 10)
    for name, starter, budget in (("nri-gpu", daemon, (400.0, 200.0)), ("does nothing", nothing, (None, None))):
        plugin = starter(folder, f"sync-{name[:3]}")
        time.sleep(0.5)
        took_s = sum(plugin.link.call("Synchronize", part)[1] for part in parts)
        plugin.stop()
        yield Figure(f"Synchronize, {count} containers, {name}", took_s * 1e3, "ms", *budget)
