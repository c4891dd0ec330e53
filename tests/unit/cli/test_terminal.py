"""What a terminal shows: pages at every width against goldens, and real commands on a pty."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from rich.console import Console

from nri_gpu.cli import terminal
from nri_gpu.cli.blockers_command import blockers_page
from nri_gpu.cli.page import Column, Grid, Line, Page, Tone, plain
from nri_gpu.cli.render import Times, gpus_page, of_trouble
from nri_gpu.cli.status_page import counted, status_page
from nri_gpu.cli.status_table import short_models
from nri_gpu.cli.verify_command import verify_page
from nri_gpu.cli.watch import WatchMoment, live_page
from nri_gpu.daemon.view import status_of
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.policy.read import parse_policy
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS
from tests.support.goldens import compare
from tests.support.terminal import on_terminal
from tests.support.views import NOW, OTHER, TRAIN, view
from tests.unit.cli.conftest import daemon
from tests.unit.cli.printed import (
    CHECKED,
    COMMANDS,
    GOLDENS,
    GRANTED,
    KEPT,
    LONG_POD,
    LOST,
    MIG,
    WHY,
    WIDTHS,
    busy_node,
    node_in_trouble,
    observed_node,
    unstyled,
)


def pages(*, piped: bool = False) -> dict[str, Page]:
    return {
        "status": status_page(node_in_trouble(), Times(NOW), glance=not piped),
        "busy": status_page(busy_node(), Times(NOW), glance=not piped),
        "observed": status_page(observed_node(), Times(NOW), glance=not piped),
        "observed-wide": status_page(observed_node(), Times(NOW, absolute=True), glance=not piped, wide=True),
        "wide": status_page(busy_node(), Times(NOW, absolute=True), glance=not piped, wide=True),
        "watch": live_page(WatchMoment(NOW, ({}, node_in_trouble()), "", None, (LOST, GRANTED))),
        "gpus": gpus_page(load_topology(MIG)),
        "verify": verify_page(CHECKED, make.inventory()),
        "blockers": blockers_page(KEPT),
    }


def drawn(page: Page, width: int) -> str:
    written = io.StringIO()
    terminal.show(page, Console(file=written, width=width, force_terminal=True, color_system="standard"))
    return written.getvalue()


CASES = [(name, width) for name in pages() for width in WIDTHS]


@pytest.mark.parametrize(("name", "width"), CASES)
def test_pages_against_goldens(name: str, width: int) -> None:
    compare(GOLDENS / f"{name}-{width}.txt", unstyled(drawn(pages()[name], width)))


@pytest.mark.parametrize("name", pages())
def test_colours_against_goldens(name: str) -> None:
    """As on a dark terminal: what is wrong in bold red, what to look at in yellow."""
    compare(GOLDENS / f"{name}-dark.txt", drawn(pages()[name], 80).replace("\x1b", "^"))


@pytest.mark.parametrize("width", WIDTHS)
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
        if isinstance(part, Line):
            assert all(word in joined for word in part.text.split())
            continue
        for row in part.rows:
            for cell, column in zip(map(str, row), part.columns, strict=True):
                # A cell that was folded stands in pieces between other cells; its beginning is whole.
                word = "".join(cell.split())
                elided = column.name and word not in joined
                assert word[: 3 if elided else 5 if width < 60 else None] in joined or word == "-"
                assert not elided or part.whole or "longnamesareelided:" in joined


@pytest.mark.parametrize("width", [60, 80])
def test_each_part_of_a_table_has_gpu_and_holder_of_its_rows(width: int) -> None:
    """And a row that goes on has its GPU again, since the row above it may be left out."""
    (grid,) = (part for part in pages()["busy"] if isinstance(part, Grid))
    whole, *parts = unstyled(drawn([grid], width)).partition("long names")[0].strip().split("\n\n")
    assert parts
    assert [line[0] for line in whole.splitlines()] == ["G", "0", "1", " ", "2", "3"]
    for heads, *rows in map(str.splitlines, parts):
        assert re.match("GPU  HELD BY ", heads)
        assert all(re.match(r"\d +(?:ml/|- )", row) for row in rows)


@pytest.mark.parametrize(
    ("models", "short"),
    [
        (["NVIDIA H100 80GB HBM3"], ["H100 80GB"]),
        (["NVIDIA A100-SXM4-40GB"], ["A100-SXM4-40GB"]),
        (["NVIDIA A100 80GB PCIe", "NVIDIA H100 PCIe"], ["A100 80GB", "H100"]),
        (["NVIDIA H100 80GB HBM3", "NVIDIA L4"], ["H100 80GB HBM3", "L4"]),
        (["NVIDIA RTX PRO 6000 Blackwell Server Edition"], ["RTX PRO 6000"]),
        (["Tesla T4"], ["Tesla T4"]),
        ([""], [""]),
        ([], []),
    ],
)
def test_what_all_models_share_is_left_out_but_not_the_models_own_word(models: list[str], short: list[str]) -> None:
    assert [*short_models(models).values()] == short


@pytest.mark.parametrize(
    ("text", "width", "sign", "shown"),
    [
        ("ml/train-worker-0", 17, "\u2026", "ml/train-worker-0"),
        ("ml/train-worker-0", 12, "\u2026", "ml/tra\u2026ker-0"),
        ("ml/train-worker-0", 12, "...", "ml/tr...er-0"),
        ("ml/train-worker-0", 2, "\u2026", "m\u2026"),
        ("ml/train-worker-0", 1, "...", "m"),
    ],
)
def test_a_long_name_keeps_beginning_and_end(text: str, width: int, sign: str, shown: str) -> None:
    assert terminal.elide(text, width, sign) == shown


@pytest.mark.parametrize(("encoding", "sign"), [("utf-8", "\u2026"), ("iso8859-1", "..."), ("ascii", "...")])
def test_the_sign_is_one_that_the_locale_has(encoding: str, sign: str) -> None:
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding=encoding) as file:
        terminal.show(pages()["busy"], Console(file=file, width=80))
        file.flush()
        shown = written.getvalue().decode(encoding)
    assert f"{sign}" in next(line for line in shown.splitlines() if line.startswith("0 "))


def test_five_hundred_holders_are_rows_in_a_moment() -> None:
    entries = [make.entry(0, to=make.container(of=f"{LONG_POD}-{at}"), mode=Mode.SHARED) for at in range(500)]
    page = status_page(status_of(view(make.ledger(*entries))), Times(NOW), glance=True)
    began = time.process_time()
    shown = drawn(page, 80)
    assert time.process_time() - began < 2.0
    assert all(f"-{at} " in shown for at in range(500))


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


def test_what_is_offered_to_nobody_is_not_free() -> None:
    """But what is held counts as held, and an older daemon's GPUs, of which it does not say, as free."""
    policy = parse_policy({"pool": [{"name": "kept", "device": ["0", "1", "2"]}]}, "p.toml")
    held = status_of(view(make.ledger(make.entry(1, to=TRAIN)), settings=policy))
    assert counted(held) == "4 GPUs: 1 held, 1 free, 0 unavailable, 2 offered to nobody"
    older = replace(held, gpus=tuple(replace(gpu, offered_to=None) for gpu in held.gpus))
    assert counted(older) == "4 GPUs: 1 held, 3 free, 0 unavailable"


def test_pools_have_a_column_where_the_policy_has_some() -> None:
    mig = make.node([make.gpu(0), make.mig_gpu(1, ("1g.5gb",))])
    policy = parse_policy({"pool": [{"name": "small", "mig": ["1g.5gb"]}]}, "p.toml")
    shared = [make.entry(0, to=each, mode=Mode.SHARED) for each in (TRAIN, OTHER)]
    status = status_of(view(make.ledger(*shared), mig, settings=policy))

    def column(page: Page) -> list[str]:
        grid = next(each for each in page if isinstance(each, Grid))
        at = [each.head for each in grid.columns].index("POOL")
        return [str(row[at]) for row in grid.rows]

    assert column(status_page(status, Times(NOW))) == ["-", "", "-", "small"]  # without one: a GPU's second holder
    assert column(gpus_page(mig.inventory, status)) == ["-", "-", "small"]
    without = status_of(view())
    for page in (status_page(without, Times(NOW)), gpus_page(mig.inventory), gpus_page(mig.inventory, without)):
        assert "POOL" not in plain(page)


def test_the_glance_counts_each_gpu_once() -> None:
    assert counted(node_in_trouble()) == "4 GPUs: 2 held, 1 free, 1 unavailable"
    mig = status_of(view(node=make.node([make.mig_gpu(0), make.gpu(1)])))
    assert counted(mig) == "3 GPUs and MIG devices: 0 held, 3 free, 0 unavailable"
    away = replace(node_in_trouble(), gpus=())
    assert plain(status_page(away, Times(NOW), glance=True)).splitlines()[1:4] == [
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


@pytest.mark.parametrize(("locale", "sign"), [("C", "..."), ("C.UTF-8", "\u2026")])
def test_the_sign_of_a_real_terminal_without_utf_8(tmp_path: Path, locale: str, sign: str) -> None:
    with daemon(tmp_path, json.dumps(to_builtins(busy_node())).encode()) as state:
        screen = on_terminal("status", "--state-dir", state, environment={"LC_ALL": locale})
    assert screen.code == Exit.OK
    row = next(line for line in screen.lines if line.startswith("0 "))
    assert re.search(rf"ml/train[-x]*{re.escape(sign)}[-x7c9d]*worker-0 ", row)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_colour_is_not_wanted(environment: dict[str, str]) -> None:
    screen = on_terminal(*GPUS, environment=environment)
    assert not screen.colours - {"\x1b[0m", "\x1b[1m", "\x1b[2m"}  # bold and dim are no colours
    assert screen.lines[0].startswith("SIMULATED: 4 GPUs")


def test_json_is_the_same_on_a_terminal() -> None:
    screen = on_terminal(*GPUS, "-o", "json")
    assert not screen.colours
    assert screen.lines[0] == "{"
