from __future__ import annotations

import pytest

from nri_gpu.domain.decision import Code, Reason
from nri_gpu.nri import status
from nri_gpu.ttrpc.events import Status, StatusCode


@pytest.mark.parametrize("why", Code)
def test_a_refusal_is_a_failed_precondition_unless_it_is_about_permission(why: Code) -> None:
    answer = status.status_of(Reason(why, "because."))
    assert answer.code is (StatusCode.PERMISSION_DENIED if why is Code.NOT_ALLOWED else StatusCode.FAILED_PRECONDITION)
    assert answer.message == f"nri-gpu [{why}]: because."


def test_no_answer_of_ours_is_one_that_the_runtime_reads_otherwise() -> None:
    answers = [status.INTERNAL, status.LATE, status.MALFORMED, status.out_of_order("x")]
    answers += [status.status_of(Reason(why, "")) for why in Code]
    # The first means "message too big" in Synchronize, the second "no such event" everywhere.
    assert {StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNIMPLEMENTED, StatusCode.OK}.isdisjoint(
        {answer.code for answer in answers}
    )


def test_only_an_unknown_method_or_service_is_unimplemented() -> None:
    assert status.unknown_method("ours", "Fly", "ours") == Status(StatusCode.UNIMPLEMENTED, "method Fly")
    assert status.unknown_method("theirs", "Fly", "ours") == Status(StatusCode.UNIMPLEMENTED, "service theirs")


def test_sentences_for_clients_are_ascii_and_end() -> None:
    for answer in (status.INTERNAL, status.LATE, status.MALFORMED, status.out_of_order("x")):
        assert answer.message.isascii()
        assert answer.message.endswith(".")
        assert answer.message.startswith("nri-gpu [")
