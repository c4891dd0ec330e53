"""Plots of the records in docs/records, as docs/pictures/*.svg. A record that has nothing to draw has no picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from bench import record as performance
from tests.reliability import result as reliability
from tools.files import ROOT, Drawn, Files, picture
from tools.svg_theme import with_dark_colours

PICTURES: Final = ROOT / "docs" / "pictures"
OURS, OTHERS = "#0072b2", "#999999"  # told apart by the colour-blind, and in print
WIDTH: Final = 8.0  # inches; 100 pixels each
SOAKS: Final = {"real": "real containerd, 8 at once", "wire": "scripted runtime, one at a time"}
# Label of an axis -> series of tests/reliability/soak.py that it shows.
SOAK_ROWS: Final = {
    "memory, KiB": ("rss kib", "pss kib"),
    "descriptors": ("descriptors",),
    "CreateContainer, ms": ("p50", "p99"),
}


def create_start(record: performance.Record) -> str:
    """Draw bars of create + start, and of containers started per second, each against bare, with their intervals."""
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


def soak(series: Sequence[reliability.Series]) -> str:
    """Draw memory, descriptors and latency over creations: on a real containerd, and on the wire alone."""
    from matplotlib.figure import Figure

    by_name = {each.name: each for each in series}
    figure = Figure(figsize=(WIDTH, 2.2 * len(SOAK_ROWS)), layout="constrained")
    for column, (kind, title) in zip(figure.subplots(len(SOAK_ROWS), 2, squeeze=False).T, SOAKS.items(), strict=True):
        for axes, (label, names) in zip(column, SOAK_ROWS.items(), strict=True):
            for name, colour in zip(names, (OURS, OTHERS), strict=False):
                if line := by_name.get(f"{kind} {name}"):
                    axes.plot(line.x, line.y, color=colour, linewidth=1.2, label=name.removesuffix(" kib"))
                    axes.set_xlabel(line.x_unit)
            axes.set_ylabel(label)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            if len(names) > 1 and axes.lines:
                axes.legend(fontsize=8, frameon=False)
        column[0].set_title(title, fontsize=10)
    return _svg(figure)


def _svg(figure: object) -> str:
    """Write a figure as SVG: text stays text, and the same figure makes the same bytes."""
    import matplotlib as mpl

    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nri-gpu", "font.family": "sans-serif"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})  # type: ignore[attr-defined] # a Figure
    return with_dark_colours("".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines()))


def plots() -> Files:
    """Return the pictures of the records that have something to draw."""
    made: dict[str, Drawn] = {}
    content = performance.RECORD.read_bytes()
    record = msgspec.json.decode(content, type=performance.Record)
    if record.contenders:
        made["create-start"] = picture(content, partial(create_start, record))
    content = reliability.RECORD.read_bytes()
    part = msgspec.json.decode(content, type=reliability.Record).parts.get(reliability.PartName.SOAK)
    if part and part.series:
        made["soak"] = picture(content, partial(soak, part.series))
    return {PICTURES / f"{name}.svg": drawn for name, drawn in made.items()}
