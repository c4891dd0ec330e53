"""A short selection of the attacks on the wire. `make reliability` has all of them, thousands of times."""

from __future__ import annotations

from tests.reliability.hostile_runtime import attacked
from tests.reliability.result import Options

SHORT = ("truncated", "garbage", "used-ids", "future", "disorder")


def test_daemon_and_guard_survive_a_hostile_runtime() -> None:
    rows = list(attacked(SHORT, Options(quick=True)))
    assert len(rows) == 2 * len(SHORT)
    assert [row.what for row in rows if not row.passed] == [], "\n".join(row.outcome for row in rows)
