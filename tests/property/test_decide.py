"""Law: decide is total, deterministic, safe to repeat; an exclusive grant never overlaps.

Total: any annotations, node, ledger and policy end in a Pass, an Inject or a Refuse with a sentence; nothing is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.decision.asked import needs_grant
from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Decision, Inject, Pass, Refuse
from nri_gpu.domain.edits import Mount
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Node
from nri_gpu.injection.driver_mounts import PLACE as COMPAT
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.forms import NOTHING
from nri_gpu.policy.model import DriverCapabilities, Policy
from nri_gpu.request.environment import CAPABILITIES
from tests.property import strategies
from tests.support.ledgers import decided

Key = TypeVar("Key")
Value = TypeVar("Value")
# A refusal cut short may lack what to do; only these two quote somebody else's sentence whole.
QUOTES = frozenset({Code.BAD_POLICY, Code.NODE_NOT_READY})


def any_question_has_an_answer(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    decision = decide(container, node, ledger, policy)
    assert isinstance(decision, Pass | Inject | Refuse)
    assert not (isinstance(decision, Pass) and (decision.edits.devices or decision.edits.mounts))
    event(str(decision.reason.code) if isinstance(decision, Refuse) else type(decision).__name__)
    if isinstance(decision, Refuse):
        text = str(decision.reason)
        assert text.isascii()
        assert text.isprintable()
        assert text.startswith(f"nri-gpu [{decision.reason.code}]: ")
        assert len(text) <= REFUSAL_MAX
        assert text.endswith((".", "?", "!"))
        assert not text.endswith("...") or decision.reason.code in QUOTES


def the_same_question_has_the_same_answer(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    backwards = replace(
        ledger,
        entries=_reversed(ledger.entries),
        external=_reversed(ledger.external),
        releasing=_reversed(ledger.releasing),
        claims=_reversed(ledger.claims),
    )
    first = decide(container, node, ledger, policy)
    assert decide(container, node, ledger, policy) == first
    again = decide(container, node, backwards, policy)
    if isinstance(first, Refuse) and isinstance(again, Refuse):
        assert again.reason.code == first.reason.code  # the holders may be named in another order
    else:
        assert again == first


def asking_twice_gives_the_same_grant(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    first = decide(container, node, ledger, policy)
    after = decided(ledger, first, 0.0)
    assert decide(container, node, after, policy) == first
    assert decided(after, decide(container, node, after, policy), 0.0) == after


def a_grant_overlaps_with_nobody_it_must_not_meet(
    container: Container, node: Node, ledger: Ledger, policy: Policy
) -> None:
    ledger = ledger.without_containers({container.id})
    decision = decide(container, node, ledger, policy)
    if not isinstance(decision, Inject):
        return
    new = strategies.capacity_faults(decided(ledger, decision, 0.0))
    assert not [fault for fault in new if container.id in fault.split(" and ")]
    if decision.grant.mode is Mode.EXCLUSIVE:
        abroad = {uuid for other in ledger.external.values() for uuid in other.held}
        assert abroad.isdisjoint(decision.grant.uuids)


def _but_cuda(mounts: Mapping[str, Mount]) -> dict[str, Mount]:
    """Which CUDA it gets beside its GPUs, what the environment says may decide."""
    return {place: mount for place, mount in mounts.items() if place != COMPAT}


def _unmet(decision: Decision) -> bool:
    return isinstance(decision, Refuse) and decision.reason.code is Code.REQUIREMENT_NOT_MET


@settings(max_examples=100)
@given(strategies.containers(), strategies.nodes, strategies.ledgers, strategies.policies, strategies.env)
def test_the_environment_never_grants_unless_policy_lets_it_ask(
    container: Container, node: Node, ledger: Ledger, policy: Policy, env: dict[str, str]
) -> None:
    container = replace(container, env_twice=frozenset())  # these may refuse what policy wants disarmed
    if not policy.fault:
        asks_nothing = replace(policy.environment, may_ask=NOTHING, driver_capabilities=DriverCapabilities.IGNORE)
        policy = replace(policy, environment=asks_nothing)
    one = decide(container, node, ledger, policy)
    other = decide(replace(container, env=env), node, ledger, policy)
    if _unmet(one) or _unmet(other):  # what an image requires can cost it its grant, and nothing else
        assert all(isinstance(each, Inject) or _unmet(each) for each in (one, other))
        return
    assert type(one) is type(other)
    if isinstance(one, Inject) and isinstance(other, Inject):
        assert replace(one.grant, generation="") == replace(other.grant, generation="")
        assert one.edits.devices == other.edits.devices
        assert _but_cuda(one.edits.mounts) == _but_cuda(other.edits.mounts)


@settings(max_examples=100)
@given(
    strategies.containers(),
    strategies.nodes,
    strategies.ledgers,
    strategies.policies,
    strategies.parts_of_the_driver,
    st.sampled_from(DriverCapabilities),
)
def test_what_names_parts_of_the_driver_costs_nobody_a_grant_and_gives_nobody_a_gpu(
    container: Container, node: Node, ledger: Ledger, policy: Policy, value: str, how: DriverCapabilities
) -> None:
    """Which GPUs, and how they are held, is as without the variable; with `ignore`, everything is."""
    policy = replace(policy, environment=replace(policy.environment, driver_capabilities=how))
    others = {name: each for name, each in container.env.items() if name != CAPABILITIES}
    without = decide(replace(container, env=others), node, ledger, policy)
    named = decide(replace(container, env={**others, CAPABILITIES: value}), node, ledger, policy)
    if how is DriverCapabilities.IGNORE:
        assert (replace(named, left_out="") if isinstance(named, Inject) else named) == without
    if isinstance(without, Inject) and not _unmet(named):  # a newer CUDA comes with compute alone
        assert isinstance(named, Inject)
        assert (named.grant.uuids, named.grant.mode, named.completes) == (
            without.grant.uuids,
            without.grant.mode,
            without.completes,
        )
    elif isinstance(without, Pass):
        assert named == without
    # A default that policy or node cannot serve is one thing, and who may have no GPU at all another.
    if isinstance(without, Refuse) and isinstance(named, Inject):
        assert without.reason.code in (Code.NOT_ALLOWED, Code.NODE_NOT_READY, Code.VOLUME_IN_THE_WAY)


def whatever_got_gpus_was_bound_to_have_a_grant_and_what_passes_was_not(
    container: Container, node: Node, ledger: Ledger, policy: Policy
) -> None:
    decision = decide(container, node, ledger, policy)
    key = needs_grant(container, policy)
    assert key.isascii()
    if isinstance(decision, Pass):
        assert not key
    if isinstance(decision, Inject) and decision.grant.uuids:
        assert key


LAWS = (
    any_question_has_an_answer,
    the_same_question_has_the_same_answer,
    asking_twice_gives_the_same_grant,
    a_grant_overlaps_with_nobody_it_must_not_meet,
    whatever_got_gpus_was_bound_to_have_a_grant_and_what_passes_was_not,
)


@settings(max_examples=100)
@given(strategies.containers(), strategies.nodes, strategies.ledgers, strategies.policies)
def test_every_law(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    """All of them of one example, since drawing it takes longer than deciding."""
    for law in LAWS:
        law(container, node, ledger, policy)


@given(st.lists(st.tuples(strategies.containers(), strategies.modes), max_size=8), strategies.nodes)
def test_no_row_of_decisions_oversells_a_node(row: list[tuple[Container, Mode]], node: Node) -> None:
    ledger = Ledger()
    for number, (container, mode) in enumerate(row):
        policy = Policy(defaults=replace(Policy().defaults, mode=mode))
        ledger = decided(ledger, decide(container, node, ledger, policy), float(number))
        assert not strategies.capacity_faults(ledger)


def _reversed(mapping: Mapping[Key, Value]) -> dict[Key, Value]:
    return dict([*mapping.items()][::-1])
