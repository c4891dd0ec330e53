"""Plots are of the records that are kept, and the same record makes the same picture."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from docs import plots
from tests.reliability.result import Part, PartName, Record, Series


def test_a_picture_of_another_record_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name in plots.PLOTS if plots.stale(name)] == []
    other = tmp_path / "performance.json"
    other.write_text("{}")
    monkeypatch.setitem(plots.PLOTS, "create-start", (other, plots.create_start))
    assert plots.stale("create-start")


def test_a_soak_is_drawn_the_same_twice_and_its_text_is_text() -> None:
    series = [Series("real rss kib", "creations", "KiB", [0, 1, 2], [30, 31, 31])]
    part = Part("2026-11-22", 1.0, {}, [], series)
    content = msgspec.json.encode(Record(parts={PartName.SOAK: part}))
    drawn = plots.soak(content)
    assert drawn
    assert all(f">{text}</text>" in drawn for text in ("creations", "memory, KiB", plots.SOAKS["real"], "rss"))
    assert drawn == plots.soak(content)


def test_a_record_without_a_soak_has_no_picture() -> None:
    assert plots.soak(msgspec.json.encode(Record())) is None
