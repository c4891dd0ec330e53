"""Law: what `decide` grants passes the validation; without its signed grant, nothing that asked does."""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.decision.asked import needs_grant
from nri_gpu.decision.decide import decide
from nri_gpu.decision.start_check import grant_of, validate_adjusted, validate_nodes, validate_staged, validate_start
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Inject, Refuse
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.node import Node
from nri_gpu.ledger.grant_text import SignedGrant, sign_grant
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.opened import live
from nri_gpu.nri.convert import DecodeError, annotation_to_pb, reply_to_pb
from nri_gpu.nri.validation import adjusted_from_pb, concerns_us
from nri_gpu.policy.model import Policy
from tests.property import strategies
from tests.support import builders as make
from tests.support import nri_messages as nri
from tests.support.builders import TREES

KEY = bytes(range(32))
US = "10-nri-gpu"


def validation(container: Container, reply: bytes) -> bytes:
    """The request by which a runtime has this reply validated."""
    replies = {US: pb.CreateContainerResponse.FromString(reply)} if reply else {}
    return nri.validate(make.pod_message(container.pod), make.container_message(container), replies)


@given(strategies.containers(), strategies.nodes, strategies.ledgers, strategies.policies)
def test_validation_agrees_with_the_decision(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    decision = decide(container, node, ledger, policy)
    event(type(decision).__name__)
    if isinstance(decision, Refuse):
        return
    reply = b""
    if isinstance(decision, Inject):
        reply = reply_to_pb(decision.edits) + annotation_to_pb(GRANT_KEY, sign_grant(decision.grant, KEY))
    payload = validation(container, reply)
    adjusted = adjusted_from_pb(payload, GRANT_KEY, TREES)
    reason = validate_adjusted(adjusted, KEY, policy)
    assert reason is None
    has = live(container, decision.edits, TREES)
    assert validate_staged(adjusted, has.staged if has else frozenset()) is None
    signed = grant_of(container, sign_grant(decision.grant, KEY) if isinstance(decision, Inject) else None, KEY)
    assert validate_start(container, signed, policy) is None
    if isinstance(signed, SignedGrant):
        assert validate_nodes(replace(container, devices=adjusted.devices), signed) is None


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda some: some + b"gpu.nri.io")))
def test_garbage_is_read_or_refused(payload: bytes) -> None:
    try:
        adjusted = adjusted_from_pb(payload, GRANT_KEY)
    except DecodeError:
        return
    validate_adjusted(adjusted, KEY, Policy.default())


@given(strategies.containers(), strategies.policies)
def test_without_a_signed_grant_what_asked_neither_is_created_nor_starts(container: Container, policy: Policy) -> None:
    payload = validation(container, b"")
    reason = validate_adjusted(adjusted_from_pb(payload, GRANT_KEY), KEY, policy)
    assert bool(reason) is bool(needs_grant(container, policy))
    assert (validate_start(container, None, policy) is None) is (reason is None)
    assert concerns_us(payload) or reason is None
