"""The policy's declarations: types, defaults and the table read off them."""

from __future__ import annotations

import pytest
from msgspec.inspect import type_info
from msgspec.structs import fields, replace

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import Capability
from nri_gpu.policy.faults import faults
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import BUILT_IN, Disarm, Otherwise, Policy, PrivilegedAction, Stale, VisibleDevices
from nri_gpu.policy.parse import parse_policy
from nri_gpu.policy.rules import NO_LIMITS, NO_POOLS, NO_RULES
from nri_gpu.policy.schema import BY_PATH, SECTIONS, SETTINGS, Setting, reference, section_help

each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)


def test_defaults_are_those_of_the_contract() -> None:
    policy = Policy.default()
    assert (policy.plugin.name, policy.plugin.index, policy.plugin.socket) == ("nri-gpu", "10", "/var/run/nri/nri.sock")
    assert (policy.driver.root, policy.driver.stage_dir) == ("/", "/var/lib/nri-gpu/drivers")
    assert policy.defaults.mode is Mode.EXCLUSIVE
    assert policy.defaults.capabilities == {Capability.COMPUTE, Capability.UTILITY}
    assert policy.capabilities.allowed == frozenset(Capability)
    assert policy.extras.allowed == {Extra.DRM, Extra.PROFILE}
    assert policy.driver.library_dirs == ()
    assert (policy.namespaces.allow, policy.namespaces.deny) == (Globs(("*",)), Globs(()))
    assert policy.namespaces.otherwise is Otherwise.REFUSE
    assert policy.environment.visible_devices is VisibleDevices.UUIDS
    assert policy.environment.disarm is Disarm.NONE
    assert (policy.requirements.check, policy.requirements.may_disable) == (True, True)
    assert (policy.inventory.refresh_s, policy.ledger.created_grace_s) == (60, 60)
    assert policy.modes.allowed == frozenset(Mode)
    assert policy.limits == NO_LIMITS
    assert (policy.environment.may_ask, policy.environment.may_ask_all) == (Globs(()), False)
    assert policy.privileged.action is PrivilegedAction.ALLOW
    assert (policy.inventory.stale, policy.inventory.stale_after_s) == (Stale.SERVE, 300)
    assert (policy.rule, policy.pool) == (NO_RULES, NO_POOLS)


def test_where_a_policy_came_from_is_no_part_of_what_it_is() -> None:
    assert Policy.default().source == BUILT_IN
    assert replace(Policy.default(), source="/x") == Policy.default()


@each_setting
def test_a_default_is_a_value_that_the_file_could_hold(setting: Setting) -> None:
    field = setting.field
    assert list(faults(type_info(field.type), field.written_default)) == []
    assert field.read(field.written_default) == field.default
    assert type(field.read(field.written_default)) is type(field.default)


@each_setting
def test_every_setting_explains_itself(setting: Setting) -> None:
    assert setting.field.help.endswith(".")
    assert "|" not in setting.field.help  # it stands in a table of Markdown
    assert section_help(setting.section)
    assert f"`{setting.field.key}`" in reference()


def test_the_flags_are_those_of_the_command_line() -> None:
    flags = {setting.field.flag: setting.path for setting in SETTINGS if setting.field.flag}
    assert flags == {
        "--index": "plugin.index",
        "--socket": "plugin.socket",
        "--driver-root": "driver.root",
        "--driver-host-root": "driver.host_root",
        "--kubelet": "kubelet.enabled",
        "--kubelet-registration": "kubelet.registration",
        "--labels": "labels.file",
    }


def test_every_field_of_every_section_is_in_the_table() -> None:
    names = {f"{section}.{each.name}" for section in SECTIONS for each in fields(SECTIONS[section])}
    assert names == set(BY_PATH)


def test_every_default_written_out_is_the_default_policy() -> None:
    raw: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for setting in SETTINGS:
        raw[setting.section][setting.field.key] = setting.field.written_default
    assert parse_policy(raw, "f") == Policy.default()
