"""`make bench`: what it costs, beside the budget. Prints a table; never fails, because machines differ.

Latencies are ratios to a plugin that does nothing, in the same run and in turns: a busy machine is busy for both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.process import Running, daemon, nothing
from bench.requests import REQUEST_BYTES, life, node

SAMPLES: Final = 4000
BATCH: Final = 50  # of one contender, before it is the other's turn
WARM_UP: Final = 300
STARTS: Final = 7
IDLE_S: Final = 10.0
SYNCHRONIZED: Final = 5000  # containers


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. must, aim: at most; None where the budget names none."""

    name: str
    value: float
    unit: str
    must: float | None = None
    aim: float | None = None

    def line(self) -> str:
        """The line, with its mark: `aim` is met, `ok` only what must be, `OVER` neither."""
        mark = ""
        if self.must is not None and self.aim is not None:
            mark = "aim" if self.value <= self.aim else "ok" if self.value <= self.must else "OVER"
        budget = "" if self.must is None else f"<= {self.must:g} (aim {self.aim:g})"
        return f"{self.name:<58} {self.value:>9.2f} {self.unit:<5} {budget:<22} {mark}"


@dataclass
class Contest:
    """Seconds per request of two plugins that take turns."""

    ours: list[float]
    theirs: list[float]

    def figures(self, name: str, must: tuple[float, float], aim: tuple[float, float]) -> Iterable[Figure]:
        """p50 and p99 as ratios, and what they are ratios of."""
        for percent, most, wish in zip((50, 99), must, aim, strict=True):
            ours, theirs = _percentile(self.ours, percent), _percentile(self.theirs, percent)
            yield Figure(f"{name}, p{percent}", ours * 1e6, "us")
            yield Figure("  the same, a plugin that does nothing", theirs * 1e6, "us")
            yield Figure("  ratio", ours / theirs, "x", most, wish)


def _percentile(samples: list[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def contest(ours: Running, theirs: Running, claim: str) -> Contest:
    """Both answer the same requests; each container is new, and gone again before the next."""
    found = Contest([], [])
    number = 0
    while len(found.ours) < SAMPLES + WARM_UP:
        for plugin, samples in ((ours, found.ours), (theirs, found.theirs)):
            for _ in range(BATCH):
                number += 1
                samples.append(one_life(plugin, number, claim))
    return Contest(found.ours[WARM_UP:], found.theirs[WARM_UP:])


def one_life(plugin: Running, number: int, claim: str) -> float:
    asked = life(number, claim)
    answer, took_s = plugin.link.call("CreateContainer", asked.create)
    if not answer.status.ok:
        raise RuntimeError(f"bench needs its grants: {answer.status}")
    plugin.link.call("StateChange", asked.remove)
    return took_s


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


def start_figures(folder: Path) -> Iterable[Figure]:
    """From exec to registered: the median of some starts, in turns."""
    for name, starter, budget in (("nri-gpu", daemon, (200.0, 110.0)), ("does nothing", nothing, (None, None))):
        took = []
        for number in range(STARTS):
            plugin = starter(folder, f"{name[:4]}-{number}")
            took.append(plugin.registered_s)
            plugin.stop()
        yield Figure(f"exec to registered, {name}", statistics.median(took) * 1e3, "ms", *budget)


def memory_figures(ours: Running, theirs: Running, moment: str) -> Iterable[Figure]:
    """Resident memory: RSS counts shared pages in full, PSS by their share."""
    rss, pss = ours.memory_mib()
    yield Figure(f"resident (RSS), {moment}", rss, "MiB", 35, 28)
    yield Figure("  the same as PSS", pss, "MiB")
    yield Figure("  RSS of a plugin that does nothing", theirs.memory_mib()[0], "MiB")


def idle_figures(ours: Running) -> Iterable[Figure]:
    """CPU while nobody asks anything."""
    before = ours.cpu_s()
    time.sleep(IDLE_S)
    yield Figure(f"CPU when idle, over {IDLE_S:.0f} s", (ours.cpu_s() - before) * 1e3 / IDLE_S, "ms/s", 0.5, 0.0)


def synchronize_figures(folder: Path) -> Iterable[Figure]:
    """A whole node at once, a tenth of it with annotations; half the runtime's 2 s is the most it may take."""
    parts = node(SYNCHRONIZED, asking=SYNCHRONIZED // 10)
    for name, starter, budget in (("nri-gpu", daemon, (1000.0, 100.0)), ("does nothing", nothing, (None, None))):
        plugin = starter(folder, f"sync-{name[:3]}")
        time.sleep(0.5)
        took_s = sum(plugin.link.call("Synchronize", part)[1] for part in parts)
        plugin.stop()
        yield Figure(f"Synchronize, {SYNCHRONIZED} containers, {name}", took_s * 1e3, "ms", *budget)


def everything(folder: Path) -> Iterable[Figure]:
    """All figures, as they are found."""
    yield from start_figures(folder)
    ours, theirs = daemon(folder), nothing(folder)
    when_ready(ours)
    yield from memory_figures(ours, theirs, "when ready")
    yield from idle_figures(ours)
    yield from contest(ours, theirs, "all").figures("request to reply, 8-GPU grant", (1.6, 2.0), (1.2, 1.3))
    yield from contest(ours, theirs, "").figures("request to reply, no annotation", (1.05, 1.05), (0.9, 0.9))
    yield from memory_figures(ours, theirs, f"after {4 * (SAMPLES + WARM_UP)} requests")
    ours.stop()
    theirs.stop()
    yield from synchronize_figures(folder)


def main(show: Callable[[str], object] = print) -> None:
    show(f"nri-gpu, on a node with 8 GPUs (simulated); requests of {REQUEST_BYTES} bytes, back to back\n")
    with tempfile.TemporaryDirectory(prefix="nri-gpu-bench-") as folder:
        for figure in everything(Path(folder)):
            show(figure.line())


if __name__ == "__main__":
    main()
