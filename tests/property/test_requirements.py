"""Laws of requirements: total on any text; alternatives only help, variables only hinder; versions are in order."""

from __future__ import annotations

import operator
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.request.image_requirements import BRANDS, DISABLE, GpuFacts, RequirementFacts, unmet, version_of
from tests.fuzz.fuzz_requirements import GRAMMAR, refusal

CUDA = "NVIDIA_REQUIRE_CUDA"
OPERATORS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

# Few and small numbers, so that conditions are often met just so, or just not.
numbers = st.lists(st.integers(0, 3), min_size=1, max_size=4)
versions = numbers.map(lambda parts: ".".join(map(str, parts)))
on_versions = st.builds(
    "{}{}{}".format, st.sampled_from(["cuda", "driver", "arch", "CUDA"]), st.sampled_from([*OPERATORS]), versions
)
words = st.sampled_from(["unknown", "tesla", "nvidia", "Tesla", "other"])
on_brands = st.builds("brand{}{}".format, st.sampled_from(["=", "!="]), words)
alternatives = st.lists(st.one_of(on_versions, on_brands), min_size=1, max_size=4).map(",".join)
values = st.lists(alternatives, max_size=4).map(" ".join)
gpus = st.builds(GpuFacts, st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from([*BRANDS, "", "new"]))
facts = st.builds(
    RequirementFacts, versions | st.just(""), versions | st.just(""), st.lists(gpus, max_size=3).map(tuple)
)
names = st.sampled_from([CUDA, "NVIDIA_REQUIRE_A", "NVIDIA_REQUIRE_Z", "NVIDIA_REQUIRE_JETPACK", "CUDA_VERSION"])
environments = st.dictionaries(names, values, max_size=3)

pieces = st.sampled_from([*GRAMMAR, "bogus", "==", "=>", "!", "\t", "\n", "\0", "\u0661", "\ud800", "1" * 130])
hostile = st.one_of(st.text(max_size=100), st.lists(pieces, max_size=12).map("".join), st.sampled_from(["1", "true"]))
hostile_names = st.one_of(
    names, st.just(DISABLE), st.text(max_size=20), st.text(max_size=90).map("NVIDIA_REQUIRE_".__add__)
)
hostile_facts = st.builds(
    RequirementFacts,
    st.text(max_size=50),
    st.text(max_size=50),
    st.lists(st.builds(GpuFacts, st.tuples(st.integers(), st.integers()), st.text(max_size=50)), max_size=3).map(tuple),
)


@given(st.dictionaries(hostile_names, hostile, max_size=5), st.one_of(facts, hostile_facts), st.booleans())
def test_any_text_is_met_or_refused_in_a_sentence(
    env: dict[str, str], node: RequirementFacts, may_disable: bool
) -> None:
    refusal(env, node, may_disable=may_disable)


def expected(value: str, node: RequirementFacts) -> bool:
    """The rules again, from the other end: texts are split where they are needed and versions padded to one length."""
    wishes = [piece.lower().split(",") for piece in value.split(" ") if piece]
    return all(
        not wishes or any(all(met(each, node, gpu) for each in wish) for wish in wishes) for gpu in node.gpus or [None]
    )


def met(condition: str, node: RequirementFacts, gpu: GpuFacts | None) -> bool:
    sign = next(each for each in ("!=", "<=", ">=", "=", "<", ">") if each in condition)
    name, _, wanted = condition.partition(sign)
    if name == "brand" and gpu:
        later = gpu.brand in BRANDS[7:] or gpu.brand == "new"
        equal = wanted == gpu.brand or (later and wanted == "unknown")
        return bool(gpu.brand) and equal is (sign == "=")
    if name in ("arch", "brand") and not gpu:
        return True
    has = {"cuda": node.cuda_version, "driver": node.driver_version}.get(name)
    has = f"{gpu.arch[0]}.{gpu.arch[1]}" if gpu and has is None else has
    order = compared(has or "", wanted)
    known = bool(has) and bool((has or "").strip("0."))
    return known and says(sign, order)


def says(sign: str, order: int) -> bool:
    """order: below, at or above 0, as the left side is to the right."""
    return bool(OPERATORS[sign](order, 0))


def compared(one: str, other: str) -> int:
    sides = (map(int, filter(None, text.split("."))) for text in (one, other))
    return next((1 if a > b else -1 for a, b in zip_longest(*sides, fillvalue=0) if a != b), 0)


@given(values, facts)
def test_it_says_what_the_rules_say(value: str, node: RequirementFacts) -> None:
    assert (unmet({CUDA: value}, node) is None) is expected(value, node)


@given(environments, names, alternatives, st.booleans(), facts)
def test_an_alternative_more_never_turns_met_into_unmet(
    env: dict[str, str], name: str, more: str, before: bool, node: RequirementFacts
) -> None:
    value = env.get(name, "")
    if not value.strip() or unmet(env, node) is not None:
        return
    assert unmet(env | {name: f"{more} {value}" if before else f"{value} {more}"}, node) is None


@given(environments, st.text(max_size=20).map("NVIDIA_REQUIRE_".__add__) | names, hostile | values, facts)
def test_a_variable_more_never_turns_unmet_into_met(
    env: dict[str, str], name: str, value: str, node: RequirementFacts
) -> None:
    # NVIDIA_REQUIRE_CUDA takes the place of CUDA_VERSION, on purpose.
    if name in env or (name == CUDA and "CUDA_VERSION" in env) or unmet(env, node) is None:
        return
    assert unmet(env | {name: value}, node) is not None


@given(values, facts, gpus)
def test_a_gpu_more_never_turns_unmet_into_met(value: str, node: RequirementFacts, gpu: GpuFacts) -> None:
    if unmet({CUDA: value}, node) is None:
        return
    assert unmet({CUDA: value}, RequirementFacts(node.driver_version, node.cuda_version, (*node.gpus, gpu))) is not None


@given(values, st.builds("{},bogus{}".format, hostile, hostile), facts)
def test_what_means_nothing_is_never_skipped(value: str, text: str, node: RequirementFacts) -> None:
    assert unmet({CUDA: f"{value} {text}"}, node) is not None
    assert unmet({CUDA: f"{text},{value}"}, node) is not None


any_numbers = st.lists(st.integers(0, 999_999_999), min_size=1, max_size=8)


@given(st.one_of(numbers, any_numbers), st.one_of(numbers, any_numbers))
def test_versions_compare_as_their_numbers_do(one: list[int], other: list[int]) -> None:
    left, right = (version_of(".".join(map(str, parts))) for parts in (one, other))
    assert left is not None
    assert right is not None
    padded = [tuple(parts + [0] * (8 - len(parts))) for parts in (one, other)]
    assert (left < right, left == right, left > right) == (
        padded[0] < padded[1],
        padded[0] == padded[1],
        padded[0] > padded[1],
    )


@pytest.mark.parametrize("sign", OPERATORS)
@given(one=versions.filter(lambda text: text.strip("0.")), other=versions)
def test_an_operator_says_what_the_order_says(sign: str, one: str, other: str) -> None:
    holds = unmet({CUDA: f"cuda{sign}{other}"}, RequirementFacts("", one)) is None
    assert holds is says(sign, compared(one, other))
