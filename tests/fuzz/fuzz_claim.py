"""Invariant: whatever the API server says a claim is, it is read or refused in a sentence that a kubelet can be told.

As a test it runs a thousand mutations of claims; by itself (`python -m tests.fuzz.fuzz_claim --seconds 60`) it mutates
them until the time is over and prints the text that broke the invariant.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Final

from nri_gpu.domain.resource_claim import ClaimUid
from nri_gpu.dra.messages import PreparedName
from nri_gpu.dra.resource_claim import ResourceClaimError, parse_resource_claim
from nri_gpu.request.parse import parse_claim
from tests.fuzz.mutation import Texts, fuzz
from tests.support.resource_claims import CONFIG, DRIVER, NODE, UID, opaque, resource_claim, result

ASKED: Final = PreparedName(ClaimUid(UID), "ml", "train")
MPS: Final = {**CONFIG, "mode": "mps", "sharing": {"memory": "10Gi", "threads": 50}, "extras": ["imex:0"]}
WHOLE: Final = resource_claim(
    result("gpu-0", "a"),
    result("gpu-1", "b/c", adminAccess=True, shareID="s"),
    config=[opaque(MPS, "a"), opaque({**CONFIG, "capabilities": ["utility"]}, source="FromClass")],
    owner="Pod",
)
TEXTS: Final = Texts(
    good=(json.dumps(resource_claim()), json.dumps(WHOLE), json.dumps(WHOLE["status"])),
    bad=("", "null", "[]", '{"metadata": {}}', json.dumps(resource_claim(uid="another"))),
    grammar=(
        *'{}[]":,\\',
        *('"mode"', '"shared"', '"driver"', "null", "true", "-1", "1e999", "NaN", "\\ud800", "\\u0000", "imex:1", ";"),
        *(DRIVER, UID, '"opaque"', '"parameters"', '"results"', '"requests"', '"sharing"', '{"a":' * 30),
    ),
)


def check(text: str) -> bool:
    """Whether it is read; any exception but ours comes out as it is."""
    try:
        claim = parse_resource_claim(text.encode(errors="surrogatepass"), ASKED, DRIVER, NODE)
    except ResourceClaimError as error:
        said = str(error)
        assert said.startswith("ResourceClaim ml/train: ")
        assert said.isprintable()
        assert said.encode()
        return False
    assert claim.uid == UID
    assert claim.results
    for each in claim.results:
        assert not each.text or parse_claim("key", each.text, given=True)
        assert (each.request + each.pool + each.device + each.share_id).encode() is not None
    return True


def test_the_good_ones_are_read() -> None:
    assert [check(text) for text in TEXTS.good] == [True, True, False]
    assert not any(map(check, TEXTS.bad))


def test_a_thousand_mutations() -> None:
    dice = random.Random(5)
    assert sum(check(TEXTS.mutated(dice)) for _ in range(1000)) > 20


if __name__ == "__main__":
    sys.exit(fuzz(check, TEXTS.mutated, __doc__))
