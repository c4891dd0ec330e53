from __future__ import annotations

import pytest

from nri_gpu.domain.claim import Mode, Operator
from nri_gpu.domain.errors import Fault, NriGpuError, OversizeError, PolicyError, RemoteProtocolError, RequestError
from nri_gpu.domain.gpu import Capability
from nri_gpu.domain.node import Node
from tests.support import builders as make

FAULTS = {
    "all": (Fault("f", "a.b", "wrong", 3), "f:3: a.b: wrong"),
    "no line": (Fault("f", "a.b", "wrong"), "f: a.b: wrong"),
    "no key": (Fault("f", "", "wrong", 3), "f:3: wrong"),
    "neither": (Fault("f", "", "wrong"), "f: wrong"),
}


@pytest.mark.parametrize(("fault", "text"), FAULTS.values(), ids=FAULTS)
def test_a_fault_reads_like_a_compilers(fault: Fault, text: str) -> None:
    assert str(fault) == text


def test_a_policy_error_holds_all_its_faults() -> None:
    error = PolicyError((Fault("f", "a", "x"), Fault("f", "b", "y")))
    assert str(error) == "f: a: x; f: b: y"
    assert len(error.faults) == 2


def test_a_request_error_counts_characters_from_one() -> None:
    assert str(RequestError("k", "wrong", 0)) == "k at character 1: wrong"
    assert str(RequestError("k", "wrong")) == "k: wrong"


def test_an_oversize_error_knows_both_lengths() -> None:
    error = OversizeError(5, 4)
    assert (error.length, error.limit) == (5, 4)
    assert isinstance(error, RemoteProtocolError)
    assert isinstance(error, NriGpuError)


def test_a_node_without_a_driver_has_a_generation_that_a_mark_can_carry() -> None:
    assert Node(number=1, inventory=make.inventory()).generation == "-"
    assert make.node().generation == make.GENERATION
    assert make.node().gpus == make.gpus()


def test_closed_sets_read_as_they_are_written_in_requests() -> None:
    assert [*Mode] == ["exclusive", "shared", "mps"]
    assert [*Capability] == ["compute", "utility", "video", "graphics", "display", "ngx", "compat32"]
    assert [*Operator] == [">=", "<=", ">", "<", "="]
