"""Plots: the same record makes the same picture, and one with nothing to draw makes none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.reliability import result
from tests.reliability.result import Record, Series
from tools import plots


def test_a_soak_is_drawn_the_same_twice_and_its_text_is_text() -> None:
    series = [Series("real rss kib", "creations", "KiB", [0, 1, 2], [30, 31, 31])]
    drawn = plots.soak(series)
    assert all(f">{text}</text>" in drawn for text in ("creations", "memory, KiB", plots.SOAKS["real"], "rss"))
    assert drawn == plots.soak(series)


def test_a_record_without_a_soak_has_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {path.name for path in plots.plots()} == {"create-start.svg", "soak.svg"}
    empty = tmp_path / "reliability.json"
    empty.write_bytes(msgspec.json.encode(Record()))
    monkeypatch.setattr(result, "RECORD", empty)
    assert {path.name for path in plots.plots()} == {"create-start.svg"}
