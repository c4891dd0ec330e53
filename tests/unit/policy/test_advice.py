"""What `check` warns of."""

from __future__ import annotations

import pytest

from nri_gpu.policy.advice import advise
from nri_gpu.policy.parse import parse_policy
from tests.unit.policy.samples import Raw

QUIET: dict[str, Raw] = {
    "a list of names": {"namespaces": {"allow": ["a", "b"]}},
    "patterns": {"namespaces": {"allow": ["ml-*", "[ab]-x"]}},
    "a denial that bites": {"namespaces": {"allow": ["ml-*"], "deny": ["ml-sandbox"]}},
    "extras for some": {"namespaces": {"allow": ["a"]}, "extras": {"allowed": ["rdma"]}},
    "a stage that is not public": {"namespaces": {"allow": ["a"]}, "driver": {"stage_dir": "/tmpfs/stage"}},
}


@pytest.mark.parametrize("raw", QUIET.values(), ids=QUIET.keys())
def test_nothing_to_say(raw: Raw) -> None:
    assert advise(parse_policy(raw, "f")) == ()


ADVICE: dict[str, tuple[Raw, str]] = {
    "everybody": ({}, "every namespace may ask"),
    "everybody but some": (
        {"namespaces": {"deny": ["kube-*"]}},
        "every namespace but those of namespaces.deny may ask",
    ),
    "nobody": ({"namespaces": {"allow": []}}, "namespaces.allow is empty: no container"),
    "everybody denied": ({"namespaces": {"deny": ["*"]}}, 'namespaces.deny has "*": no container'),
    "others beside everybody": ({"namespaces": {"allow": ["*", "a"]}}, "its other patterns change nothing"),
    "upper case": ({"namespaces": {"allow": ["a"], "deny": ["A"]}}, "can never match a Kubernetes namespace"),
    "underscore": ({"namespaces": {"allow": ["a_b"]}}, "names have no _"),
    "too long a name": ({"namespaces": {"allow": ["a" * 64 + "*"]}}, "at most 63 characters"),
    "begins with a dash": ({"namespaces": {"allow": ["-a"]}}, "begin and end with a letter or digit"),
    "allowed and denied": (
        {"namespaces": {"allow": ["b", "kube-x"], "deny": ["kube-*", "b"]}},
        'namespaces.allow[1] = "kube-x" changes nothing: namespaces.deny[0]',
    ),
    "pattern allowed and denied": (
        {"namespaces": {"allow": ["b", "k*"], "deny": ["k*"]}},
        'namespaces.allow[1] = "k*" changes nothing: namespaces.deny[0]',
    ),
    "denied though not listed": (
        {"namespaces": {"allow": ["a", "b"], "deny": ["c*"]}},
        'namespaces.deny[0] = "c*" changes nothing: namespaces.allow lists no such name',
    ),
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
    "public stage": ({"driver": {"stage_dir": "/tmp/stage"}}, "driver.stage_dir"),
    "public root": ({"driver": {"root": "/var/tmp"}}, "driver.root"),
}


@pytest.mark.parametrize(("raw", "sentence"), ADVICE.values(), ids=ADVICE.keys())
def test_said(raw: Raw, sentence: str) -> None:
    advice = advise(parse_policy(raw, "f"))
    assert any(sentence in each for each in advice), advice
    assert all(each.isascii() and len(each) < 400 for each in advice)
