"""Invariant: whatever the API server says a claim is, it is read, or refused in a sentence for the kubelet."""

from __future__ import annotations

import json
from typing import Final

from nri_gpu.domain.resource_claim import ClaimUid
from nri_gpu.dra.claim_object import ResourceClaimError, parse_resource_claim
from nri_gpu.dra.questions import PreparedName
from nri_gpu.request.annotation import parse_claim
from tests.fuzz.target import Target
from tests.support.resource_claims import CONFIG, DRIVER, NODE, UID, opaque, resource_claim, result

ASKED: Final = PreparedName(ClaimUid(UID), "ml", "train")
MPS: Final = {**CONFIG, "mode": "mps", "sharing": {"memory": "10Gi", "threads": 50}, "extras": ["imex:0"]}
WHOLE: Final = resource_claim(
    result("gpu-0", "a"),
    result("gpu-1", "b/c", adminAccess=True, shareID="s"),
    config=[opaque(MPS, "a"), opaque({**CONFIG, "capabilities": ["utility"]}, source="FromClass")],
    owner="Pod",
)


def check(text: bytes) -> bool:
    """Whether it is read; any exception but ours comes out as it is."""
    try:
        claim = parse_resource_claim(text, ASKED, DRIVER, NODE)
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


CLAIM: Final = Target(
    check,
    good=[json.dumps(each).encode() for each in (resource_claim(), WHOLE)],
    bad=[b"", b"null", b"[]", b'{"metadata": {}}', json.dumps(resource_claim(uid="another")).encode()],
    pieces=(
        *'{}[]":,\\',
        *('"mode"', '"shared"', '"driver"', "null", "true", "-1", "1e999", "NaN", "\\ud800", "\\u0000", "imex:1", ";"),
        *(DRIVER, UID, '"opaque"', '"parameters"', '"results"', '"requests"', '"sharing"', '{"a":' * 30),
    ),
)
TARGETS: Final = {"claim": CLAIM}
