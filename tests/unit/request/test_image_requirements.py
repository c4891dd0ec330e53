"""Which requirements hold, and what an operator reads where one does not."""

from __future__ import annotations

import pytest

from nri_gpu.request.image_requirements import DIFFERENT_MAX, TOTAL_MAX, GpuFacts, RequirementFacts, brand_word, unmet
from tests.unit.request.required import (
    CUDA,
    CUDA_13_0,
    MALFORMED,
    NO_GPU,
    NOT_TRUE,
    REAL,
    TRUE,
    V100,
    node,
)


def failed(value: str, facts: RequirementFacts | None = None) -> str | None:
    found = unmet({CUDA: value}, facts or node())
    return found.condition if found else None


# value, node, the condition that fails (None: all hold)
@pytest.mark.parametrize(("value", "facts", "expected"), REAL.values(), ids=REAL.keys())
def test_images(value: str, facts: RequirementFacts, expected: str | None) -> None:
    assert failed(value, facts) == expected


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("facts", [node(), NO_GPU], ids=["a gpu", "no gpu"])
def test_what_means_nothing_refuses_whatever_the_node_has(value: str, facts: RequirementFacts) -> None:
    found = unmet({CUDA: value}, facts)
    assert found is not None
    assert found.variable == CUDA
    assert f"{CUDA} cannot be understood: " in found.clause


VARIABLES: dict[str, tuple[dict[str, str], str | None]] = {
    "all must hold": ({CUDA: "cuda>=12", "NVIDIA_REQUIRE_ARCH": "arch>=10"}, "NVIDIA_REQUIRE_ARCH"),
    "the first by name is the one said": (
        {"NVIDIA_REQUIRE_B": "cuda>=99", "NVIDIA_REQUIRE_A": "x"},
        "NVIDIA_REQUIRE_A",
    ),
    "jetpack is for others": ({"NVIDIA_REQUIRE_JETPACK": "csv-mounts=all"}, None),
    "names are in upper case": ({"nvidia_require_cuda": "cuda>=99"}, None),
    "a name that only ends like it": ({"MY_NVIDIA_REQUIRE_CUDA": "cuda>=99"}, None),
    "legacy image": ({"CUDA_VERSION": "12.4.1"}, None),
    "legacy image for a newer driver": ({"CUDA_VERSION": "13.0.2"}, "CUDA_VERSION"),
    "the patch level does not count": ({"CUDA_VERSION": "12.6.3"}, None),
    "with a v": ({"CUDA_VERSION": "v12.4"}, None),
    "with a suffix": ({"CUDA_VERSION": "12.4.1-rc1"}, None),
    "a suffix without a dash": ({"CUDA_VERSION": "12.4.1rc1"}, "CUDA_VERSION"),
    "without its point it is a very new one": ({"CUDA_VERSION": "118"}, "CUDA_VERSION"),
    "leading zero": ({"CUDA_VERSION": "12.04"}, "CUDA_VERSION"),
    "10 kB behind a version": ({"CUDA_VERSION": "12.4.1-" + "a" * 10_000}, "CUDA_VERSION"),
    "empty is not set": ({"CUDA_VERSION": ""}, None),
    "beside a requirement it does not count": ({"CUDA_VERSION": "99.0", CUDA: "cuda>=12"}, None),
    "an empty requirement is none": ({"CUDA_VERSION": "99.0", CUDA: ""}, "CUDA_VERSION"),
    "a requirement of nothing is one": ({"CUDA_VERSION": "99.0", CUDA: " "}, None),
    "the legacy rule comes on top of others": ({"CUDA_VERSION": "12.4", "NVIDIA_REQUIRE_X": "x"}, "NVIDIA_REQUIRE_X"),
}


@pytest.mark.parametrize(("env", "expected"), VARIABLES.values(), ids=VARIABLES.keys())
def test_variables(env: dict[str, str], expected: str | None) -> None:
    found = unmet(env, node())
    assert (found.variable if found else None) == expected


@pytest.mark.parametrize("value", TRUE)
def test_the_check_is_turned_off(value: str) -> None:
    env = {CUDA: "bogus", "CUDA_VERSION": "abc", "NVIDIA_DISABLE_REQUIRE": value}
    assert unmet(env, node(), may_disable=True) is None


@pytest.mark.parametrize("value", NOT_TRUE)
def test_nothing_else_is_true(value: str) -> None:
    assert unmet({CUDA: "cuda>=99", "NVIDIA_DISABLE_REQUIRE": value}, node(), may_disable=True) is not None


def test_too_much_text_is_refused_unread() -> None:
    fits = "cuda>=1 " * 2000
    assert unmet({CUDA: fits.ljust(TOTAL_MAX - len(CUDA))}, node()) is None
    found = unmet({CUDA: fits.ljust(TOTAL_MAX - len(CUDA) + 1)}, node())
    assert found is not None
    assert (found.variable, found.condition) == (CUDA, "")


def test_different_conditions_are_counted_over_all_variables() -> None:
    fits = {f"NVIDIA_REQUIRE_{n:03}": f"arch>=1.{n} cuda>=1" for n in range(DIFFERENT_MAX - 1)}
    assert unmet(fits, node()) is None
    found = unmet({**fits, "NVIDIA_REQUIRE_LAST": "arch>=2.7"}, node())
    assert found is not None
    assert (found.variable, found.condition) == ("NVIDIA_REQUIRE_LAST", "arch>=2.7")
    assert f"one more than the {DIFFERENT_MAX} different conditions" in found.clause


V100_NODE = node("560.35.03", "12.6", V100)


def said(env: dict[str, str], facts: RequirementFacts | None = None, *, may_disable: bool = False) -> str:
    found = unmet(env, facts or V100_NODE, may_disable=may_disable)
    assert found is not None
    return f"{found.clause}."


HAS = "this node has CUDA 12.6, driver 560.35.03, a GPU of arch 7.0 and brand tesla"
UNDERSTAND = f"{CUDA} cannot be understood: "
CORRECT = "; correct it in the image or the pod."
SENTENCES = {
    "an image's": (
        CUDA_13_0,
        f"{CUDA} needs cuda>=13.0, and none of its 60 other alternatives holds; {HAS}: "
        "update its driver, or use an image for CUDA 12.6 or older.",
    ),
    "one alternative more": (
        "cuda<11 cuda<10",
        f"{CUDA} needs cuda<11, and its other alternative does not hold; {HAS}: run it on a node with another driver.",
    ),
    "a newer driver": (
        "driver>=570",
        f"{CUDA} needs driver>=570; {HAS}: update its driver, or run it on a node with another driver.",
    ),
    "arch": (
        "arch>=8.0",
        f"{CUDA} needs arch>=8.0; {HAS}: "
        "ask for other GPUs (clause arch of the annotation), or run it on a node that has them.",
    ),
    "brand": (
        "brand=quadro",
        f"{CUDA} needs brand=quadro; {HAS}: "
        "ask for other GPUs (clause model of the annotation), or run it on a node that has them.",
    ),
    "unknown property": (
        "bogus>=1",
        f'{UNDERSTAND}"bogus>=1" is about "bogus", known: cuda, driver, arch, brand{CORRECT}',
    ),
    "no property": (">=1", f'{UNDERSTAND}">=1" is about nothing, known: cuda, driver, arch, brand{CORRECT}'),
    "operator": (
        "cuda=>12",
        f'{UNDERSTAND}"cuda=>12" needs one of = != < <= > >= between a property and a value{CORRECT}',
    ),
    "operator of a brand": (
        "brand>=tesla",
        f'{UNDERSTAND}"brand>=tesla" needs one of = != between a property and a value{CORRECT}',
    ),
    "version": (
        "cuda>=12.x",
        f'{UNDERSTAND}"cuda>=12.x" needs a version of digits and dots, such as 12.4{CORRECT}',
    ),
    "brand's word": ("brand=*", f'{UNDERSTAND}"brand=*" needs a brand such as tesla{CORRECT}'),
    "a tab": (
        "cuda>=12\tcuda>=11",
        f'{UNDERSTAND}"cuda>=12\\tcuda>=11" is not printable ASCII; '
        f"spaces part alternatives, commas part conditions{CORRECT}",
    ),
    "a long condition": (
        "cuda>=" + "1" * 200,
        f'{UNDERSTAND}"cuda>={"1" * 42}..." is 206 characters long, over the limit of 128 for a condition{CORRECT}',
    ),
}


@pytest.mark.parametrize(("value", "expected"), SENTENCES.values(), ids=SENTENCES.keys())
def test_sentences(value: str, expected: str) -> None:
    assert said({CUDA: value}) == expected


BLIND = RequirementFacts("", "", (GpuFacts((0, 0), ""),))
OTHERS: dict[str, tuple[dict[str, str], RequirementFacts, str]] = {
    "a legacy image": (
        {"CUDA_VERSION": "13.0.2"},
        V100_NODE,
        f"CUDA_VERSION (no {CUDA} is set) needs cuda>=13.0; {HAS}: "
        "update its driver, or use an image for CUDA 12.6 or older.",
    ),
    "a legacy image that says nothing": (
        {"CUDA_VERSION": "cu121"},
        V100_NODE,
        f'CUDA_VERSION is "cu121", not a version such as 12.4.1: correct it, or set {CUDA} (cuda>=12.4), '
        "which then counts instead.",
    ),
    "too much text": (
        {CUDA: "x" * 20_000},
        V100_NODE,
        f"the NVIDIA_REQUIRE_ variables have 20019 characters, over the limit of 16384: shorten {CUDA}, the longest.",
    ),
    "unknown facts": (
        {CUDA: "arch>=8.0"},
        BLIND,
        f"{CUDA} needs arch>=8.0; this node has CUDA (not known), driver (not known), a GPU of arch (not known) and "
        "brand (not known): an unknown fact meets no condition; `nri-gpu gpus` shows what the driver reports.",
    ),
    "no GPU": (
        {CUDA: "cuda>=13"},
        RequirementFacts("1", "12.6"),
        f"{CUDA} needs cuda>=13; this node has CUDA 12.6, driver 1: "
        "update its driver, or use an image for CUDA 12.6 or older.",
    ),
}


@pytest.mark.parametrize(("env", "facts", "expected"), OTHERS.values(), ids=OTHERS)
def test_sentences_of_other_variables_and_nodes(env: dict[str, str], facts: RequirementFacts, expected: str) -> None:
    assert said(env, facts) == expected


def test_the_way_out() -> None:
    env = {CUDA: "cuda>=13"}
    assert said(env, may_disable=True).endswith("; NVIDIA_DISABLE_REQUIRE=1 starts it unchecked.")
    assert "NVIDIA_DISABLE_REQUIRE" not in said(env)
    closed = said(env | {"NVIDIA_DISABLE_REQUIRE": "true"})
    assert closed.endswith("; NVIDIA_DISABLE_REQUIRE is set, but policy ignores it.")


NUMBERS = {0: "unknown", 2: "tesla", 6: "titan", 7: "vapps", 14: "nvidia", 16: "titanrtx", 17: "unknown", -1: "unknown"}


@pytest.mark.parametrize(("number", "word"), NUMBERS.items())
def test_brands_by_nvml_s_numbers(number: int, word: str) -> None:
    assert brand_word(number) == word
