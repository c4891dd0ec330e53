"""Invariant: whatever stands in an annotation, parsing gives a claim no wider than it says, or a RequestError."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.edits import Extra
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu_request import Count, Devices, Nothing
from nri_gpu.request.annotation import CLAUSES, VALUE_MAX, WORDS, parse_claim
from tests.fuzz.target import Target
from tests.support.claims import format_claim
from tests.unit.request.samples import BAD, GOOD

KEY: Final = "gpu.nri.io"
PIECES: Final = (*"=<>;,:.*01 \t\n\u0660", ">=", "<=", "-1", "9.0", "40Gi")
VALUES: Final = ("GPU-", "MIG-8f3a", "0:1", "1g.10gb", "nvidia.com/gpu=", "shared", "compute", "drm", "imex:", "rdma")


def check(value: str) -> bool:
    """Whether it was understood; anything but a claim or a RequestError comes out as it is."""
    try:
        claim = parse_claim(KEY, value)
    except RequestError as error:
        assert error.position is not None
        assert 0 <= error.position <= len(value)
        assert str(error).isascii()
        assert str(error).isprintable()
        assert len(str(error)) < 500
        return False
    assert claim.text == value
    assert value.isascii()
    assert len(value) <= VALUE_MAX
    assert replace(parse_claim(KEY, format_claim(claim)), text=value) == claim
    assert bool(claim.extras.channels) == (Extra.IMEX in claim.extras.asked)
    match claim.wanted:
        case Count(gpus):
            assert 1 <= gpus <= 128
            assert str(gpus) in value or (gpus == 1 and claim.selectors)
        case Devices(ids):
            assert len(ids) == len(set(ids)) <= value.count(",") + 1
        case Nothing():
            assert not (claim.mode or claim.capabilities or claim.selectors or claim.extras.asked)
    return True


REQUEST: Final = Target(
    lambda data: check(data.decode(errors="surrogateescape")),
    good=[claim.text.encode() for claim in GOOD.values()],
    bad=[value.encode(errors="surrogatepass") for value, _, _ in BAD.values()],
    pieces=(*WORDS, *CLAUSES, *PIECES, *VALUES),
)
TARGETS: Final = {"request": REQUEST}
