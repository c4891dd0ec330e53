"""Thousands of containers, one after the other: what the daemon uses must not grow with their number.

20,000 creations by a scripted runtime on the real wire, with starts, stops, removals, pods, refusals and a runtime that
comes anew now and then; and 2,000 on a real containerd. Samples are kept for the plots.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from bench.figures import percentile
from bench.link import Link
from bench.process import Running, daemon, memory_mib
from bench.requests import container_of
from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import Event
from tests.reliability.fit import Slope, slope
from tests.reliability.result import Fact, Found, Options, Row, Series
from tests.support import nri_messages as nri
from tests.support import packages
from tests.support.chaos import AT_ONCE, ChaosRun, chaos_run

WIRE, WIRE_QUICK = 20_000, 500
REAL, REAL_QUICK, REAL_ROUND = 2_000, 48, 100
EVERY: Final = 100  # creations between two samples on the wire
EACH: Final = 1_000  # creations of which latency is told
LIVE: Final = 24  # containers at once
NEW_RUNTIME: Final = 2_500  # creations until the runtime comes anew
WARM_UP: Final = 0.3  # of the samples: caches and the allocator's arenas fill up
# 128 bytes for each container. A ledger entry that stays behind would be some 1,000.
MOST_KIB_PER_1000: Final = 128.0
# Creations from which the slope of memory is judged. Caches, the allocator and the journal, which is first compacted
# after some 900 grants, fill up for the first 4,000; a shorter soak may end at most this high.
JUDGED: Final = 10_000
CEILING_MIB: Final = 44.0
TAIL: Final = 10  # samples at either end, of which the most descriptors are compared
CLAIMS: Final = ("1", "count=2", "device=3; mode=shared", "device=0", "none", "", "frobnicate", "count=99")
WEIGHTS: Final = (4, 2, 4, 2, 2, 5, 1, 1)


class Sample(Struct, frozen=True):
    """What the daemon uses after so many creations."""

    creations: int
    rss_kib: float
    pss_kib: float
    descriptors: int


def sample(creations: int, pid: int) -> Sample:
    rss, pss = memory_mib(pid)
    return Sample(creations, rss * 1024, pss * 1024, len([*Path(f"/proc/{pid}/fd").iterdir()]))


def found(options: Options) -> Iterator[Found]:
    """Rows and series of both. Raises: HarnessError: the machine cannot run a containerd."""
    if options.case in ("", "wire"):
        yield from _on_the_wire(WIRE_QUICK if options.quick else WIRE, options.seed)
    if options.case in ("", "real"):
        yield from _on_a_runtime(REAL_QUICK if options.quick else REAL, options.seed)


# ---- on the wire


class Alive(Struct, frozen=True):
    pod: pb.PodSandbox
    container: pb.Container


class WireSoak:
    """A scripted runtime, and what it has asked."""

    def __init__(self, plugin: Running, seed: int) -> None:
        self.plugin = plugin
        self.dice = random.Random(seed)
        self.alive: list[Alive] = []
        self.took_s: list[float] = []
        self.granted = self.refused = self.anew = 0

    def create(self, number: int) -> None:
        """One creation, with its pod; what it makes room for ends first."""
        if len(self.alive) >= LIVE:
            self._end(self.alive.pop(self.dice.randrange(LIVE)))
        claim = self.dice.choices(CLAIMS, WEIGHTS)[0]
        pod = nri.asking(claim, f"pod-{number:08}") if claim else nri.pod(f"pod-{number:08}")
        made = container_of(pod, number)
        self._tell(Event.RUN_POD_SANDBOX, pod)
        answer, took_s = self.plugin.link.call("CreateContainer", nri.create(pod, made))
        self.took_s.append(took_s)
        if not answer.status.ok:
            self.refused += 1
            self._tell(Event.REMOVE_POD_SANDBOX, pod)
            return
        made = nri.adjusted(made, pb.CreateContainerResponse.FromString(answer.payload))
        self.granted += 1
        if self.dice.random() < 0.95:  # the others are never started
            self._tell(Event.START_CONTAINER, pod, made)
        self.alive.append(Alive(pod, made))

    def come_anew(self) -> None:
        """The runtime was restarted: the plugin connects again, and is told of all there is."""
        self.plugin.reconnect()
        payloads = nri.synchronize(
            [each.pod for each in self.alive], [nri.running(each.container) for each in self.alive]
        )
        for payload in payloads:
            self.plugin.link.call("Synchronize", payload)
        self.anew += 1

    def _end(self, who: Alive) -> None:
        self._tell(Event.STOP_CONTAINER, who.pod, who.container)
        self._tell(Event.REMOVE_CONTAINER, who.pod, who.container)
        self._tell(Event.STOP_POD_SANDBOX, who.pod)
        self._tell(Event.REMOVE_POD_SANDBOX, who.pod)

    def _tell(self, kind: Event, pod: pb.PodSandbox, made: pb.Container | None = None) -> None:
        self.plugin.link.call(*nri.event(kind, pod, made))


def _on_the_wire(creations: int, seed: int) -> Iterator[Found]:
    with tempfile.TemporaryDirectory(prefix="nri-gpu-soak-") as name:
        plugin = daemon(Path(name))
        try:
            soak, samples = WireSoak(plugin, seed), list[Sample]()
            _until_staged(plugin.link)
            for number in range(1, creations + 1):
                soak.create(number)
                if number % NEW_RUNTIME == 0:
                    soak.come_anew()
                if number % EVERY == 0:
                    samples.append(sample(number, plugin.pid))
        finally:
            plugin.stop()
    what = "containers created, started, stopped and removed by a scripted runtime that came anew now and then"
    told = f"{soak.granted:,} granted or passed, {soak.refused:,} refused, runtime anew {soak.anew} times"
    yield from _findings("wire", what, told, samples, soak.took_s, creations)


def _until_staged(link: Link) -> None:
    link.call("Synchronize", b"")
    pod = nri.asking("1", "first")
    made = container_of(pod, 0)
    while not link.call("CreateContainer", nri.create(pod, made))[0].status.ok:
        pass
    link.call(*nri.event(Event.REMOVE_CONTAINER, pod, made))


# ---- on a real runtime


def _on_a_runtime(creations: int, seed: int) -> Iterator[Found]:
    runtime = packages.fetch(packages.available()[-1])
    yield Fact("containerd", runtime.release.partition("+")[0])
    with tempfile.TemporaryDirectory(prefix="nri-gpu-soak-") as name, chaos_run(runtime, Path(name), seed) as run:
        samples = list[Sample]()
        while len(run.took_s) < creations:
            run.create_while(min(REAL_ROUND, creations), _sampling(run, samples))
            run.settle()
            run.end_pods()
            run.settle()
        run.evidence.verify()
        happened, checked = run.tally.happened, run.tally.checked
    told = (
        f"{checked['programs that ran with a GPU']:,} ran with exactly what they asked for, "
        f"{sum(often for what, often in happened.items() if 'refused' in what):,} refused; "
        f"ledger and kernel agreed {checked['times that ledger and kernel agreed']} times"
    )
    what = f"containers on a real containerd, {AT_ONCE} at once"
    yield from _findings("real", what, told, samples, run.took_s, len(run.took_s))


def _sampling(run: ChaosRun, samples: list[Sample]) -> Callable[[float], None]:
    def take(_: float) -> None:
        samples.append(sample(len(run.took_s), run.daemon.pid))
        time.sleep(0.5)

    return take


# ---- both


def _findings(
    name: str, what: str, told: str, samples: Sequence[Sample], took_s: Sequence[float], creations: int
) -> Iterator[Found]:
    """The row, and the series behind it."""
    warm = samples[round(len(samples) * WARM_UP) :]
    memory = _slope(warm, lambda each: each.rss_kib)
    unique = _slope(warm, lambda each: each.pss_kib)
    descriptors = _slope(warm, lambda each: each.descriptors)
    first, last = percentile(took_s[: len(took_s) // 4], 50), percentile(took_s[-len(took_s) // 4 :], 50)
    open_now = [each.descriptors for each in warm]
    if creations >= JUDGED:
        limit = f"at most {MOST_KIB_PER_1000:.0f}"
        grows = memory.per_1000 - memory.spread > MOST_KIB_PER_1000
    else:
        limit = f"still filling caches; at most {CEILING_MIB:.0f} MiB"
        grows = warm[-1].rss_kib / 1024 > CEILING_MIB
    passed = not grows and max(open_now[-TAIL:]) <= max(open_now[:TAIL])
    yield Row(
        what=what,
        count=creations,
        unit="creations",
        outcome=f"{told}; RSS {warm[0].rss_kib / 1024:.1f} MiB after warming up, {warm[-1].rss_kib / 1024:.1f} MiB at "
        f"the end: {memory} KiB per 1,000 ({limit}), PSS {unique}; descriptors "
        f"{min(open_now)} to {max(open_now)}, {descriptors} per 1,000; "
        f"median of CreateContainer {first * 1e3:.2f} ms in the first quarter, {last * 1e3:.2f} ms in the last",
        command=f"python -m tests.reliability --only soak --case {name}",
        passed=passed,
        numbers={
            "rss_kib_per_1000": memory.per_1000,
            "rss_kib_per_1000_spread": memory.spread,
            "pss_kib_per_1000": unique.per_1000,
            "descriptors_per_1000": descriptors.per_1000,
            "p50_ms": statistics.median(took_s) * 1e3,
            "p99_ms": percentile(took_s, 99) * 1e3,
        },
    )
    yield from _series(name, samples)
    yield from _latency(name, took_s)


def _slope(samples: Sequence[Sample], of: Callable[[Sample], float]) -> Slope:
    return slope([each.creations for each in samples], [of(each) for each in samples])


def _series(name: str, samples: Sequence[Sample]) -> Iterator[Series]:
    for field, unit in {"rss_kib": "KiB", "pss_kib": "KiB", "descriptors": "descriptors"}.items():
        yield Series(
            f"{name} {field.replace('_', ' ')}",
            "creations",
            unit,
            [each.creations for each in samples],
            [round(getattr(each, field), 1) for each in samples],
        )


def _latency(name: str, took_s: Sequence[float]) -> Iterator[Series]:
    """Of each thousand, or of each tenth where there are few."""
    step = max(2, min(EACH, len(took_s) // 10))
    ends = range(step, len(took_s) + 1, step)
    for percent in (50, 99):
        each = [round(percentile(took_s[end - step : end], percent) * 1e3, 3) for end in ends]
        yield Series(f"{name} p{percent}", "creations", "ms", [float(end) for end in ends], each)
