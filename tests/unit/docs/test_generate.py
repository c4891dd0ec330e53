"""The reference and the diagrams are what their sources say."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate
from nri_gpu.cli.main import VERBS
from nri_gpu.health.states import TRANSITIONS
from nri_gpu.request.annotation import CLAUSES


def test_nothing_is_stale() -> None:
    assert list(generate.stale()) == []


def test_a_changed_diagram_is_told_without_drawing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "architecture.dot").write_text("digraph other {}")
    monkeypatch.setattr(generate, "DIAGRAMS", tmp_path)
    assert list(generate.stale()) == [generate.PICTURES / "architecture.svg"]


def test_the_reference_has_every_verb_and_clause() -> None:
    verbs, annotations = generate.verbs_page(), generate.annotations_page()
    assert all(f"## nri-gpu {verb.name}\n" in verbs for verb in VERBS)
    assert all(f"| `{name}` | `{clause.example}` |" in annotations for name, clause in CLAUSES.items())


def test_every_change_of_health_is_drawn() -> None:
    drawn = generate.health_dot()
    for state, after in TRANSITIONS.items():
        assert all(f'"{state}" -> "{following}"' in drawn for following in after.values())
