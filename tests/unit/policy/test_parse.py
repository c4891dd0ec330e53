"""The strict parser: each rule, and all faults at once."""

from __future__ import annotations

import datetime

import pytest

from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import Otherwise, Policy
from nri_gpu.policy.parse import override, parse_policy
from tests.unit.policy.samples import BAD, GOOD, Raw


@pytest.mark.parametrize("raw", GOOD.values(), ids=GOOD.keys())
def test_taken(raw: Raw) -> None:
    policy = parse_policy(raw, "policy.toml")
    assert policy.source == "policy.toml"


@pytest.mark.parametrize(("raw", "key", "sentence"), BAD.values(), ids=BAD.keys())
def test_refused_with_its_key(raw: Raw, key: str, sentence: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(raw, "policy.toml")
    (fault,) = caught.value.faults
    assert (fault.file, fault.key) == ("policy.toml", key)
    assert sentence in fault.message
    assert str(fault).isascii()
    assert len(fault.message) < 300


def test_values_arrive_under_their_names() -> None:
    policy = parse_policy({"namespaces": {"allow": ["ml-*", "x"], "otherwise": "ignore"}}, "f")
    assert policy.namespaces.allow == Globs(("ml-*", "x"))
    assert policy.namespaces.otherwise is Otherwise.IGNORE
    assert policy.plugin == Policy.default().plugin


def test_a_folder_loses_its_last_slash() -> None:
    policy = parse_policy({"driver": {"root": "/usr/local/nvidia/", "stage_dir": "/srv/s/"}}, "f")
    assert (policy.driver.root, policy.driver.stage_dir) == ("/usr/local/nvidia", "/srv/s")


def test_all_faults_come_at_once_in_the_order_of_the_file() -> None:
    raw: Raw = {"ledger": {"created_grace_s": 1, "x": 1}, "plugin": {"index": 1}, "schema": 9, "odd": 0}
    lines = {"schema": 1, "odd": 2, "plugin": 3, "plugin.index": 4, "ledger": 5, "ledger.created_grace_s": 6}
    with pytest.raises(PolicyError) as caught:
        parse_policy(raw, "f", lines)
    assert [(fault.key, fault.line) for fault in caught.value.faults] == [
        ("schema", 1),
        ("odd", 2),
        ("plugin.index", 4),
        ("ledger.x", 5),
        ("ledger.created_grace_s", 6),
    ]


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
        override(Policy.default(), {"plugin.socket": "b", "plugin.index": "1", "plugin.name": ""})
    assert [(fault.file, fault.key) for fault in caught.value.faults] == [
        ("command line", "--socket"),
        ("command line", "--index"),
        ("command line", "plugin.name"),
    ]
    assert str(caught.value.faults[1]) == str(
        Fault("command line", "--index", 'must be two digits in quotes, such as "10", not "1"')
    )
