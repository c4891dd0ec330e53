"""What `check` warns of."""

from __future__ import annotations

import pytest

from nri_gpu.domain.finding import Level
from nri_gpu.policy.findings import advise
from nri_gpu.policy.read import parse_policy
from nri_gpu.policy.rule_findings import advise_for, pattern_covers
from tests.support import builders as make
from tests.unit.policy.samples import Raw

QUIET: dict[str, Raw] = {
    "a list of names": {"namespaces": {"allow": ["a", "b"]}},
    "patterns": {"namespaces": {"allow": ["ml-*", "[ab]-x"]}},
    "names and limits that matter to nobody": {
        "namespaces": {"allow": ["a_B", "b"], "deny": ["b", "c*"]},
        "limits": {"gpus_per_node": 0, "gpus_per_pod": 4},
    },
    "extras for some": {"namespaces": {"allow": ["a"]}, "extras": {"allowed": ["rdma"]}},
    "rules that say who": {"namespaces": {"allow": []}, "rule": [{"namespace": "a", "allow": True}]},
    "rules one after the other": {
        "namespaces": {"allow": ["a"]},
        "rule": [
            {"namespace": "ml-?", "pod": "a*", "allow": True},
            {"namespace": "ml-*", "allow": True, "limits": {"gpus_per_pod": 2}},
            {"labels": {"a": "b"}, "allow": False},
            {"labels": {"a": "*"}, "allow": False},
            {"qos": "burstable", "allow": False},
            {"qos": ["burstable", "guaranteed"], "allow": False},
        ],
    },
    "a pool for somebody": {
        "namespaces": {"allow": ["a"]},
        "pool": [{"name": "a", "device": ["0"], "namespaces": ["a"]}, {"name": "b", "device": ["1"]}],
        "rule": [{"namespace": "b", "allow": True, "pool": "b"}],
    },
    "beside NVIDIA's device plugin": {
        "namespaces": {"allow": ["a"]},
        "kubelet": {"inject_for": ["nvidia.com/gpu"], "reservations": ["kai-resource-reservation"]},
    },
    "lists of XIDs of one's own": {
        "namespaces": {"allow": ["a"]},
        "health": {"ignored_xids": [13, 48], "fatal_xids": [79, 31]},
    },
    "a pool of a kubelet that has every GPU": {
        "namespaces": {"allow": ["a"]},
        "pool": [{"name": "a", "device": ["0"]}],
        "kubelet": {"enabled": True},
    },
    "metrics for this host": {"namespaces": {"allow": ["a"]}, "metrics": {"listen": "127.0.0.1:9464"}},
    "handlers of which one is refused": {
        "namespaces": {"allow": ["a"]},
        "rule": [
            {"namespace": "b", "runtime_handler": ["kata-*", "runc"], "allow": True},
            {"namespace": "c", "runtime_handler": "kata-*", "allow": False},
        ],
    },
    "handlers where none is refused": {
        "namespaces": {"allow": ["a"]},
        "runtimes": {"refuse": []},
        "rule": [{"namespace": "b", "runtime_handler": "kata-*", "allow": True}],
    },
    "a stage that is not public": {"namespaces": {"allow": ["a"]}, "driver": {"stage_dir": "/tmpfs/stage"}},
}


@pytest.mark.parametrize("raw", QUIET.values(), ids=QUIET.keys())
def test_nothing_to_say(raw: Raw) -> None:
    assert advise(parse_policy(raw, "f")) == ()


@pytest.mark.parametrize(("deny", "but"), [([], ""), (["kube-*"], " but those of namespaces.deny")])
def test_that_everybody_may_ask_is_a_note_where_the_file_says_so_and_nowhere_else(deny: list[str], but: str) -> None:
    """A default is nobody's decision, and no other key, nor the daemon's options, makes it one."""
    lists = {"deny": deny, "otherwise": "refuse"}
    [written] = advise(parse_policy({"namespaces": {**lists, "allow": ["*"]}}, "f"))
    assert (written.level, written.fix) == (Level.NOTE, ())
    assert written.meaning.startswith(f"every namespace{but} may ask, as namespaces.allow in f says: everyone who can")
    [default] = advise(parse_policy({"namespaces": lists, "audit": {"max_mib": 5}}, "f"))
    assert (default.level, bool(default.fix)) == (Level.WARNING, True)


ADVICE: dict[str, tuple[Raw, str]] = {
    "everybody": ({}, "every namespace may ask"),
    "handlers that are all refused": (
        {
            "namespaces": {"allow": ["a"]},
            "runtimes": {"refuse": ["kata*", "vm"]},
            "rule": [{"namespace": "b", "runtime_handler": ["kata-qemu", "kata-?", "vm"], "allow": True}],
        },
        "rule[0] allows only runtime handlers that runtimes.refuse refuses",
    ),
    "everybody but some": (
        {"namespaces": {"deny": ["kube-*"]}},
        "every namespace but those of namespaces.deny may ask",
    ),
    "a list of an earlier file": (
        {"health": {"ignored_xids": [154, 13, 31, 43, 45, 68, 109]}},
        "health.ignored_xids is the list that an earlier version's policy file came with, and counts as not given",
    ),
    "another list of an earlier file": (
        {"health": {"fatal_xids": [48, 62, 64, 74, 79, 95, 119, 120, 140, 143], "ignored_xids": [48]}},
        "health.fatal_xids is the list that an earlier version's policy file came with, and counts as not given",
    ),
    "nobody": ({"namespaces": {"allow": []}}, "namespaces.allow is empty: no container"),
    "everybody denied": ({"namespaces": {"deny": ["*"]}}, 'namespaces.deny has "*": no container'),
    "defaults that are not allowed": (
        {"capabilities": {"allowed": ["utility", "video"]}, "defaults": {"capabilities": ["video"]}},
        "defaults.capabilities needs compute, which capabilities.allowed does not list",
    ),
    "silence": ({"namespaces": {"otherwise": "ignore"}}, "starts without GPUs"),
    "disarming": ({"environment": {"disarm": "all"}}, "device plugin"),
    "extras for everybody": (
        {"extras": {"allowed": ["drm", "firmware", "rdma", "imex"]}},
        "extras.allowed lists imex, rdma, which reach beyond",
    ),
    "a shadowed rule": (
        {"rule": [{"name": "all-ml", "namespace": "ml-*", "allow": True}, {"namespace": "ml-x", "allow": False}]},
        'rule[1] can never decide: rule[0] "all-ml" before it matches all that it matches',
    ),
    "a rule for all": (
        {"rule": [{"pod": "x", "allow": True}, {"allow": False}]},
        "rule[1] matches all, so namespaces.allow and namespaces.deny change nothing",
    ),
    "a default mode that a rule refuses": (
        {"rule": [{"namespace": "x", "allow": True, "modes": ["shared"]}]},
        "rule[0]: its own default is refused: mode exclusive may not be asked for",
    ),
    "default extras that are not allowed": (
        {"defaults": {"extras": ["rdma"]}},
        "defaults.extras gives rdma, which extras.allowed does not list",
    ),
    "a part never allowed": (
        {"capabilities": {"allowed": ["utility", "compute", "display"]}},
        "capabilities.allowed lists display, never allowed: it brings graphics",
    ),
    "a part that a rule never allows": (
        {"rule": [{"namespace": "x", "allow": True, "capabilities": ["compute", "utility", "display"]}]},
        "rule[0].capabilities lists display, never allowed",
    ),
    "labels alone": (
        {"rule": [{"labels": {"gpu": "yes"}, "allow": True}]},
        "rule[0] allows by labels alone",
    ),
    "default mode that is not allowed": ({"modes": {"allowed": ["shared"]}}, "defaults.mode is exclusive, which modes"),
    "a pool for nobody": ({"pool": [{"name": "a", "device": ["0"]}]}, 'pool[0] "a" is unused'),
    "a pool of a kubelet that is not served": (
        {"pool": [{"name": "a", "device": ["0"]}], "kubelet": {"pool": "a"}},
        'pool[0] "a" is that of kubelet.pool, but kubelet.enabled is not set',
    ),
    "a pool of a resource that is not served": (
        {"pool": [{"name": "a", "device": ["0"]}], "kubelet": {"resources": {"a.io/a": "a"}}},
        'pool[0] "a" is that of kubelet.resources, but kubelet.enabled is not set',
    ),
    "a pool of claims that are not served": (
        {"pool": [{"name": "a", "device": ["0"]}], "dra": {"pool": "a"}},
        'pool[0] "a" is that of dra.pool, but dra.enabled is not set',
    ),
    "a pool of some namespaces that claims of all get": (
        {"pool": [{"name": "a", "device": ["0"], "namespaces": ["ml"]}], "dra": {"enabled": True}},
        'pool[0] "a" is kept for some namespaces, but ResourceClaims of every namespace get its GPUs',
    ),
    "environment": ({"environment": {"may_ask": ["x"]}}, "makes every image with NVIDIA_VISIBLE_DEVICES ask"),
    "beside others, and the kubelet not asked": (
        {"kubelet": {"inject_for": ["nvidia.com/gpu"], "podresources": ""}},
        "need kubelet.podresources",
    ),
    "beside others, and the environment a request": (
        {"kubelet": {"inject_for": ["nvidia.com/gpu"]}, "environment": {"may_ask": ["a"]}},
        "environment.may_ask changes little with kubelet.inject_for",
    ),
    "reservations of nobody's": (
        {"kubelet": {"reservations": ["kai"]}},
        "kubelet.reservations needs kubelet.inject_for",
    ),
    "reservations anywhere": (
        {"kubelet": {"enabled": True, "reservations": ["*"]}},
        'kubelet.reservations has "*"',
    ),
    "all, of nobody": ({"environment": {"may_ask_all": True}}, "environment.may_ask lists no namespace"),
    "all, of everybody": (
        {"environment": {"may_ask": ["*"], "may_ask_all": True}},
        "each container of a CUDA image takes every free GPU",
    ),
    "stale at once": (
        {"inventory": {"stale": "refuse", "stale_after_s": 60}},
        "requests are refused between two queries",
    ),
    "privileged": ({"privileged": {"action": "deny"}}, "keep these out by an admission policy"),
    "public stage": ({"driver": {"stage_dir": "/tmp/stage"}}, "driver.stage_dir"),
    "public metrics": (
        {"metrics": {"listen": "0.0.0.0:9464", "public": True}},
        "metrics.public = true: whoever reaches 0.0.0.0:9464",
    ),
    "a guard that comes first": (
        {"plugin": {"index": "90"}},
        'guard.index = "90" is not behind plugin.index = "90"',
    ),
}


@pytest.mark.parametrize(("raw", "sentence"), ADVICE.values(), ids=ADVICE.keys())
def test_said(raw: Raw, sentence: str) -> None:
    advice = advise(parse_policy(raw, "f"))
    assert any(sentence in each.meaning for each in advice), advice
    assert all(each.meaning.isascii() and len(each.meaning) < 400 for each in advice)


def test_a_generated_policy_is_told_about_in_a_few_sentences() -> None:
    rules = [{"pod": "*", "allow": True}, *({"namespace": f"n{n}", "allow": True} for n in range(3000))]
    advice = advise(parse_policy({"rule": rules}, "f"))
    assert len(advice) < 40
    assert "2,980 more rules can never decide" in [each.meaning for each in advice]


NODE = make.inventory([make.gpu(0), make.gpu(1), make.mig_gpu(2, ("1g.5gb", "1g.5gb"))])
ON_NODE: dict[str, tuple[Raw, str]] = {
    "nothing fits a resource's pool": (
        {"pool": [{"name": "a", "model": "*B200*"}], "kubelet": {"resources": {"a.io/b200": "a"}}},
        "its selectors fit none; a.io/b200 is offered without devices",
    ),
    "nothing fits": (
        {"pool": [{"name": "a", "model": "*B200*"}]},
        'pool[0] "a" has no GPU of this node: its selectors',
    ),
    "an earlier pool takes all": (
        {"pool": [{"name": "a", "device": ["0", "1"]}, {"name": "b", "device": ["1"]}]},
        'pool[1] "b" has no GPU of this node: those that fit are in pool a before it',
    ),
    "a limit above all": (
        {"limits": {"gpus_per_node": 4}},
        "limits.gpus_per_node = 4 can never bind: this node has 4 GPUs (a MIG device counts as one)",
    ),
}


@pytest.mark.parametrize(("raw", "sentence"), ON_NODE.values(), ids=ON_NODE)
def test_said_of_a_node(raw: Raw, sentence: str) -> None:
    (said,) = advise_for(parse_policy(raw, "f"), NODE)
    assert sentence in said.meaning


def test_nothing_to_say_of_a_node() -> None:
    raw = {
        "limits": {"gpus_per_node": 3},
        "pool": [{"name": "a", "mig": ["1g.5gb"]}, {"name": "b", "device": ["2:0", "0"]}],
    }
    assert advise_for(parse_policy(raw, "f"), NODE) == ()


# That what is said to be covered matches no less is a law of test_rules.py: these are what is said at all.
COVERS = {
    ("*", "a?"): True,
    ("a*", "a-*"): True,
    ("a?", "ab"): True,
    ("*-x", "a*-x"): True,
    ("[ab]", "[ab]"): True,
    ("a?", "a*"): False,
}


@pytest.mark.parametrize(("pair", "covers"), COVERS.items(), ids=str)
def test_which_pattern_takes_all_of_another(pair: tuple[str, str], covers: bool) -> None:
    assert pattern_covers(*pair) is covers
