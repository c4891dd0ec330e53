"""Law: a signed grant is read as it was written, on its own container only; anything else is an InvalidGrant."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.grant_text import InvalidGrant, SignedGrant, sign_grant, verify_grant
from tests.support import builders as make

# Any text at all, lone surrogates and NULs too: whoever drives the runtime chooses names.
anything = st.text(st.characters(exclude_categories=()), max_size=30)
keys = st.binary(min_size=32, max_size=32)
generations = st.one_of(st.just("-"), st.from_regex(r"[0-9.]{1,12}-[0-9a-f]{8}(\.[0-9])?", fullmatch=True))


@st.composite
def grants(draw: st.DrawFn) -> Grant:
    indices = draw(st.lists(st.integers(0, 31), unique=True, max_size=4))
    mode = draw(st.sampled_from(Mode)) if indices else None
    holder = make.container(of=make.pod(uid=PodUid(draw(anything))), id=ContainerId(draw(anything)))
    return make.grant(*indices, mode=mode, to=holder, generation=draw(generations))


@given(grants(), keys)
def test_a_signed_grant_survives_the_runtime(grant: Grant, key: bytes) -> None:
    signed = verify_grant(sign_grant(grant, key), grant.pod_uid, grant.container_id, key)
    assert signed == SignedGrant(grant.uuids, grant.mode, grant.generation)


@given(grants(), keys, st.data())
def test_a_signed_grant_with_one_change_is_worth_nothing(grant: Grant, key: bytes, data: st.DataObject) -> None:
    text = sign_grant(grant, key)
    at = data.draw(st.integers(0, len(text)))
    removed = data.draw(st.integers(0, 3))
    forged = text[:at] + data.draw(st.text(max_size=3)) + text[at + removed :]
    assume(forged != text)
    assert isinstance(verify_grant(forged, grant.pod_uid, grant.container_id, key), InvalidGrant)


@given(grants(), grants(), keys)
def test_fields_under_the_mac_of_another_grant_are_worth_nothing(one: Grant, two: Grant, key: bytes) -> None:
    body, mac = sign_grant(one, key).rpartition(";mac=")[0], sign_grant(two, key).rpartition(";mac=")[2]
    same = (one.pod_uid, one.container_id) == (two.pod_uid, two.container_id) and body in sign_grant(two, key)
    assume(not same)
    assert isinstance(verify_grant(f"{body};mac={mac}", one.pod_uid, one.container_id, key), InvalidGrant)


@given(grants(), keys, anything, anything, keys)
def test_a_signed_grant_is_worth_nothing_on_another_container_pod_or_node(
    grant: Grant, key: bytes, pod_uid: str, container_id: str, other_key: bytes
) -> None:
    text = sign_grant(grant, key)
    assume((pod_uid, container_id) != (grant.pod_uid, grant.container_id))
    assume(other_key != key)
    assert isinstance(verify_grant(text, PodUid(pod_uid), ContainerId(container_id), key), InvalidGrant)
    assert isinstance(verify_grant(text, grant.pod_uid, grant.container_id, other_key), InvalidGrant)


@given(anything, anything, st.integers(1, 5), keys)
def test_no_border_between_pod_and_container_can_be_moved(pod_uid: str, rest: str, cut: int, key: bytes) -> None:
    assume(len(rest) >= cut)
    grant = make.grant(0, to=make.container(of=make.pod(uid=PodUid(pod_uid)), id=ContainerId(rest)))
    moved = verify_grant(sign_grant(grant, key), PodUid(pod_uid + rest[:cut]), ContainerId(rest[cut:]), key)
    assert isinstance(moved, InvalidGrant)
