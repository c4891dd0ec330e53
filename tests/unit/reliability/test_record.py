"""The record, the page that is made from it, and the line through a soak's samples."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.reliability import page
from tests.reliability.fit import slope
from tests.reliability.result import Part, PartName, Record, Row, Series, read, write

ROW = Row(
    "daemon killed", 192, "creations", "none | started without", "python -m tests.reliability --case kill", passed=False
)
PART = Part("2026-01-01 00:00 UTC", 90.0, {"cores": "2"}, [ROW], [Series("rss", "creations", "KiB", [1.0], [2.0])])
TEXT = "# Title\n\n<!-- record: faults -->\nold\n<!-- end -->\n\nBy hand.\n"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record().including(PartName.SOAK, PART).including(PartName.FAULTS, PART)
    write(record, tmp_path / "record.json")
    assert read(tmp_path / "record.json") == record
    assert [*record.parts] == [PartName.FAULTS, PartName.SOAK]
    assert read(tmp_path / "none.json") == Record()


def test_rows_of_one_case_take_the_place_of_their_last_ones() -> None:
    other, again = replace(ROW, command="another"), replace(ROW, passed=True, count=7)
    kept = replace(PART, rows=[ROW, other]).amended(replace(PART, rows=[again], series=[]))
    assert [*kept.rows] == [again, other]
    assert (kept.took_s, [*kept.series]) == (180.0, [*PART.series])


def test_the_page_has_the_records_rows_between_its_markers() -> None:
    made = page.rendered(TEXT, Record().including(PartName.FAULTS, PART))
    assert "| kill | daemon killed | 192 creations | none \\| started without | **no** |" in made
    assert "To repeat a row: `python -m tests.reliability --case CASE`\n" in made
    assert "Run on 2026-01-01 00:00 UTC in 2 min; cores 2." in made
    assert "old" not in made
    assert made.endswith("By hand.\n")
    assert page.rendered(made, Record().including(PartName.FAULTS, PART)) == made
    with pytest.raises(ValueError, match="no markers for soak"):
        page.rendered(TEXT, Record().including(PartName.SOAK, PART))


def test_a_series_keeps_its_ends_and_few_points() -> None:
    many = Series("rss", "creations", "KiB", [float(n) for n in range(1001)], [float(-n) for n in range(1001)])
    few = many.thinned(200)
    assert len(few.x) == len(few.y) <= 200
    assert few.x[-1] == 1000
    assert all(x == -y for x, y in zip(few.x, few.y, strict=True))


def test_a_slope_has_an_interval() -> None:
    flat = slope([1, 2, 3, 4], [5, 5, 5, 5])
    assert (flat.per_1000, flat.spread) == (0, 0)
    noisy = slope(range(100), [0.002 * n + (-1) ** n for n in range(100)])
    assert abs(noisy.per_1000 - 2) < noisy.spread < 10
    with pytest.raises(statistics.StatisticsError):
        slope([1, 2], [1, 2])
