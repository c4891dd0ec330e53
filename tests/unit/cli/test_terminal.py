"""What a terminal shows: pages at every width against goldens, and real commands on a pty."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from nri_gpu.cli import terminal
from nri_gpu.cli.page import Column, Grid, Line, Page, Tone, plain
from nri_gpu.cli.render import gpus_page, of_trouble
from nri_gpu.cli.status_page import counted, status_page
from nri_gpu.cli.verify_command import verify_page
from nri_gpu.cli.watch import WatchMoment, live_page
from nri_gpu.daemon.view import status_of
from nri_gpu.domain.errors import Exit
from nri_gpu.inventory.topology_file import load_topology
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS
from tests.support.goldens import compare
from tests.support.terminal import on_terminal
from tests.support.views import NOW, view
from tests.unit.cli.printed import CHECKED, COMMANDS, GOLDENS, GRANTED, LOST, MIG, WHY, node_in_trouble, unstyled


def pages(*, piped: bool = False) -> dict[str, Page]:
    return {
        "status": status_page(node_in_trouble(), NOW, glance=not piped),
        "watch": live_page(WatchMoment(NOW, ({}, node_in_trouble()), "", None, (LOST, GRANTED))),
        "gpus": gpus_page(load_topology(MIG)),
        "verify": verify_page(CHECKED, make.inventory()),
    }


def drawn(page: Page, width: int) -> str:
    written = io.StringIO()
    terminal.show(page, Console(file=written, width=width, force_terminal=True, color_system="standard"))
    return written.getvalue()


CASES = [(name, width) for name in pages() for width in (80, 200)]


@pytest.mark.parametrize(("name", "width"), CASES)
def test_pages_against_goldens(name: str, width: int) -> None:
    compare(GOLDENS / f"{name}-{width}.txt", unstyled(drawn(pages()[name], width)))


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_against_goldens(name: str, width: int) -> None:
    screen = on_terminal(*COMMANDS[name], columns=width)
    compare(GOLDENS / f"{name}-{width}.txt", "\n".join(screen.lines) + "\n")
    assert "\x1b[1;31m" in screen.colours


@pytest.mark.parametrize("name", pages())
def test_a_pipe_gets_the_page_unfolded(name: str) -> None:
    compare(GOLDENS / f"{name}-piped.txt", plain(pages(piped=True)[name]) + "\n")


@pytest.mark.parametrize("name", pages())
@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_no_width_loses_a_word_or_breaks_a_line(name: str, width: int) -> None:
    page = pages()[name]
    shown = unstyled(drawn(page, width))
    assert all(len(line) <= width for line in shown.splitlines())
    joined = "".join(shown.split())
    for part in page:
        words = part.text.split() if isinstance(part, Line) else [str(cell) for row in part.rows for cell in row]
        for word in words:
            # A cell that was folded stands in pieces between other cells; its beginning is whole.
            assert "".join(word.split())[: 8 if width < 60 else None] in joined or word == "-"


def test_what_a_terminal_would_obey_is_shown_as_a_question_mark() -> None:
    evil = "\x1b]0;owned\x07\x1b[2Jpod"
    shown = drawn([Grid((Column("POD"), Column("WHY")), ((evil, "[bold]x[/]"),)), Line(evil)], 80)
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert shown.count("?]0;owned??[2Jpod") == 2
    assert "[bold]x[/]" in shown


def test_a_pipe_may_end_in_a_terminal_too() -> None:
    """As that of `kubectl exec` does; and a name cannot make a line of its own."""
    evil = "\x1b[2Jpod\nGPU"
    shown = plain([Grid((Column("POD"), Column("WHY")), ((evil, Line("\u00fcber\u202e")),)), Line(evil)])
    assert shown == "POD          WHY\n?[2Jpod?GPU  \u00fcber?\n?[2Jpod?GPU"


def test_colour_tells_troubles_apart() -> None:
    assert (of_trouble(WHY), of_trouble("it is in MIG mode")) == (Tone.BAD, Tone.PLAIN)


def test_the_glance_counts_each_gpu_once() -> None:
    assert counted(node_in_trouble()) == "4 GPUs: 2 held, 1 free, 1 unavailable"
    mig = status_of(view(node=make.node([make.mig_gpu(0), make.gpu(1)])))
    assert counted(mig) == "3 GPUs and MIG devices: 0 held, 3 free, 0 unavailable"
    away = replace(node_in_trouble(), gpus=())
    assert plain(status_page(away, NOW, glance=True)).splitlines()[1:4] == [
        "0 GPUs: 0 held, 0 free, 0 unavailable",
        "not connected to the runtime: gone",
        "no GPUs",
    ]


# --- real commands ----------------------------------------------------------------------------------------------------

GPUS = ("gpus", "--gpus", FOUR_GPUS)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_real_terminal(columns: int) -> None:
    """No locale either."""
    screen = on_terminal(*GPUS, columns=columns, environment={"LC_ALL": "C"})
    assert (screen.code, max(map(len, screen.lines)) <= columns) == (Exit.OK, True)
    assert "\x1b[32m" in screen.colours
    assert screen.lines[0].startswith("SIMULATED: 4 GPUs, driver 580.95.05")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_colour_is_not_wanted(environment: dict[str, str]) -> None:
    screen = on_terminal(*GPUS, environment=environment)
    assert not screen.colours - {"\x1b[0m", "\x1b[1m", "\x1b[2m"}  # bold and dim are no colours
    assert screen.lines[0].startswith("SIMULATED: 4 GPUs")


def test_json_is_the_same_on_a_terminal() -> None:
    screen = on_terminal(*GPUS, "-o", "json")
    assert not screen.colours
    assert screen.lines[0] == "{"
