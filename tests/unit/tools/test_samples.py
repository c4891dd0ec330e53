"""Samples are put where pages have a place for them, and are what a reader's command prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import files, generate, samples

STALE = "above\n\n<!-- sample: status -->\nold\n<!-- end -->\nbelow\n"


def test_places_are_filled_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs" / "quickstart").mkdir(parents=True)
    stale, readme = tmp_path / "docs" / "quickstart" / "one.md", tmp_path / "README.md"
    stale.write_text(STALE)
    readme.write_text("no sample\n")
    monkeypatch.setattr(samples, "ROOT", tmp_path)
    monkeypatch.setitem(samples.MADE, "status", lambda: "new\n")
    assert samples.pages() == {stale: STALE.replace("old", "new")}


def test_a_page_that_shows_what_no_verb_prints_is_told() -> None:
    readme = files.ROOT / "README.md"
    made = generate.MADE["samples"]()
    assert readme in made
    told = "\n".join(files.faults({readme: str(made[readme]).replace("XID 79,", "XID 79:")}))
    assert "README.md is not what its source says" in told


def test_the_command_that_is_shown_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(samples.POD)
    (tmp_path / "config").symlink_to(files.ROOT / "config")
    shown = re.findall(r"```\n\$ (.*?)\n```", samples.pod(), re.DOTALL)[0]
    command, said = re.split(r"(?<=-e device)\n", shown)
    (tmp_path / "nri-gpu").write_text(f'#!/bin/sh\nexec {sys.executable} -m nri_gpu "$@"\n')
    (tmp_path / "nri-gpu").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(files.ROOT)}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == said.splitlines(), done.stderr
