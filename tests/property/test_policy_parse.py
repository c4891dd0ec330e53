"""Laws: any mapping and any text give a Policy or a PolicyError; parser and JSON Schema never disagree."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
from hypothesis import assume, given
from hypothesis import strategies as st

from nri_gpu.domain.errors import PolicyError
from nri_gpu.domain.finding import Finding
from nri_gpu.policy.document import SECTIONS
from nri_gpu.policy.findings import advise
from nri_gpu.policy.lines import key_lines
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import override, parse_policy
from tests.unit.policy.samples import SETTINGS
from tools.policy import schema_text

VALIDATOR: Any = jsonschema.Draft202012Validator(json.loads(schema_text()))

scalars = st.one_of(
    st.booleans(),
    st.integers(),
    # A float without a fraction is an integer to JSON and none to TOML: the one difference there is.
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer()),
    # `$` of Python's re, which the schema's validator here is made with, also matches before a last line break.
    st.text(max_size=8).filter(lambda text: not text.endswith("\n")),
    st.sampled_from(["/", "/a/b", "/a/..", "10", "shared", "compute", "utility", "refuse", "void", "all", "*", "ml-*"]),
)
values = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(st.text(max_size=3), scalars, max_size=2))
known_keys = st.sampled_from([field.key for field in SETTINGS.values()])
sections = st.dictionaries(st.one_of(known_keys, known_keys, st.text(max_size=4)), values, max_size=3)
raws = st.dictionaries(
    st.one_of(st.sampled_from([*SECTIONS]), st.sampled_from(["schema", "odd"])), st.one_of(sections, values), max_size=3
)


@st.composite
def near_misses(draw: st.DrawFn) -> dict[str, Any]:
    """A good policy with a few settings drawn anew."""
    chosen = draw(st.lists(st.sampled_from([*SETTINGS]), max_size=4, unique=True))
    raw: dict[str, Any] = {}
    for path in chosen:
        section, _, key = path.partition(".")
        raw.setdefault(section, {})[key] = draw(st.one_of(st.just(SETTINGS[path].written_default), values))
    return raw


def accepted(raw: dict[str, Any]) -> bool:
    try:
        policy = parse_policy(raw, "f", {})
    except PolicyError as error:
        assert error.faults
        assert all(str(fault).isascii() and str(fault).isprintable() for fault in error.faults)
        assert all(len(fault.message) < 320 for fault in error.faults)
        return False
    assert all(isinstance(each, Finding) for each in advise(policy))
    written: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for path, field in SETTINGS.items():
        section = path.partition(".")[0]
        written[section][field.key] = field.form.write(getattr(getattr(policy, section), field.key))
    assert parse_policy(written, "g") == policy
    return True


@given(st.one_of(raws, near_misses()))
def test_parser_and_schema_agree(raw: dict[str, Any]) -> None:
    """But for a pool's name: that there is such a pool is more than a schema can say."""
    sections = (raw.get(name) for name in ("kubelet", "dra"))
    assume(not any(isinstance(each, dict) and each.get("pool") and isinstance(each["pool"], str) for each in sections))
    assert accepted(raw) == VALIDATOR.is_valid(raw)


LISTEN = st.sampled_from(["", "127.0.0.1:9464", "0.0.0.0:9464", "[::]:9464", "127.0.0.1:99999", "/run/m.sock"])
ways: dict[str, st.SearchStrategy[Any]] = {
    "kubelet.enabled": st.booleans(),
    "kubelet.pool": st.sampled_from(["", "a", "b"]),
    "kubelet.resource": st.sampled_from(["nvidia.com/gpu", "example.com/gpu"]),
    "kubelet.inject_for": st.sampled_from([[], ["nvidia.com/*"], ["example.com/a", "*/gpu"]]),
    "kubelet.mig_strategy": st.sampled_from(["none", "mixed"]),
    "dra.enabled": st.booleans(),
    "dra.pool": st.sampled_from(["", "a", "b"]),
    "metrics.listen": LISTEN,
    "metrics.public": st.booleans(),
}
options = {path: ways[path] for path in ("kubelet.enabled", "dra.enabled", "metrics.listen", "metrics.public")}
POOLS: list[dict[str, Any]] = [{"name": "a", "device": ["0"]}, {"name": "b", "device": ["1"]}, {"name": "a"}]


def laid_out(flat: dict[str, Any], pools: int) -> dict[str, Any]:
    """The file that has these keys, and the first so many pools."""
    raw: dict[str, Any] = {"pool": POOLS[:pools]} if pools else {}
    for path, value in flat.items():
        section, _, key = path.partition(".")
        raw.setdefault(section, {})[key] = value
    return raw


def judged(raw: dict[str, Any], over: dict[str, Any]) -> Policy | set[str]:
    """The policy, or what its faults say."""
    try:
        return parse_policy(raw, "f", {}, over)
    except PolicyError as error:
        return {fault.message for fault in error.faults}


@given(st.fixed_dictionaries({}, optional=ways), st.integers(0, 3), st.fixed_dictionaries({}, optional=options))
def test_an_option_is_judged_as_if_it_stood_in_the_file(file: dict[str, Any], pools: int, over: dict[str, Any]) -> None:
    found = judged(laid_out(file, pools), over)
    assert found == judged(laid_out(file | over, pools), {})
    try:
        blind = parse_policy(laid_out(file, pools), "f", {}, all_options=False)
    except PolicyError as error:  # then no option can mend it
        assert {fault.message for fault in error.faults} <= (found if isinstance(found, set) else set())
    else:
        assert isinstance(found, set) or override(blind, over) == found


names = st.one_of(st.sampled_from([*SECTIONS]), known_keys, st.text("ab-_0", min_size=1))
toml_values = st.sampled_from(
    ["1", '"x"', "'['", '"""\n[a]\nb = 1\n"""', "'''\n]\n'''", '[\n1, # ]\n"]",\n[2],\n]', "{ x = 1 }", '"\\"["', "[]"]
)
toml_lines = st.one_of(
    names.map("[{}]".format),
    names.map("[[ {} ]]".format),
    st.builds("{} = {} # [".format, names, toml_values),
    st.builds('{}."{}" = {}'.format, names, names, toml_values),
    st.just(""),
)


@given(st.lists(toml_lines, max_size=10).map("\n".join))
def test_every_key_of_a_file_has_the_line_it_stands_on(text: str) -> None:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        assume(False)
    lines, found = text.split("\n"), key_lines(text)
    assert all(1 <= number <= len(lines) for number in found.values())
    for key in raw:
        line = found.get(key) or found.get(f"{key}[0]") or next(found[path] for path in found if path.startswith(key))
        assert key in lines[line - 1]
    assert {path.split(".")[0].split("[")[0] for path in found} == set(raw)


@given(st.text(max_size=200))
def test_any_text_can_be_scanned_for_lines(text: str) -> None:
    assert all(1 <= number <= text.count("\n") + 1 for number in key_lines(text).values())
