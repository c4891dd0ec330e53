from __future__ import annotations

import pytest

from nri_gpu.allocation.grant import InvalidGrant, SignedGrant, sign_grant, verify_grant
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.decision import Grant
from tests.support import builders as make

KEY = bytes(range(32))
HOLDER = make.container()
POD, ID = HOLDER.pod.uid, HOLDER.id

GRANTS = {
    "one gpu": make.grant(0),
    "two gpus shared": make.grant(0, 3, mode=Mode.SHARED),
    "nothing": make.grant(mode=None),
    "no driver files": make.grant(1, generation="-"),
    "a repaired generation": make.grant(1, generation="580.95.05-1a2b3c4d.4"),
}
GOOD = sign_grant(make.grant(0, 1), KEY)
FORGED = {
    "empty": "",
    "no mac": GOOD.partition(";mac=")[0],
    "empty mac": GOOD.partition(";mac=")[0] + ";mac=",
    "mac in capitals": GOOD.partition(";mac=")[0] + ";mac=" + GOOD.partition(";mac=")[2].upper(),
    "mac of another script": GOOD[:-1] + "\u0660",
    "broken text": "\ud800;mac=\udfff",
    "mode": GOOD.replace("exclusive", "shared"),
    "uuid": GOOD.replace(make.uuid(1), make.uuid(2)),
    "a uuid more": GOOD.replace(make.uuid(1), f"{make.uuid(1)},{make.uuid(2)}"),
    "version": GOOD.replace("v1", "v2"),
    "a field more": GOOD.replace(";mac", ";x=1;mac"),
    "signed behind a signed grant": f"{GOOD};mac={GOOD}",
    "line break behind": f"{GOOD}\n",
}


def read(text: str, pod_uid: str = POD, container_id: str = ID, key: bytes = KEY) -> SignedGrant | InvalidGrant:
    return verify_grant(text, PodUid(pod_uid), ContainerId(container_id), key)


@pytest.mark.parametrize("grant", GRANTS.values(), ids=GRANTS)
def test_what_is_written_is_read(grant: Grant) -> None:
    assert read(sign_grant(grant, KEY)) == SignedGrant(grant.uuids, grant.mode, grant.generation)


def test_a_signed_grant_reads_like_the_contract() -> None:
    head, _, mac = GOOD.rpartition(";mac=")
    assert head == f"v1;mode=exclusive;uuid={make.uuid(0)},{make.uuid(1)};gen={make.GENERATION}"
    assert len(bytes.fromhex(mac)) == 32
    assert sign_grant(make.grant(mode=None), KEY).startswith("v1;mode=none;uuid=;gen=")


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
def test_a_signed_grant_that_was_touched_is_worth_nothing(text: str) -> None:
    assert isinstance(read(text), InvalidGrant)


ELSEWHERE = {
    "another pod": ("uid-other", ID, KEY),
    "another container": (POD, "other", KEY),
    "another node's key": (POD, ID, bytes(32)),
    "the border moved by a NUL": (f"{POD}\0{ID}", "", KEY),
    "the border moved": (POD + ID[:1], ID[1:], KEY),
}


@pytest.mark.parametrize(("pod_uid", "container_id", "key"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_signed_grant_copied_elsewhere_is_worth_nothing(pod_uid: str, container_id: str, key: bytes) -> None:
    assert isinstance(read(GOOD, pod_uid, container_id, key), InvalidGrant)


def test_a_nul_in_a_name_moves_no_border() -> None:
    text = sign_grant(make.grant(0, to=make.container(of=make.pod(uid="a\0b"), id="c")), KEY)
    assert isinstance(read(text, "a\0b", "c"), SignedGrant)
    assert isinstance(read(text, "a", "b\0c"), InvalidGrant)


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
