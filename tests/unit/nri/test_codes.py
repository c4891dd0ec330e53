from __future__ import annotations

import pytest

from nri_gpu.domain.decision import Code, Reason
from nri_gpu.nri import codes
from nri_gpu.ttrpc.frames import StatusCode


@pytest.mark.parametrize("why", Code)
def test_a_refusal_is_a_failed_precondition_unless_it_is_about_permission(why: Code) -> None:
    answer = codes.status_of(Reason(why, "because."))
    assert answer.code is (StatusCode.PERMISSION_DENIED if why is Code.NOT_ALLOWED else StatusCode.FAILED_PRECONDITION)
    assert answer.message == f"nri-gpu [{why}]: because."


def test_no_answer_of_ours_is_one_that_the_runtime_reads_otherwise() -> None:
    ours = [codes.INTERNAL, codes.LATE, codes.MALFORMED, codes.out_of_order("x")]
    # The first means "message too big" in Synchronize, the second "no such event" everywhere.
    other = {StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNIMPLEMENTED, StatusCode.OK}
    assert other.isdisjoint({answer.code for answer in ours})
    for answer in ours:
        assert answer.message.isascii()
        assert answer.message.startswith("nri-gpu [") and answer.message.endswith(".")
