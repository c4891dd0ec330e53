"""Shares of an MPS daemon, as a pod writes them."""

from __future__ import annotations

import pytest

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.mps import NO_MPS_LIMITS, MpsLimits
from nri_gpu.request.parse import parse_claim

KEY = "gpu.nri.io"
GOOD = {
    "memory:10Gi,threads:50": MpsLimits(10240, 50),
    " threads : 1 ": MpsLimits(0, 1),
    "memory:1Mi": MpsLimits(1, 0),
    "memory:2048Ki": MpsLimits(2, 0),
}


@pytest.mark.parametrize(("text", "sharing"), GOOD.items(), ids=GOOD)
def test_understood(text: str, sharing: MpsLimits) -> None:
    claim = parse_claim(KEY, f"1;mode=mps;sharing={text}")
    assert (claim.mode, claim.sharing) == (Mode.MPS, sharing)


def test_the_mode_alone_leaves_shares_to_the_policy() -> None:
    assert parse_claim(KEY, "1;mode=mps").sharing == NO_MPS_LIMITS


BAD = {
    "1;mode=mps;sharing=memory:10G": 'character 27: "10G" is not a share of memory',
    "1;mode=mps;sharing=memory:1Ki": '"1Ki" is not a whole number of Mi',
    "1;mode=mps;sharing=memory:0Gi": "write a whole number with Ki, Mi or Gi",
    "1;mode=mps;sharing=memory:9999999Gi": "that a GPU could have",
    "1;mode=mps;sharing=memory:": "is not a share of memory",
    "1;mode=mps;sharing=threads:0": "write a percentage from 1 to 100",
    "1;mode=mps;sharing=threads:101": "write a percentage from 1 to 100",
    "1;mode=mps;sharing=threads": '"threads" needs a value',
    "1;mode=mps;sharing=thread:5": 'unknown share "thread", known: memory:10Gi, threads:50 (did you mean "threads"?)',
    "1;mode=mps;sharing=threads:5,threads:5": '"threads" is named twice',
    "1;mode=shared;sharing=threads:5": '"sharing" goes with mode=mps only',
    "1;sharing=threads:5": '"sharing" goes with mode=mps only',
}


@pytest.mark.parametrize(("value", "sentence"), BAD.items(), ids=BAD)
def test_not_understood(value: str, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_claim(KEY, value)
    assert sentence in str(caught.value)
