"""`extras=`: words once each, channels by number, and a sentence for everything else."""

from __future__ import annotations

import pytest

from nri_gpu.domain.edits import NO_EXTRAS, Extra, Extras
from nri_gpu.domain.errors import RequestError
from nri_gpu.request.parse import parse_claim

KEY = "gpu.nri.io/pod"
LISTED = "drm, gds, gdrcopy, rdma, nvswitch, imex:N, persistenced, fabricmanager, profile, firmware, mig-config"


def some(*asked: Extra, channels: tuple[int, ...] = ()) -> Extras:
    return Extras(frozenset(asked), channels)


GOOD = {
    "none said": ("1", NO_EXTRAS),
    "one": ("1;extras=drm", some(Extra.DRM)),
    "several, with blanks": ("1; extras = rdma , gds", some(Extra.RDMA, Extra.GDS)),
    "one channel": ("1;extras=imex:0", some(Extra.IMEX, channels=(0,))),
    "channels in any order": ("1;extras=imex:7,drm, imex : 2", some(Extra.DRM, Extra.IMEX, channels=(2, 7))),
    "the last channel": ("1;extras=imex:1048575", some(Extra.IMEX, channels=(1048575,))),
    "every one": (
        "1;extras=" + ",".join(each for each in Extra if each is not Extra.IMEX),
        some(*set(Extra) - {"imex"}),
    ),
}


@pytest.mark.parametrize(("value", "extras"), GOOD.values(), ids=GOOD)
def test_understood(value: str, extras: Extras) -> None:
    assert parse_claim(KEY, value).extras == extras


# name -> value, 0-based position, words of the sentence
BAD = {
    "unknown": ("1;extras=frob", 9, f'unknown extra "frob", known: {LISTED}, mig-monitor'),
    "nearly": ("1;extras=drm,gdrcpy", 13, 'did you mean "gdrcopy"?'),
    "as NVIDIA calls it": ("1;extras=mofed", 9, 'did you mean "rdma"?'),
    "all": ("1;extras=all", 9, '"all" is not accepted'),
    "capitals": ("1;extras=RDMA", 9, 'did you mean "rdma"?'),
    "twice": ("1;extras=rdma,drm,rdma", 18, '"rdma" is named twice'),
    "nothing": ("1;extras=", 9, "needs a value, such as extras=drm"),
    "nothing between": ("1;extras=drm,,gds", 13, "an extra is missing here"),
    "a number where none goes": ("1;extras=drm:1", 9, '"drm" takes no number'),
    "no channel": ("1;extras=imex", 9, "names no IMEX channel: write imex:N, with N from 0 to 1048575"),
    "empty channel": ("1;extras=imex:", 9, "names no IMEX channel"),
    "channel too high": ("1;extras=imex:1048576", 9, "names no IMEX channel"),
    "channel with a sign": ("1;extras=imex:+1", 9, "names no IMEX channel"),
    "channel with a leading zero": ("1;extras=imex:01", 9, "names no IMEX channel"),
    "channel in another script": ("1;extras=imex:0x1", 9, "names no IMEX channel"),
    "endless channel": ("1;extras=imex:" + "9" * 4000, 9, "names no IMEX channel"),
    "channel twice": ("1;extras=imex:3,imex:3", 16, '"imex:3" is named twice'),
    "range of channels": ("1;extras=imex:0-3", 9, "names no IMEX channel"),
    "without GPUs": ("extras=drm", 0, "this says how GPUs are used and not which"),
    "beside none": ("none;extras=drm", 5, '"none" stands alone'),
    "a clause twice": ("1;extras=drm;extras=gds", 13, "extras is given twice"),
    "an order": ("1;extras>=drm", 8, "it takes: ="),
}


@pytest.mark.parametrize(("value", "at", "words"), BAD.values(), ids=BAD)
def test_refused(value: str, at: int, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_claim(KEY, value)
    assert (caught.value.position, words in str(caught.value)) == (at, True), str(caught.value)
    assert len(str(caught.value)) < 500
