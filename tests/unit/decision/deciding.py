"""Decisions as the plugin makes them, on a ledger that is cleared for the container; and what each must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Decision, Inject, Reason, Refuse
from nri_gpu.domain.node import Node
from nri_gpu.ledger.apply import cleared_for
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from tests.support import builders as make
from tests.support.ledgers import decided

NODE: Final = make.node()
POLICY: Final = Policy()
EMPTY: Final = Ledger()


def played(row: Sequence[Container], policy: Policy, node: Node = NODE, ledger: Ledger = EMPTY) -> list[Decision]:
    """Decide for each in turn, on one ledger."""
    decisions = []
    for container in row:
        cleared = cleared_for(ledger, container, 0.0)
        decisions.append(decide(container, node, cleared, policy))
        ledger = decided(cleared, decisions[-1], 0.0)
    return decisions


def injected(container: Container, node: Node = NODE, ledger: Ledger = EMPTY, policy: Policy = POLICY) -> Inject:
    (decision,) = played([container], policy, node, ledger)
    assert isinstance(decision, Inject), decision
    return decision


def refused(container: Container, node: Node = NODE, ledger: Ledger = EMPTY, policy: Policy = POLICY) -> Reason:
    return reason_of(played([container], policy, node, ledger)[0])


def reason_of(decision: Decision, code: Code | None = None) -> Reason:
    """Its reason, a whole sentence."""
    assert isinstance(decision, Refuse), decision
    reason = decision.reason
    assert code in (None, reason.code), reason
    assert str(reason).endswith(".")
    assert not str(reason).endswith(("..", "?."))
    assert len(str(reason)) < REFUSAL_MAX
    return reason
