"""A claim written out in the grammar."""

from __future__ import annotations

import pytest

from nri_gpu.request.parse import parse_claim
from tests.support.claims import format_claim

WRITTEN = {
    "2": "count=2",
    " all ": "all",
    "none;": "none",
    "mode=shared;device=00000000:3B:00.0,1": "device=0000:3b:00.0,1;mode=shared",
    "capabilities=utility,compute;1": "count=1;capabilities=compute,utility",
    "arch>=9.0;model=*H100*;memory<1Ki": "count=1;arch>=9.0;model=*H100*;memory<1024",
}


@pytest.mark.parametrize(("value", "expected"), WRITTEN.items())
def test_one_way_to_write_it(value: str, expected: str) -> None:
    assert format_claim(parse_claim("gpu.nri.io", value)) == expected
