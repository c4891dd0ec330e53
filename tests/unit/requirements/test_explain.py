"""What an operator reads."""

from __future__ import annotations

import pytest

from nri_gpu.requirements.check import GpuFacts, RequirementFacts, unmet
from tests.unit.requirements.images import CUDA_13_0, V100, node

CUDA = "NVIDIA_REQUIRE_CUDA"


def said(env: dict[str, str], facts: RequirementFacts | None = None, *, may_disable: bool = False) -> str:
    found = unmet(env, facts or node("560.35.03", "12.6", V100), may_disable=may_disable)
    assert found is not None
    return found.sentence


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
    "no operator": (
        "12.4",
        f'{UNDERSTAND}"12.4" needs one of = != < <= > >= between a property and a value{CORRECT}',
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


def test_a_legacy_image() -> None:
    assert said({"CUDA_VERSION": "13.0.2"}) == (
        f"CUDA_VERSION (no {CUDA} is set) needs cuda>=13.0; {HAS}: "
        "update its driver, or use an image for CUDA 12.6 or older."
    )
    assert said({"CUDA_VERSION": "cu121"}) == (
        f'CUDA_VERSION is "cu121", not a version such as 12.4.1: correct it, or set {CUDA} (cuda>=12.4), '
        "which then counts instead."
    )


def test_too_much_text() -> None:
    assert said({CUDA: "x" * 20_000}) == (
        f"the NVIDIA_REQUIRE_ variables have 20019 characters, over the limit of 16384: shorten {CUDA}, the longest."
    )


def test_unknown_facts() -> None:
    assert said({CUDA: "arch>=8.0"}, RequirementFacts("", "", (GpuFacts((0, 0), ""),))) == (
        f"{CUDA} needs arch>=8.0; this node has CUDA (not known), driver (not known), a GPU of arch (not known) and "
        "brand (not known): an unknown fact meets no condition; `nri-gpu gpus` shows what the driver reports."
    )


def test_without_a_gpu_none_is_described() -> None:
    assert "this node has CUDA 12.6, driver 1: " in said({CUDA: "cuda>=13"}, RequirementFacts("1", "12.6"))


def test_the_way_out() -> None:
    env = {CUDA: "cuda>=13"}
    assert said(env, may_disable=True).endswith("; NVIDIA_DISABLE_REQUIRE=1 starts it unchecked.")
    assert "NVIDIA_DISABLE_REQUIRE" not in said(env)
    closed = said(env | {"NVIDIA_DISABLE_REQUIRE": "true"})
    assert closed.endswith("; NVIDIA_DISABLE_REQUIRE is set, but policy does not let it count.")


@pytest.mark.parametrize("may_disable", [False, True])
def test_hostile_text_is_escaped_and_clipped(may_disable: bool) -> None:
    name = "NVIDIA_REQUIRE_" + "\x1b[31m\n\u202e" * 9
    gpu = GpuFacts((10**20, 10**20), "\n" * 99)
    for value in ("brand=" + "x" * 120, "\x1b" * 99, "\U0001f600" * 99, "cuda>=99 " * 1500):
        env = {name: value, "NVIDIA_DISABLE_REQUIRE": "" if may_disable else "1"}
        found = unmet(env, RequirementFacts("9" * 99, "\x1b" * 99, (gpu,)), may_disable=may_disable)
        assert found is not None
        for text in (found.variable, found.condition, found.sentence):
            assert text.isascii()
            assert text.isprintable()
        assert len(found.variable) <= 48 + len("...")
        assert len(found.condition) <= 48 + len("...")
        assert len(found.sentence) <= 400
        assert found.sentence.endswith(".")
