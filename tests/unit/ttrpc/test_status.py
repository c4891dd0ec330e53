from __future__ import annotations

from nri_gpu.ttrpc import OK, Status, StatusCode


def test_codes_are_grpcs() -> None:
    assert list(StatusCode) == list(range(17))
    assert (StatusCode.FAILED_PRECONDITION, StatusCode.UNIMPLEMENTED, StatusCode.UNAUTHENTICATED) == (9, 12, 16)


def test_a_status_reads_as_a_line() -> None:
    assert str(Status(StatusCode.NOT_FOUND, "no such thing")) == "NOT_FOUND: no such thing"
    assert str(OK) == "OK"


def test_only_ok_is_ok() -> None:
    assert [code for code in StatusCode if Status(code).ok] == [StatusCode.OK]
