"""The record of the containerd part: docs/records/performance.json, and the tables of the pages made of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from bench import contenders
from bench.contenders import BARE, EIGHT, FLOOR, HOOKS, ONE, UNASKED
from bench.figures import Figure, Ratio, paired
from tests.support.records import filled

PROJECT: Final = Path(__file__).parents[1]
RECORD: Final = PROJECT / "docs" / "records" / "performance.json"
PAGES: Final = (PROJECT / "docs" / "performance.md", PROJECT / "README.md")
SCHEMA: Final = "nri-gpu/performance/v1"


class Measured(Struct, frozen=True):
    """One contender.

    nodes, mounts, hooks: that its container has beyond the bare one's. wall, cpu: create + start of one container,
    against bare, paired by round. started: containers created and started per second by `jobs` at once, likewise.
    The rest is what was measured: a number a round, the first of each in the same round.
    """

    name: str
    nodes: int
    mounts: int
    hooks: int
    wall: Ratio
    cpu: Ratio
    started: Ratio
    wall_ms: Sequence[float]
    cpu_ms: Sequence[float]
    started_per_second: Sequence[float]

    @property
    def shown(self) -> str:
        """Its name, with what its container has."""
        counts = {"nodes": self.nodes, "mounts": self.mounts, "hooks": self.hooks}
        more = ", ".join(
            f"{number} {what.removesuffix('s' * (number == 1))}" for what, number in counts.items() if number
        )
        return f"{self.name} ({more})" if more else self.name


class LeftOut(Struct, frozen=True):
    """A contender that was not at hand. how: the option of `python -m bench` that names it, and what that wants."""

    name: str
    how: str


class Record(Struct, frozen=True):
    """One run. date: ISO. rounds: of create + start; fewer of `started`.

    machine: by name, versions and the load of others too. share_percent: of CreateContainer in create + start, 8 GPUs.
    """

    date: str
    took_s: float
    machine: Mapping[str, str]
    rounds: int
    jobs: int
    share_percent: float
    contenders: Sequence[Measured]
    left_out: Sequence[LeftOut] = ()
    schema: str = SCHEMA

    def __getitem__(self, name: str) -> Measured:
        return next(each for each in self.contenders if each.name == name)

    def has(self, *names: str) -> bool:
        return {each.name for each in self.contenders}.issuperset(names)


class Comparison(Struct, frozen=True):
    """Two contenders, and the budget of what the first costs against the second. of: a field of Measured.

    must, aim: at most; where more is better, at least.
    """

    ours: str
    theirs: str
    of: str = "wall_ms"
    must: float | None = None
    aim: float | None = None

    @property
    def more_is_better(self) -> bool:
        return self.of == "started_per_second"

    def ratio(self, record: Record) -> Ratio:
        values = attrgetter(self.of)
        return paired(values(record[self.ours]), values(record[self.theirs]))

    def mark(self, value: float) -> str:
        """As the page says it; empty without a budget."""
        if self.must is None or self.aim is None:
            return ""
        reached = [value >= each if self.more_is_better else value <= each for each in (self.must, self.aim)]
        word = "aim met" if reached[1] else "met" if reached[0] else "**not met**"
        return f"must {self.must:.2f}, aim {self.aim:.2f}: {word}"


COMPARED: Final = (
    Comparison(ONE, BARE, must=1.13, aim=1.09),
    Comparison(EIGHT, BARE, must=1.15, aim=1.10),
    Comparison(EIGHT, FLOOR, must=1.03, aim=1.00),
    Comparison(EIGHT, contenders.SAME),
    Comparison(EIGHT, HOOKS, must=0.53, aim=0.50),
    Comparison(EIGHT, HOOKS, "cpu_ms", 0.53, 0.50),
    Comparison(EIGHT, HOOKS, "started_per_second", 1.8, 2.0),
    Comparison(contenders.NOTHING, HOOKS),
    Comparison(EIGHT, contenders.GO_INJECTOR),
    Comparison(EIGHT, contenders.RUNTIME_JIT),
    Comparison(UNASKED, contenders.GO_NOTHING, must=1.05, aim=1.02),
    Comparison(UNASKED, contenders.NOTHING, must=1.03, aim=1.00),
    Comparison(contenders.CLAIMED_ONE, ONE),
    Comparison(contenders.CLAIMED_EIGHT, EIGHT),
)
# Rows of the README, each with what it compares.
SUMMARY: Final = {
    "a container that asks for nothing": (Comparison(UNASKED, BARE),),
    "a container with 1 GPU": (Comparison(ONE, BARE),),
    "a container with 8 GPUs": (Comparison(EIGHT, BARE),),
    "any container, beside an NRI plugin that does nothing, in Python / in Go": (
        Comparison(contenders.NOTHING, BARE),
        Comparison(contenders.GO_NOTHING, BARE),
    ),
}
MACHINE: Final = ("cores", "containerd", "NVIDIA's toolkit")
WIDTH: Final = 120
AGAINST_HOOKS: Final = tuple(Comparison(EIGHT, HOOKS, of) for of in ("wall_ms", "cpu_ms", "started_per_second"))
SHARE: Final = (3.0, 2.0)  # percent, must and aim
OF: Final = {"wall_ms": "create + start", "cpu_ms": "CPU", "started_per_second": "started per second"}


def compared(record: Record) -> Iterator[tuple[Comparison, Ratio]]:
    """Those whose contenders both took part."""
    yield from ((each, each.ratio(record)) for each in COMPARED if record.has(each.ours, each.theirs))


def lines(record: Record) -> Iterator[str]:
    """For a terminal."""
    for each in record.contenders:
        note = f"±{each.wall.spread:.2f}, CPU {each.cpu.median:.2f} ±{each.cpu.spread:.2f}"
        note += f", started {each.started.median:.2f} ±{each.started.spread:.2f}"
        yield Figure(each.shown, each.wall.median, "x", note=note).line()
    yield ""
    for pair, ratio in compared(record):
        name = f"{pair.ours} / {pair.theirs}, {OF[pair.of]}"
        yield f"{name:<100} {ratio.median:.2f} ±{ratio.spread:.2f}  {pair.mark(ratio.median)}".rstrip()
    yield Figure("CreateContainer's share of create + start, 8 GPUs", record.share_percent, "%", *SHARE).line()
    yield from (f"Left out: {each.name}: {each.how}" for each in record.left_out)


def rendered(text: str, record: Record) -> str:
    """The page with the record's tables in it."""
    tables = {"contenders": _contenders, "budget": _budget, "summary": _summary, "figure": _figure}
    return filled(text, lambda name: "\n".join(tables[name](record)) + "\n")


def shown(ratio: Ratio) -> str:
    """In a cell that is not broken in two."""
    return f"{ratio.median:.2f}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{ratio.spread:.2f}"


def _contenders(record: Record) -> Iterator[str]:
    machine = ", ".join(f"{what} {value}" for what, value in record.machine.items())
    yield f"Run on {record.date}, {record.rounds} rounds in {record.took_s / 60:.0f} min;\n{machine}."
    yield ""
    yield f"| contender | create + start | CPU | started per second by {record.jobs} at once |"
    yield "|---|---|---|---|"
    for each in record.contenders:
        ratios = map(shown, (each.wall, each.cpu, each.started))
        name = f"**{each.shown}**" if each.name == EIGHT else each.shown
        yield f"| {name} | {' | '.join(ratios if each.name != BARE else ('1', '1', '1'))} |"
    yield from (f"\nLeft out: {each.name}: {each.how}." for each in record.left_out)


def _budget(record: Record) -> Iterator[str]:
    yield "| ours | against | what | ratio | budget |"
    yield "|---|---|---|---|---|"
    for pair, ratio in compared(record):
        cells = (pair.ours, pair.theirs, OF[pair.of], shown(ratio), pair.mark(ratio.median))
        yield f"| {' | '.join(cells)} |"
    share = Comparison("", "", must=SHARE[0], aim=SHARE[1]).mark(record.share_percent)
    yield f"| {EIGHT} | create + start | CreateContainer's share | {record.share_percent:.1f} % | {share} |"


def _summary(record: Record) -> Iterator[str]:
    yield "| create + start of | against one without a GPU, NRI switched off |"
    yield "|---|---|"
    for row, pairs in SUMMARY.items():
        if all(record.has(pair.ours, pair.theirs) for pair in pairs):
            ratios = [pair.ratio(record) for pair in pairs]
            yield f"| {row} | {' / '.join(map(shown, ratios))} |"


def _figure(record: Record) -> Iterator[str]:
    """Yield the sentence that says in a reader's terms what is gained."""
    if not record.has(EIGHT, HOOKS):
        return
    wall, cpu, started = (pair.ratio(record).median for pair in AGAINST_HOOKS)
    machine = [f"{what} {record.machine[what]}" for what in MACHINE if what in record.machine]
    text = (
        f"**8 GPUs: create + start in {wall:.2f} of the time of CDI with NVIDIA's hooks**, in {cpu:.2f} of the CPU "
        f"time, and {started:.1f} times as many containers started per second. {record.rounds} rounds with simulated "
        f"GPUs on {record.date[:10]}: {', '.join(machine)}."
    )
    if record.has(EIGHT, contenders.GO_INJECTOR):
        beside = Comparison(EIGHT, contenders.GO_INJECTOR).ratio(record)
        text += f" What is saved are the hooks: beside a plugin in Go that injects without them it is {shown(beside)}."
    yield from textwrap.wrap(text, WIDTH)


def read(path: Path = RECORD) -> Record:
    """Raises: OSError; msgspec.ValidationError."""
    return msgspec.json.decode(path.read_bytes(), type=Record)


def write(record: Record, path: Path = RECORD) -> None:
    """A line for each contender, so that a new run is a change one can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.encode(record).decode()
    for start in ('"contenders":[', '"left_out":['):
        text = text.replace(start, f"\n{start}\n")
    path.write_text(text.replace('},{"name"', '},\n{"name"') + "\n")
