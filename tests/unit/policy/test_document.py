"""The JSON Schema and the parser agree, and the shipped files agree with both."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import pytest
from msgspec.structs import replace

from nri_gpu.domain.finding import Level
from nri_gpu.policy.document import (
    LISTS,
    SECTIONS,
)
from nri_gpu.policy.findings import advise
from nri_gpu.policy.forms import settings_of
from nri_gpu.policy.model import BUILT_IN, Policy
from nri_gpu.policy.read import parse_policy
from nri_gpu.records.policy_file import load_policy
from tests.unit.policy.samples import BAD, GOOD, SETTINGS, Raw
from tools.policy import schema_text

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
CONFIG = ROOT / "config"
SHIPPED = [CONFIG / "policy.toml", *sorted((CONFIG / "examples").glob("*.toml"))]
VALIDATOR: Any = jsonschema.Draft202012Validator(json.loads(schema_text()))


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize("raw", GOOD.values(), ids=GOOD.keys())
def test_it_takes_what_the_parser_takes(raw: Raw) -> None:
    VALIDATOR.validate(raw)


@pytest.mark.parametrize("raw", [raw for raw, _, _ in BAD.values()], ids=BAD.keys())
def test_it_refuses_what_the_parser_refuses(raw: Raw) -> None:
    assert not VALIDATOR.is_valid(raw)


def test_the_shipped_policy_is_the_default() -> None:
    assert load_policy(CONFIG / "policy.toml") == Policy.default()


def test_the_shipped_policy_has_every_key_in_the_order_of_the_table() -> None:
    text = (CONFIG / "policy.toml").read_text(encoding="utf-8")
    raw = tomllib.loads(text.replace('\n#allow = ["*"]\n', '\nallow = ["*"]\n'))
    assert raw.pop("schema") == 1
    assert list(raw) == list(SECTIONS)
    assert [f"{section}.{key}" for section in raw for key in raw[section]] == list(SETTINGS)


def test_the_shipped_policy_decides_for_nobody_that_every_namespace_may_ask() -> None:
    [finding] = advise(load_policy(CONFIG / "policy.toml"))
    assert (finding.level, "every namespace may ask" in finding.meaning) == (Level.WARNING, True)


def test_the_examples_in_the_shipped_policy_are_good_and_show_every_key() -> None:
    text = (CONFIG / "policy.toml").read_text(encoding="utf-8")
    lines = [re.sub("^#(?=[^ #:])", "", line) for line in text.splitlines()]
    raw = tomllib.loads("\n".join(lines))
    parse_policy(raw, "policy.toml")
    VALIDATOR.validate(raw)
    for name, cls in LISTS.items():
        shown = {key for table in raw[name] for key in table}
        assert shown == set(settings_of(cls))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_is_good_and_explained(path: Path) -> None:
    load_policy(path)
    text = path.read_text(encoding="utf-8")
    VALIDATOR.validate(tomllib.loads(text))
    schema = text.splitlines()[0].removeprefix("#:schema ")
    assert (path.parent / schema).resolve() == CONFIG / "policy.schema.json"
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_example_in_the_docs_is_a_policy() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        parse_policy(tomllib.loads(example), "docs/policy.md")


def test_where_a_policy_came_from_is_no_part_of_what_it_is() -> None:
    assert Policy.default().source == BUILT_IN
    assert replace(Policy.default(), source="/x") == Policy.default()
    assert Policy.default() != object()


def test_every_setting_and_table_explains_itself() -> None:
    for cls in (*SECTIONS.values(), *LISTS.values()):
        assert cls.__doc__
        for field in settings_of(cls).values():
            assert field.help.endswith(".")
            assert "|" not in field.help  # it stands in a table of Markdown


def test_every_default_written_out_is_the_default_policy() -> None:
    raw: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for path, field in SETTINGS.items():
        raw[path.partition(".")[0]][field.key] = field.written_default
    assert parse_policy(raw, "f") == Policy.default()
