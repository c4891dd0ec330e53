from __future__ import annotations

import pytest

from nri_gpu.domain.errors import Fault, RequestError

FAULTS = {
    "all": (Fault("f", "a.b", "wrong", 3), "f:3: a.b: wrong"),
    "no line": (Fault("f", "a.b", "wrong"), "f: a.b: wrong"),
    "no key": (Fault("f", "", "wrong", 3), "f:3: wrong"),
    "neither": (Fault("f", "", "wrong"), "f: wrong"),
}


@pytest.mark.parametrize(("fault", "text"), FAULTS.values(), ids=FAULTS)
def test_a_fault_reads_like_a_compilers(fault: Fault, text: str) -> None:
    assert str(fault) == text


def test_a_request_error_counts_characters_from_one() -> None:
    assert str(RequestError("k", "wrong", 0)) == "k at character 1: wrong"
    assert str(RequestError("k", "wrong")) == "k: wrong"
