"""Applications that fail on one GPU under containers of several namespaces."""

from __future__ import annotations

import pytest

from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.health.applications import DAY_S, KEPT, Failures, is_of_application
from tests.support.health import UUIDS, xid

ONE, OTHER = UUIDS[:2]


def failed(*when: tuple[float, str]) -> Failures:
    """when: seconds, and the namespaces with a container on the GPU."""
    found = Failures()
    for seconds, names in when:
        found = found.having(ONE, frozenset(names), seconds)
    return found


@pytest.mark.parametrize(
    ("when", "namespaces"),
    [
        ([(1, "a"), (2, "b"), (3, "c")], "abc"),
        ([(1, "a"), (2, "b"), (3, "b")], ""),
        ([(1, "a"), (2, "b"), (DAY_S + 1, "c")], ""),
        ([(1, "a"), (2, "b"), (DAY_S, "a"), (DAY_S + 1, "c")], "abc"),
        ([(1, "abc")], ""),  # NVML does not tell whose it was, and one may have caused it
        ([(1, "abc"), (2, "abd"), (3, "abe")], ""),
        ([(1, "ab"), (2, "cd"), (3, "ef")], "abcdef"),
    ],
)
def test_three_namespaces_within_a_day(when: list[tuple[float, str]], namespaces: str) -> None:
    found = failed(*when)
    assert found.namespaces(ONE, when[-1][0]) == tuple(namespaces)
    assert found.namespaces(OTHER, when[-1][0]) == ()


def test_they_end_after_a_day_and_are_bounded() -> None:
    found = failed(*((number, chr(0x100 + number)) for number in range(1000)))
    assert len(found.by_gpu[ONE]) == KEPT
    assert found.namespaces(ONE, 999) != ()
    assert found.namespaces(ONE, 999 + DAY_S) == ()


@pytest.mark.parametrize(
    ("event", "of_application"),
    [
        *((xid(number), True) for number in (13, 43, 69, 94, 109)),
        *((xid(number), False) for number in (46, 63, 145, 999)),
        (GpuEvent(ONE, int(EventType.ECC_STORM)), False),
    ],
)
def test_whose_errors_they_are(event: GpuEvent, of_application: bool) -> None:
    assert is_of_application(event) is of_application
