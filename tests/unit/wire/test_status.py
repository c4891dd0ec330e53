from __future__ import annotations

from nri_gpu.ttrpc import OK, Code, Status


def test_codes_are_grpcs() -> None:
    assert list(Code) == list(range(17))
    assert (Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED, Code.UNAUTHENTICATED) == (9, 12, 16)


def test_a_status_reads_as_a_line() -> None:
    assert str(Status(Code.NOT_FOUND, "no such thing")) == "NOT_FOUND: no such thing"
    assert str(OK) == "OK"


def test_only_ok_is_ok() -> None:
    assert [code for code in Code if Status(code).ok] == [Code.OK]
