"""What verbs print against goldens: into a pipe, on terminals of three widths, and for programs.

The pages of `status` and `verify`, whose text has the time in it, are in test_terminal.py.
`make generate WHAT=goldens` writes the goldens again.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nri_gpu.cli import prepare_command
from nri_gpu.cli.page import json_text
from nri_gpu.cli.watch import WatchLine
from nri_gpu.doctor.examine import to_text
from nri_gpu.domain.errors import Exit
from nri_gpu.host.kernel_view import HostFolders
from tests.support.driver_root import make_driver_root
from tests.support.goldens import compare
from tests.support.schemas import conforming
from tests.support.views import NOW
from tests.unit.cli.conftest import NriGpuCall
from tests.unit.cli.printed import (
    CHECKED,
    COMMANDS,
    GOLDENS,
    GRANTED,
    KEPT,
    LOST,
    MIG,
    REPORT,
    ROOT,
    WIDTHS,
    node_in_trouble,
    record,
    spoil,
    unstyled,
)
from tests.unit.host.host_tree import host_below

pytestmark = pytest.mark.usefixtures("on_x86_64")
VERSION = "580.95.05"
VARYING = re.compile(rf"(?<={VERSION}-)[0-9a-f]{{8}}|(?<=/tmp/node-)\w{{8}}")  # a generation, and the folder


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the verbs run: most print no path of this machine then, and this one has always the same length."""
    with tempfile.TemporaryDirectory(prefix="node-", dir="/tmp") as made:
        monkeypatch.chdir(made)
        yield Path(made)


def driver(folder: Path) -> tuple[object, ...]:
    make_driver_root(folder / "root", VERSION)
    (folder / f"root/lib64/libnvidia-cfg.so.{VERSION}").chmod(0o777)
    (folder / f"root/lib64/libnvidia-newthing.so.{VERSION}").touch()
    return "driver", "--driver-root", folder / "root"


def on_a_host(folder: Path) -> tuple[object, ...]:
    """On the machine of the fixture below."""
    spoil(host_below(folder).loaded())
    return "prepare", "--dry-run"


def replay(folder: Path) -> tuple[object, ...]:
    record(folder / "audit.jsonl")
    (folder / "new.toml").write_text('[namespaces]\ndeny = ["ml"]\n')
    return "replay", "audit.jsonl", "--policy", "new.toml"


VERBS: dict[str, tuple[Callable[[Path], tuple[object, ...]], Exit]] = {
    "check": (lambda _: COMMANDS["check"], Exit.CONFIGURATION),
    "driver": (driver, Exit.FINDING),
    "explain": (lambda _: COMMANDS["explain"], Exit.FINDING),
    "gpus": (lambda _: ("gpus", "--gpus", MIG), Exit.OK),
    "prepare": (on_a_host, Exit.FINDING),
    "replay": (replay, Exit.FINDING),
}
by_verb = pytest.mark.parametrize("verb", VERBS)
Printed = Callable[..., str]


@pytest.fixture
def printed(nri_gpu: NriGpuCall, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """What a verb prints, into a pipe or on a terminal of so many columns."""
    monkeypatch.setattr(
        prepare_command, "PLACES", HostFolders(**{name: folder / "host" / name for name in ("dev", "proc", "sys")})
    )

    def run(verb: str, *options: str, columns: int | None = None) -> str:
        of_verb, code = VERBS[verb]
        arguments = (*of_verb(folder), *options)
        if verb == "check":
            os.chdir(ROOT)  # which its file is named from
        screen = Screen()
        if columns is not None:
            monkeypatch.setattr(sys, "stdout", screen)
            monkeypatch.setenv("COLUMNS", str(columns))
            monkeypatch.setenv("TERM", "xterm-256color")
        done = nri_gpu(*arguments)
        assert (done.code, done.err) == (code, "")
        return unstyled(screen.getvalue()) or done.out

    return run


class Screen(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self) -> bool:
        return True


def hold(text: str, name: str) -> None:
    """Against the golden of that name."""
    compare(GOLDENS / name, VARYING.sub("........", text))


@by_verb
def test_into_a_pipe(printed: Printed, verb: str) -> None:
    hold(printed(verb), f"{verb}-piped.txt")


@by_verb
@pytest.mark.parametrize("columns", WIDTHS)
def test_on_a_terminal(printed: Printed, verb: str, columns: int) -> None:
    text = printed(verb, columns=columns)
    assert all(len(line) <= columns for line in text.splitlines())
    hold(text, f"{verb}-{columns}.txt")


@by_verb
def test_for_programs(printed: Printed, verb: str) -> None:
    text = printed(verb, "-o", "json")
    conforming(json.loads(text))
    hold(text, f"{verb}.json")


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_report_of_doctor(columns: int) -> None:
    hold(f"{to_text(REPORT, columns)}\n", f"doctor-{columns}.txt")


DOCUMENTS = {
    "doctor": json_text(REPORT),
    "status": json_text(node_in_trouble()),
    "status-watch": json_text(WatchLine(NOW, (LOST, GRANTED), node_in_trouble())),
    "verify": json_text(CHECKED),
    "blockers": json_text(KEPT),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str) -> None:
    conforming(json.loads(DOCUMENTS[name]))
    hold(f"{DOCUMENTS[name]}\n", f"{name}.json")
