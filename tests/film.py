"""The recording of `make demo`, docs/pictures/demo.svg: what it prints on a terminal, line by line.

tests/conformance/test_demo.py makes it of a real run, and compares it. It moves by CSS alone, so that it is shown as an
image; who asks for less motion sees the last frame.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from tests.pictures import COLUMNS, FOLDER, FORMAT, exported, words
from tests.support.terminal import Screen, on_terminal

NAME: Final = "demo.svg"
FILE: Final = FOLDER / NAME
ROWS: Final = 28
LINE: Final = 24.4  # pixels of rich's pictures
FRAME: Final = 48  # above and below the lines
PLAYS_S, REST_S = 20, 6  # the last frame stays
PAUSE: Final = 6  # a paragraph is read for as long as so many lines are printed
FIRST: Final = ROWS  # lines that are there from the beginning, so that no frame is empty
BACKGROUND: Final = SVG_EXPORT_THEME.background_color.hex
# Differs from run to run, or from machine to machine: times, the runtime, paths, and what cgroup v2 does not list.
VOLATILE: Final = re.compile(
    r"\[ *[\d.]+ s\]|containerd \d\S*|/tmp/\S+( \(\w+\))?|\b\d+s\b|device cgroup allows .*?(?=NVIDIA_VISIBLE)"
)


def demonstrated() -> Screen:
    """`make demo` on a terminal."""
    program = (sys.executable, "-u", "-m", "tests.demo")
    return on_terminal(columns=COLUMNS, environment={"HOME": os.environ.get("HOME", "/root")}, program=program)


def film(raw: str) -> str:
    """The picture of what a program wrote to a terminal."""
    lines = _lines(raw)
    shape = FORMAT.replace("{height}", f"{ROWS * LINE + FRAME + 1:g}").replace("{terminal_height}", f"{ROWS * LINE:g}")
    shape = shape.replace("{styles}", "{styles}" + _moving([str(line) for line in lines]))
    rolled, covered = max(0, len(lines) - ROWS) * LINE, len(lines) * LINE
    shape = shape.replace("{backgrounds}", f'<g class="roll" transform="translate(0, {-rolled:g})">{{backgrounds}}')
    cover = f'<rect class="cover" width="100%" height="{covered:g}" fill="{BACKGROUND}" '
    cover += f'transform="translate(0, {covered:g})"/>'
    shape = shape.replace("{matrix}\n    </g>", f"{{matrix}}</g>{cover}</g>")
    made = exported(NAME, "make demo", lambda console: console.print(Text("\n").join(lines)), shape)
    # The frame is as high as what is seen of the lines.
    return re.sub(r'(stroke-width="1" [^>]* height=")[^"]*', rf"\g<1>{ROWS * LINE + FRAME:g}", made, count=1)


def _lines(raw: str) -> list[Text]:
    """With their colours; the terminal wraps a line that is too long anywhere."""
    written = Text.from_ansi(raw.replace("\r", "").strip("\n")).split("\n", allow_blank=True)
    return [part for line in written for part in line.divide(range(COLUMNS, len(line), COLUMNS))]


def _moving(lines: Sequence[str]) -> str:
    """The style of what moves: `roll`, all lines, up; and `cover`, what hides the lines to come, down."""
    ends = [*accumulate(PAUSE if not line.strip() else 1 for line in lines[FIRST:])]
    scale = PLAYS_S / (PLAYS_S + REST_S) * 100 / ends[-1]
    moments = {0.0: FIRST, **{end * scale: number for number, end in enumerate(ends, FIRST + 1)}}
    places = {
        "roll": {at: min(0, ROWS - shown) for at, shown in moments.items()},
        "cover": moments,
    }
    style = "@media (prefers-reduced-motion: reduce) { .roll, .cover { animation: none !important } }\n"
    for name, by_moment in places.items():
        frames = (f"{at:.2f}% {{ transform: translateY({row * LINE:g}px) }}\n" for at, row in by_moment.items())
        style += f"@keyframes {name} {{\n{''.join(frames)}}}\n"
        style += f".{name} {{ animation: {name} {PLAYS_S + REST_S}s step-end infinite }}\n"
    return "\n" + style.replace("{", "{{").replace("}", "}}")  # a part of a format


def lasting(picture: str) -> str:
    """What one reads in it that is the same in each run."""
    return VOLATILE.sub("", " ".join(words(picture)))
