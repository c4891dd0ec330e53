"""What is generated: what is stale is told and written, and the reference has all that it lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.cli.main import VERBS
from nri_gpu.health.states import TRANSITIONS
from tools import files, generate, reference
from tools.files import Drawn, Files, LackingError


def run(monkeypatch: pytest.MonkeyPatch, made: Files, *options: str) -> int:
    monkeypatch.setattr(generate, "MADE", {"it": lambda: made})
    monkeypatch.setattr("sys.argv", ["generate", *options, "it"])
    return generate.main()


def test_stale_files_are_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    made: Files = {
        tmp_path / "text": "new\n",
        tmp_path / "gone": None,
        tmp_path / "below" / "drawn.svg": Drawn("mark\n", lambda: "<svg>mark\n"),
        tmp_path / "current.svg": Drawn("mark\n", lambda: pytest.fail("it is drawn, and is current")),
    }
    for name, text in (("text", "old\n"), ("gone", ""), ("current.svg", "<svg>mark\n")):
        (tmp_path / name).write_text(text)
    assert run(monkeypatch, made, "--check") == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said if "has to be" not in line and "make generate" in line] == [
        "below/drawn.svg",
        "gone",
        "text",
    ]
    assert {"-old", "+new"} <= set(said)

    assert run(monkeypatch, made) == 0
    assert run(monkeypatch, made, "--check") == 0
    assert not (tmp_path / "gone").exists()


def test_what_no_difference_shows_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(generate, "FAULTS", {"it": lambda: ["nothing logs 'x'"]})
    assert run(monkeypatch, {}, "--check") == 1
    assert capsys.readouterr().out == "nothing logs 'x'\n"


def test_what_cannot_be_made_here_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def lacking() -> Files:
        raise LackingError("no compiler")

    monkeypatch.setattr(generate, "MADE", {"it": lacking})
    for options, code in ((["--check"], 0), ([], 1)):
        monkeypatch.setattr("sys.argv", ["generate", *options, "it"])
        assert generate.main() == code
        assert "no compiler" in capsys.readouterr().out


def test_the_reference_has_every_verb() -> None:
    page = reference.verbs_page()
    assert all(f"## nri-gpu {verb.name}\n" in page for verb in VERBS)


def test_every_change_of_health_is_drawn() -> None:
    drawn = reference.health_dot()
    for state, after in TRANSITIONS.items():
        assert all(f'"{state}" -> "{following}"' in drawn for following in after.values())
