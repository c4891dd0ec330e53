"""Plots of the records in docs/records, as docs/pictures/*.svg.

python -m docs.plots [--check]     --check: only tell whether they are of these records; draws nothing

A picture carries its record's SHA-256. Where a record has nothing to draw, that is said and there is no picture.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from bench import record as performance
from tests.reliability import result as reliability

PICTURES: Final = Path(__file__).parent / "pictures"
OURS, OTHERS = "#0072b2", "#999999"  # told apart by the colour-blind, and in print
WIDTH: Final = 8.0  # inches; 100 pixels each
SOAKS: Final = {"real": "real containerd, 8 at once", "wire": "scripted runtime, one at a time"}
# Label of an axis -> series of tests/reliability/soak.py that it shows.
SOAK_ROWS: Final = {
    "memory, KiB": ("rss kib", "pss kib"),
    "descriptors": ("descriptors",),
    "CreateContainer, ms": ("p50", "p99"),
}


def create_start(content: bytes) -> str | None:
    """Bars of create + start, and of containers started per second, each against bare, with their intervals."""
    record = msgspec.json.decode(content, type=performance.Record)
    if not record.contenders:
        return None
    from matplotlib.figure import Figure  # slow to load, and not needed to check

    shown = record.contenders[::-1]
    figure = Figure(figsize=(WIDTH, 1.2 + 0.42 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = [OURS if each.name.startswith("nri-gpu") else OTHERS for each in shown]
    names = [each.name for each in shown]
    for axes, ratios, title in (
        (left, [each.wall for each in shown], "create + start\nratio to bare, less is better"),
        (right, [each.started for each in shown], f"started per second, {record.jobs} at once\nratio, more is better"),
    ):
        axes.barh(names, [each.median for each in ratios], xerr=[each.spread for each in ratios], color=colours)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=10)
    left.tick_params(axis="y", labelsize=9)
    return _svg(figure)


def soak(content: bytes) -> str | None:
    """The soak's memory, descriptors and latency over its creations: on a real containerd, and on the wire alone."""
    part = msgspec.json.decode(content, type=reliability.Record).parts.get(reliability.PartName.SOAK)
    if part is None or not part.series:
        return None
    from matplotlib.figure import Figure

    by_name = {series.name: series for series in part.series}
    figure = Figure(figsize=(WIDTH, 2.2 * len(SOAK_ROWS)), layout="constrained")
    for column, (kind, title) in zip(figure.subplots(len(SOAK_ROWS), 2, squeeze=False).T, SOAKS.items(), strict=True):
        for axes, (label, names) in zip(column, SOAK_ROWS.items(), strict=True):
            for name, colour in zip(names, (OURS, OTHERS), strict=False):
                if series := by_name.get(f"{kind} {name}"):
                    axes.plot(series.x, series.y, color=colour, linewidth=1.2, label=name.removesuffix(" kib"))
                    axes.set_xlabel(series.x_unit)
            axes.set_ylabel(label)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            if len(names) > 1 and axes.lines:
                axes.legend(fontsize=8)
        column[0].set_title(title, fontsize=10)
    return _svg(figure)


def _svg(figure: object) -> str:
    """Text stays text; the same figure makes the same bytes."""
    import matplotlib as mpl

    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nri-gpu", "font.family": "sans-serif"}):
        figure.savefig(written, format="svg", metadata={"Date": None})  # type: ignore[attr-defined] # a Figure
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


PLOTS: Final[dict[str, tuple[Path, Callable[[bytes], str | None]]]] = {
    "create-start": (performance.RECORD, create_start),
    "soak": (reliability.RECORD, soak),
}


def _mark(content: bytes) -> str:
    return f"<!-- made of a record with SHA-256 {hashlib.sha256(content).hexdigest()} -->\n"


def stale(name: str) -> bool:
    """Whether the picture is of another record. One that never had anything to draw has no picture."""
    source, picture = PLOTS[name][0], PICTURES / f"{name}.svg"
    return picture.exists() and not picture.read_text("utf-8").endswith(_mark(source.read_bytes()))


def main() -> int:
    """Write or check. Returns an exit code."""
    if "--check" in sys.argv[1:]:
        old = [name for name in PLOTS if stale(name)]
        for name in old:
            print(f"docs/pictures/{name}.svg is of another record than {PLOTS[name][0].name}: run `make plots`")
        return bool(old)
    for name, (source, draw) in PLOTS.items():
        content = source.read_bytes()
        drawn = draw(content)
        if drawn is None:
            print(f"{source.name} has nothing to draw for {name} yet")
        else:
            (PICTURES / f"{name}.svg").write_text(drawn + _mark(content), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
