from __future__ import annotations

import pytest

from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.grant_text import InvalidGrant, SignedGrant, sign_grant, verify_grant
from tests.support import builders as make

KEY = bytes(range(32))
HOLDER = make.container()
POD, ID = HOLDER.pod.uid, HOLDER.id

GOOD = sign_grant(make.grant(0, 1), KEY)
FORGED = {
    "empty mac": GOOD.partition(";mac=")[0] + ";mac=",
    "mac in capitals": GOOD.partition(";mac=")[0] + ";mac=" + GOOD.partition(";mac=")[2].upper(),
    "mac of another script": GOOD[:-1] + "\u0660",
    "broken text": "\ud800;mac=\udfff",
    "mode": GOOD.replace("exclusive", "shared"),
    "signed behind a signed grant": f"{GOOD};mac={GOOD}",
}


def read(text: str, pod_uid: str = POD, container_id: str = ID, key: bytes = KEY) -> SignedGrant | InvalidGrant:
    return verify_grant(text, PodUid(pod_uid), ContainerId(container_id), key)


def test_a_signed_grant_is_as_earlier_versions_wrote_it() -> None:
    """It stands on containers that outlive the daemon."""
    assert sign_grant(make.grant(0, 1), KEY) == (
        f"v1;mode=exclusive;uuid={make.uuid(0)},{make.uuid(1)};gen={make.GENERATION};"
        "mac=e1af7e48d1752962d2e8877da842e686781d3413cf8daa4021eb32e041cb04ad"
    )
    assert sign_grant(make.grant(mode=None), KEY).startswith("v1;mode=none;uuid=;gen=")


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
def test_a_signed_grant_that_was_touched_is_worth_nothing(text: str) -> None:
    assert isinstance(read(text), InvalidGrant)


def test_a_right_mac_over_fields_of_another_version_is_told_apart() -> None:
    odd = sign_grant(make.grant(0, generation="x;mode=shared"), KEY)
    bad = read(odd)
    assert isinstance(bad, InvalidGrant)
    assert "another version" in bad.why


def test_why_a_signed_grant_is_bad_tells_neither_key_nor_mac() -> None:
    bad = read(FORGED["mode"])
    assert isinstance(bad, InvalidGrant)
    right = sign_grant(make.grant(0, 1, mode=Mode.SHARED), KEY).rpartition("=")[2]
    assert right not in repr(bad)
    assert KEY.hex() not in repr(bad)
