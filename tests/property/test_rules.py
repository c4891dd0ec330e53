"""Laws: the first rule that matches decides, as a reader would find it; no row of decisions goes over a limit.

And what is in a pool goes to nobody whom the pool does not know.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container, Qos
from nri_gpu.domain.decision import Inject, Refuse
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rule_findings import covers
from nri_gpu.policy.rules import Rule, RuleList
from nri_gpu.policy.select import Allowed, select
from tests.property import strategies
from tests.support import builders as make
from tests.support.ledgers import decided

MANY = settings(max_examples=150)
NODE = make.node([make.gpu(0), make.gpu(1), make.gpu(2), make.mig_gpu(3, ("1g.5gb", "1g.5gb", "3g.20gb"))])
NAMESPACES = {"a": "ml", "b": "ml", "c": "x"}
CLAIMS = (
    "1",
    "2",
    "all;mode=shared",
    "1;mode=shared",
    "2;mode=shared",
    "device=0;mode=shared",
    "mig=1g.5gb;mode=shared",
)
# Rows that get somewhere: all ask, and nothing but limits and pools is in the way.
asking = st.builds(
    lambda pod, name, claim: make.container(of=make.pod(pod, claim, namespace=NAMESPACES[pod]), name=name),
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["main", "side", "more"]),
    st.sampled_from(CLAIMS),
)
limiting = st.builds(
    lambda limits, tables: Policy(limits=limits, pool=tables[1], rule=RuleList(tuple(map(_sharing, tables[0].rules)))),
    strategies.limits,
    strategies.rules_and_pools(),
)


def _sharing(rule: Rule) -> Rule:
    """Without a limit of sharers of its own: which of two rules' limits holds for a GPU depends on who comes last."""
    own = tuple((key, value) for key, value in rule.limits or () if key != "containers_per_gpu")
    return replace(rule, limits=own or None)


def naive(rules: tuple[Rule, ...], of: Container) -> int | None:
    """As the documentation tells it, one rule after the other."""
    return next((index for index, rule in enumerate(rules) if _is_about(rule, of)), None)


def _is_about(rule: Rule, of: Container) -> bool:
    names = {
        "namespace": of.pod.namespace,
        "pod": of.pod.name,
        "container": of.name,
        "runtime_handler": of.pod.runtime_handler,
    }
    if any(not _any(getattr(rule, key), name) for key, name in names.items()):
        return False
    labelled = all(key in of.pod.labels and _any(globs, of.pod.labels[key]) for key, globs in rule.labels or ())
    return labelled and (rule.qos is None or _qos(of.pod.cgroup_parent) in rule.qos)


def _any(globs: Globs | None, name: str) -> bool:
    return globs is None or any(fnmatchcase(name, pattern) for pattern in globs.patterns)


def _qos(cgroup: str) -> Qos | None:
    if "besteffort" in cgroup or "burstable" in cgroup:
        return Qos.BESTEFFORT if "besteffort" in cgroup else Qos.BURSTABLE
    return Qos.GUARANTEED if "pod1" in cgroup else None


@given(st.lists(strategies.rules_of(), max_size=12), strategies.containers())
def test_the_first_rule_that_matches_decides(some: list[Rule], of: Container) -> None:
    index, verdict = naive(tuple(some), of), str(select(Policy(rule=RuleList(tuple(some))), of))
    assert "rule[" not in verdict if index is None else f"rule[{index}]" in verdict


@MANY
@given(strategies.containers(), strategies.policies, st.lists(strategies.rules_of(), max_size=3))
def test_rules_behind_one_that_decides_change_nothing(of: Container, policy: Policy, more: list[Rule]) -> None:
    if policy.fault or naive(policy.rule.rules, of) is None:
        return
    longer = replace(policy, rule=RuleList((*policy.rule.rules, *more)))
    assert select(longer, of) == select(policy, of)


@MANY
@given(strategies.rules_of(), strategies.rules_of(), strategies.containers())
def test_a_rule_said_to_cover_another_matches_whatever_that_does(broad: Rule, narrow: Rule, of: Container) -> None:
    if covers(broad, narrow) and narrow.matches(of):
        assert broad.matches(of)


@MANY
@given(st.lists(asking, min_size=2, max_size=8), limiting)
def test_no_row_of_decisions_goes_over_a_limit(row: list[Container], policy: Policy) -> None:
    ledger = Ledger()
    for number, container in enumerate(row):
        before, decision = ledger, decide(container, NODE, ledger, policy)
        ledger = decided(ledger, decision, float(number))
        event(str(decision.reason.code) if isinstance(decision, Refuse) else type(decision).__name__)
        verdict = select(policy, container)
        if isinstance(decision, Inject) and decision.grant.uuids and isinstance(verdict, Allowed):
            limits = verdict.terms.limits
            counts, old = counted(ledger, container), counted(before, container)
            grown = {key for key in counts if counts[key] - old[key]}
            assert [key for key in grown if len(counts[key]) > getattr(limits, key)] == []
            assert len(decision.grant.uuids) <= limits.gpus_per_container
            assert before.entries.get(container.id) or shared_too_often(decision, ledger, policy) == []


def counted(ledger: Ledger, of: Container) -> dict[str, set[GpuUuid]]:
    """What is held, with no word of the code that is tried."""
    grants = [entry.grant for entry in ledger.entries.values() if entry.holds]
    of_space = [each for each in grants if each.namespace == of.pod.namespace]
    groups = {
        "gpus_per_pod": [each for each in grants if each.pod_uid == of.pod.uid],
        "gpus_per_namespace": of_space,
        "exclusive_gpus_per_namespace": [each for each in of_space if each.mode is Mode.EXCLUSIVE],
        "gpus_per_node": grants,
    }
    return {key: {uuid for each in some for uuid in each.uuids} for key, some in groups.items()}


def shared_too_often(decision: Inject, ledger: Ledger, policy: Policy) -> list[GpuUuid]:
    """GPUs of a grant with more sharers than their pool, or the whole policy, lets have."""
    if decision.grant.mode is not Mode.SHARED:
        return []
    members = policy.pool.members(NODE.inventory)
    caps = {uuid: members[uuid].containers_per_gpu if uuid in members else None for uuid in decision.grant.uuids}
    sharers = {uuid: sum(uuid in each.grant.uuids for each in ledger.entries.values() if each.holds) for uuid in caps}
    return [uuid for uuid, cap in caps.items() if sharers[uuid] > (cap or policy.limits.containers_per_gpu)]


@MANY
@given(st.lists(asking, max_size=6), limiting)
def test_what_is_in_a_pool_goes_to_nobody_else(row: list[Container], policy: Policy) -> None:
    ledger = Ledger()
    for container in row:
        decision = decide(container, NODE, ledger, policy)
        ledger = decided(ledger, decision, 0.0)
        if not isinstance(decision, Inject) or not decision.grant.uuids:
            continue
        index = naive(policy.rule.rules, container)
        wanted = policy.rule.rules[index].pool if index is not None else None
        for unit in NODE.inventory.units:
            if unit.uuid in decision.grant.uuids:
                pool = next((pool for pool in policy.pool.pools if pool.has(unit)), None)
                if wanted is not None:
                    assert pool is not None
                    assert pool.name in wanted.patterns
                elif pool is not None:
                    assert _any(pool.namespaces or Globs(()), container.pod.namespace)
