"""The strict parser: each rule, faults between keys, and all faults at once."""

from __future__ import annotations

import datetime

import pytest

from nri_gpu.domain.container import Qos
from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.policy.forms import UNLIMITED, Globs
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import override, parse_policy
from nri_gpu.records.policy_file import PolicyText, build_policy
from tests.unit.policy.samples import BAD, GOOD, Raw

# What no key shows by itself.
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
    "unknown pool for the kubelet": ({"pool": [POOL], "kubelet": {"pool": "bgi"}}, "kubelet.pool", 'mean "big"?'),
    "unknown pool for a resource": (
        {"pool": [POOL], "kubelet": {"resources": {"nvidia.com/l40s": "bgi"}}},
        'kubelet.resources."nvidia.com/l40s"',
        'no pool is called "bgi" (did you mean "big"?)',
    ),
    "no pool for a resource": (
        {"pool": [POOL], "kubelet": {"resources": {"nvidia.com/l40s": ""}}},
        'kubelet.resources."nvidia.com/l40s"',
        "must be a pool's name",
    ),
    "a resource without a prefix": (
        {"pool": [POOL], "kubelet": {"resources": {"l40s": "big"}}},
        "kubelet.resources.l40s",
        "the resource must be a resource such as nvidia.com/gpu",
    ),
    "a resource of 41 characters": (
        {"pool": [POOL], "kubelet": {"resources": {f"nvidia.com/{'x' * 30}": "big"}}},
        f'kubelet.resources."nvidia.com/{"x" * 30}"',
        "the resource has 41 characters, over the limit of 40",
    ),
    "resources that are no table": (
        {"kubelet": {"resources": ["nvidia.com/l40s"]}},
        "kubelet.resources",
        "must be a table of resource = pool, not an array",
    ),
    "two resources for one pool": (
        {"pool": [POOL], "kubelet": {"resources": {"nvidia.com/a": "big", "nvidia.com/b": "big"}}},
        'kubelet.resources."nvidia.com/b"',
        'pool "big" is that of nvidia.com/a already',
    ),
    "a pool beside resources": (
        {"pool": [POOL], "kubelet": {"pool": "big", "resources": {"nvidia.com/a": "big"}}},
        "kubelet.pool",
        "goes without kubelet.resources: list kubelet.resource there",
    ),
    "the name of a profile's resource": (
        {"pool": [POOL], "kubelet": {"mig_strategy": "mixed", "resources": {"nvidia.com/mig-a": "big"}}},
        'kubelet.resources."nvidia.com/mig-a"',
        "names that begin with mig- are those of MIG profiles",
    ),
    "our own resource of a pool injected for others": (
        {
            "pool": [POOL],
            "kubelet": {"enabled": True, "inject_for": ["nvidia.com/l*"], "resources": {"nvidia.com/l40s": "big"}},
        },
        "kubelet.inject_for[0]",
        "takes nvidia.com/l40s, which nri-gpu offers to the kubelet itself",
    ),
    "a profile of another prefix of ours injected for others": (
        {
            "pool": [POOL],
            "kubelet": {
                "enabled": True,
                "mig_strategy": "mixed",
                "replicas": 2,
                "rename": True,
                "inject_for": ["b.io/mig-*"],
                "resources": {"b.io/gpu": "big"},
            },
        },
        "kubelet.inject_for[0]",
        "takes b.io/mig-1g.10gb.shared, which",
    ),
    "two ways, one of which has the rest": (
        {
            "pool": [POOL, {"name": "small", "device": ["1"]}],
            "kubelet": {"enabled": True, "resources": {"nvidia.com/a": "big"}},
            "dra": {"enabled": True, "pool": "small"},
        },
        "dra.pool",
        "set dra.pool to a [[pool]] that kubelet.resources does not list, and list kubelet.resource there",
    ),
    "unknown pool for claims": ({"pool": [POOL], "dra": {"pool": "bgi"}}, "dra.pool", 'mean "big"?'),
    "two ways to the same GPUs": ({"kubelet": {"enabled": True}, "dra": {"enabled": True}}, "dra.pool", "counts them"),
    "two ways to one pool": (
        {"pool": [POOL], "kubelet": {"enabled": True, "pool": "big"}, "dra": {"enabled": True, "pool": "big"}},
        "dra.pool",
        "set dra.pool and kubelet.pool to two different [[pool]]s",
    ),
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
    "an XID of two lists": (
        {"health": {"fatal_xids": [79, 31], "ignored_xids": [31]}},
        "health.fatal_xids",
        "31: in ignored_xids too",
    ),
}


# File, the options over it, and the faults of both together: file, key, line, words.
BOTH: Raw = {"kubelet": {"enabled": True}, "dra": {"enabled": True}}
TWO_POOLS: Raw = {
    "pool": [POOL, {"name": "small", "device": ["1"]}],
    "kubelet": {"pool": "big"},
    "dra": {"pool": "small"},
}
WAYS: dict[str, object] = {"kubelet.enabled": True, "dra.enabled": True}
TWICE = "would both offer the same GPUs to the scheduler"
LINES = {"dra.pool": 4, "metrics.listen": 9, "kubelet.inject_for": 7, "pool": 5, "kubelet.pool": 3}
Found = tuple[str, str, int | None, str]
OVER: dict[str, tuple[Raw, dict[str, object], tuple[Found, ...]]] = {
    "a second way to the same GPUs": (
        {"dra": {"enabled": True}},
        {"kubelet.enabled": True},
        (("command line", "--kubelet", None, TWICE),),
    ),
    "the other way round": (
        {"kubelet": {"enabled": True}},
        {"dra.enabled": True, "kubelet.enabled": True},
        (("command line", "--dra", None, TWICE),),
    ),
    "two ways without a file's word": ({}, WAYS, (("command line", "--dra, --kubelet", None, TWICE),)),
    "two ways, two pools": (TWO_POOLS, WAYS, ()),
    "two ways in the file, and one of them off": (BOTH, {"kubelet.enabled": False}, ()),
    "two ways in the file, said again": (BOTH, WAYS, (("f", "dra.pool", 4, TWICE),)),
    "two ways in the file, and options that change neither": (
        BOTH,
        {"plugin.index": "20", "dra.enabled": None, "kubelet.registration": "watcher"},
        (("f", "dra.pool", 4, TWICE),),
    ),
    "our own resource injected for others": (
        {"kubelet": {"inject_for": ["example.com/gpu", "nvidia.com/*"]}},
        {"kubelet.enabled": True},
        (("command line", "--kubelet", None, '"nvidia.com/*" in kubelet.inject_for takes nvidia.com/gpu'),),
    ),
    "nothing of ours to inject for": (
        {"kubelet": {"enabled": True, "inject_for": ["nvidia.com/*"]}},
        {"kubelet.enabled": False},
        (),
    ),
    "metrics for everybody": (
        {"metrics": {"listen": "127.0.0.1:9464"}},
        {"metrics.listen": "0.0.0.0:9464"},
        (("command line", "--metrics", None, "0.0.0.0 is not this machine's loopback"),),
    ),
    "metrics for everybody in both": (
        {"metrics": {"listen": "0.0.0.0:9464"}},
        {"metrics.listen": "[::]:9999"},
        (("command line", "--metrics", None, ":: is not this machine's loopback"),),
    ),
    "no such port": (
        {},
        {"metrics.listen": "127.0.0.1:99999"},
        (("command line", "--metrics", None, "is over 65535"),),
    ),
    "metrics that an option makes public": ({"metrics": {"listen": "0.0.0.0:9464"}}, {"metrics.public": True}, ()),
    "metrics that an option moves": ({"metrics": {"listen": "0.0.0.0:9464"}}, {"metrics.listen": "/run/m.sock"}, ()),
    "all at once, the file's first": (
        {"pool": [{"name": "a"}], "kubelet": {"inject_for": ["nvidia.com/gpu"], "pool": "b"}},
        {**WAYS, "metrics.listen": "0.0.0.0:1"},
        (
            ("f", "kubelet.pool", 3, 'no pool is called "b"'),
            ("f", "pool[0]", 5, "has no selector"),
            ("command line", "--metrics", None, "0.0.0.0 is not"),
            ("command line", "--dra, --kubelet", None, TWICE),
            ("command line", "--kubelet", None, "in kubelet.inject_for takes"),
        ),
    ),
}


@pytest.mark.parametrize(("raw", "options", "expected"), OVER.values(), ids=OVER)
def test_the_file_and_the_options_over_it_are_checked_together(
    raw: Raw, options: dict[str, object], expected: tuple[Found, ...]
) -> None:
    """A fault stands where its author can mend it: under the option if that made it, else in the file."""
    found: tuple[Fault, ...] = ()
    try:
        policy = parse_policy(raw, "f", LINES, options)
        assert policy == override(parse_policy(raw, "f", all_options=False), options)
    except PolicyError as error:
        found = error.faults
    assert [(each.file, each.key, each.line) for each in found] == [
        (file, key, line) for file, key, line, _ in expected
    ]
    for fault, (*_, words) in zip(found, expected, strict=True):
        assert words in fault.message
        assert str(fault).isascii()


def test_what_options_may_mend_is_no_fault_for_those_who_do_not_know_them() -> None:
    mended: Raw = {**BOTH, "metrics": {"listen": "0.0.0.0:9464"}}
    policy = parse_policy(mended, "f", all_options=False)
    assert (policy.kubelet.enabled, policy.dra.enabled) == (True, True)
    with pytest.raises(PolicyError, match="no selector"):
        parse_policy({**mended, "pool": [{"name": "a"}]}, "f", all_options=False)


@pytest.mark.parametrize("raw", GOOD.values(), ids=GOOD.keys())
def test_taken(raw: Raw) -> None:
    policy = parse_policy(raw, "policy.toml")
    assert policy.source == "policy.toml"


@pytest.mark.parametrize(("raw", "key", "sentence"), (BAD | CROSS).values(), ids=BAD | CROSS)
def test_refused_with_its_key(raw: Raw, key: str, sentence: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(raw, "policy.toml")
    (fault,) = caught.value.faults
    assert (fault.file, fault.key) == ("policy.toml", key)
    assert sentence in fault.message
    assert str(fault).isascii()
    assert len(fault.message) < 320  # the longest lists every section


def test_an_item_of_a_list_has_the_line_of_its_list() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy({"namespaces": {"allow": ["", 1]}}, "f", {"namespaces.allow": 7})
    assert [(fault.key, fault.line) for fault in caught.value.faults] == [
        ("namespaces.allow[0]", 7),
        ("namespaces.allow[1]", 7),
    ]


def test_types_that_only_toml_has_are_named() -> None:
    with pytest.raises(PolicyError, match="not a date or time"):
        parse_policy({"inventory": {"refresh_s": datetime.date(2026, 1, 1)}}, "f")


def test_an_option_goes_over_the_file() -> None:
    policy = override(
        parse_policy({"plugin": {"socket": "/a", "index": "20"}}, "f"),
        {"plugin.socket": "/b", "plugin.index": None, "driver.root": "/usr/local/nvidia/"},
    )
    assert (policy.plugin.socket, policy.plugin.index, policy.driver.root) == ("/b", "20", "/usr/local/nvidia")
    assert policy.source == "f"


def test_faults_of_options_carry_the_option_s_name() -> None:
    with pytest.raises(PolicyError) as caught:
        override(Policy.default(), {"plugin.socket": "b", "plugin.index": "1", "guard.name": ""})
    assert [(fault.file, fault.key) for fault in caught.value.faults] == [
        ("command line", "--socket"),
        ("command line", "--index"),
        ("command line", "guard.name"),
    ]
    assert str(caught.value.faults[1]) == str(
        Fault("command line", "--index", 'must be two digits in quotes, such as "10", not "1"')
    )


def test_every_fault_comes_at_once_with_its_line() -> None:
    text = (
        "schema = 9\nodd = 0\n\n[plugin]\nindex = 1\n\n[ledger]\ncreated_grace_s = 1\nx = 1\n\n"
        '[[rule]]\nallow = "yes"\nnamspace = "x"\n\n[[rule]]\nallow = true\npod = []\n\n'
        '[rule.limits]\ngpus_per_pod = -1\n\n[[pool]]\nname = "a b"\nmemory_at_least = "40GB"\n'
    )
    with pytest.raises(PolicyError) as caught:
        build_policy(PolicyText("f", text))
    assert [(fault.line, fault.key) for fault in caught.value.faults] == [
        (1, "schema"),
        (2, "odd"),
        (5, "plugin.index"),
        (8, "ledger.created_grace_s"),
        (9, "ledger.x"),
        (12, "rule[0].allow"),
        (13, "rule[0].namspace"),
        (17, "rule[1].pod"),
        (20, "rule[1].limits.gpus_per_pod"),
        (23, "pool[0].name"),
        (24, "pool[0].memory_at_least"),
    ]


def test_tables_arrive_with_their_types() -> None:
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
    assert rule.labels == (("x", Globs(("y*",))),)
    assert rule.qos == frozenset({Qos.BURSTABLE})
    assert dict(rule.limits or ()) == {"gpus_per_pod": 2, "containers_per_gpu": UNLIMITED}
    assert (pool.memory_at_least, pool.containers_per_gpu) == (80 * 2**30, 3)


def test_resources_of_pools_beside_claims() -> None:
    """Where `resource` has a pool of its own, what is in no listed pool is free for claims."""
    raw = TWO_POOLS | {"kubelet": {"enabled": True, "resources": {"nvidia.com/gpu": "big"}}}
    policy = parse_policy(raw | {"dra": {"enabled": True, "pool": "small"}}, "f")
    assert policy.kubelet.resources == (("nvidia.com/gpu", "big"),)
    assert [policy.kubelet.resource_of(pool) for pool in ("big", "small", "")] == ["nvidia.com/gpu", None, None]
