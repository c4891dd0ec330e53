"""The request grammar: one named case per rule."""

from __future__ import annotations

import pytest

from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu_request import (
    Claim,
    Count,
)
from nri_gpu.request.annotation import VALUE_MAX, parse_claim
from tests.unit.request.samples import BAD, GOOD, KEY


@pytest.mark.parametrize("expected", GOOD.values(), ids=GOOD.keys())
def test_understood(expected: Claim) -> None:
    assert parse_claim(KEY, expected.text) == expected


@pytest.mark.parametrize(("value", "position", "sentence"), BAD.values(), ids=BAD.keys())
def test_refused_with_place_and_way_out(value: str, position: int, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_claim(KEY, value)
    assert sentence in str(caught.value)
    assert caught.value.position == position
    assert caught.value.key == KEY


def test_the_longest_value_is_still_read() -> None:
    assert parse_claim(KEY, " " * (VALUE_MAX - 1) + "1").wanted == Count(1)


def test_what_is_echoed_is_clipped_and_escaped() -> None:
    with pytest.raises(RequestError) as caught:
        parse_claim(KEY, "device=" + "\\" * 4000)
    assert str(caught.value).count("\\") < 50


def test_the_key_is_kept_whole_in_the_claim_and_clipped_in_an_error() -> None:
    key = "gpu.nri.io/container." + "n" * 500
    assert parse_claim(key, "1").key == key
    with pytest.raises(RequestError) as caught:
        parse_claim(key, "")
    assert len(str(caught.value)) < 300
