"""Tables in the policy file: good ones, each fault with its key path, and what no key shows by itself."""

from __future__ import annotations

import pytest

from nri_gpu.daemon.policy_file import PolicyText, build_policy
from nri_gpu.domain.errors import PolicyError
from nri_gpu.policy.forms import Globs, fields_of
from nri_gpu.policy.parse import parse_policy
from nri_gpu.policy.rules import Pool, PoolList, Rule, RuleList
from nri_gpu.policy.schema import LISTS
from tests.unit.policy.samples import Raw

POOL: Raw = {"name": "big", "device": ["0"]}
CROSS: dict[str, tuple[Raw, str, str]] = {
    "otherwise of an allowance": (
        {"rule": [{"allow": True, "otherwise": "ignore"}]},
        "rule[0].otherwise",
        "goes with allow = false only",
    ),
    "limits of a denial": (
        {"rule": [{"allow": True}, {"allow": False, "limits": {"gpus_per_pod": 1}}]},
        "rule[1].limits",
        "goes with allow = true only",
    ),
    "unknown pool": (
        {"pool": [POOL], "rule": [{"allow": True, "pool": ["big", "bgi"]}]},
        "rule[0].pool[1]",
        'no pool is called "bgi" (did you mean "big"?)',
    ),
    "a pool where there is none": ({"rule": [{"allow": True, "pool": "x"}]}, "rule[0].pool[0]", "there is no [[pool]]"),
    "our own resource injected for others": (
        {"kubelet": {"enabled": True, "inject_for": ["nvidia.com/*"]}},
        "kubelet.inject_for[0]",
        "takes nvidia.com/gpu, which nri-gpu offers to the kubelet itself",
    ),
    "our own MIG resources injected for others": (
        {"kubelet": {"enabled": True, "mig_strategy": "mixed", "inject_for": ["a.b/c", "nvidia.com/mig-*"]}},
        "kubelet.inject_for[1]",
        "takes nvidia.com/mig-1g.10gb",
    ),
    "unknown pool for the kubelet": ({"pool": [POOL], "kubelet": {"pool": "bgi"}}, "kubelet.pool", 'mean "big"?'),
    "pools of one name": ({"pool": [POOL, POOL]}, "pool[1].name", '"big" is the name of pool[0] already'),
    "rules of one name": (
        {"rule": [{"allow": True, "name": "a"}, {"allow": True}, {"allow": True, "name": "a"}]},
        "rule[2].name",
        "is the name of rule[0] already",
    ),
    "a pool of nothing": ({"pool": [{"name": "a"}]}, "pool[0]", "give at least one of device, model"),
    "memory the wrong way round": (
        {"pool": [{"name": "a", "memory_at_least": "2Gi", "memory_at_most": "1Gi"}]},
        "pool[0].memory_at_most",
        "less than memory_at_least",
    ),
}


@pytest.mark.parametrize(("raw", "key", "sentence"), CROSS.values(), ids=CROSS)
def test_what_contradicts_itself_is_refused_with_its_key(raw: Raw, key: str, sentence: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(raw, "f")
    (fault,) = caught.value.faults
    assert fault.key == key
    assert sentence in fault.message


def test_every_fault_of_every_table_comes_at_once_with_its_line() -> None:
    text = (
        '[[rule]]\nallow = "yes"\nnamspace = "x"\n\n[[rule]]\nallow = true\npod = []\n\n'
        '[rule.limits]\ngpus_per_pod = -1\n\n[[pool]]\nname = "a b"\nmemory_at_least = "40GB"\n'
    )
    with pytest.raises(PolicyError) as caught:
        build_policy(PolicyText("f", text))
    assert [(fault.line, fault.key) for fault in caught.value.faults] == [
        (2, "rule[0].allow"),
        (3, "rule[0].namspace"),
        (7, "rule[1].pod"),
        (10, "rule[1].limits.gpus_per_pod"),
        (13, "pool[0].name"),
        (14, "pool[0].memory_at_least"),
    ]


def written_table(table: Rule | Pool) -> Raw:
    """A table as the file has it, without what is left out."""
    each = ((key, field, getattr(table, key)) for key, field in fields_of(type(table)).items())
    return {key: field.form.write(value) for key, field, value in each if value != field.default}


def test_tables_arrive_with_their_types_and_are_written_back_alike() -> None:
    raw: Raw = {
        "rule": [
            {
                "allow": True,
                "namespace": ["a", "b*"],
                "labels": {"x": "y*"},
                "qos": ["burstable"],
                "pool": ["big"],
                "limits": {"gpus_per_pod": 2, "containers_per_gpu": "unlimited"},
            }
        ],
        "pool": [{"name": "big", "model": ["*H100*"], "memory_at_least": "85899345920", "containers_per_gpu": 3}],
    }
    policy = parse_policy(raw, "f")
    (rule,), (pool,) = policy.rule.rules, policy.pool.pools
    assert rule.namespace == Globs(("a", "b*"))
    assert pool.memory_at_least == 80 * 2**30
    written = {name: [written_table(each) for each in tables] for name, tables in (("rule", [rule]), ("pool", [pool]))}
    again = parse_policy(written, "f")
    assert (again.rule, again.pool) == (policy.rule, policy.pool)


def test_a_policy_without_tables_has_none() -> None:
    policy = parse_policy({}, "f")
    assert (policy.rule, policy.pool) == (RuleList(), PoolList())


@pytest.mark.parametrize("name", LISTS)
def test_every_key_of_a_table_explains_itself(name: str) -> None:
    for field in fields_of(LISTS[name]).values():
        assert field.help.endswith(".")
        assert "|" not in field.help
