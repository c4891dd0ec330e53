"""Which requirements hold, and what an operator reads where one does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import pytest

from nri_gpu.requirements.check import DIFFERENT_MAX, TOTAL_MAX, GpuFacts, RequirementFacts, brand_word, concerns, unmet

# What NVIDIA's own images say, rebuilt from the lists that their values are made of.
_TWELVE_ONE: Final = (
    *("tesla", "unknown", "nvidia", "nvidiartx", "geforce"),
    *("geforcertx", "quadro", "quadrortx", "titan", "titanrtx"),
)
_THIRTEEN: Final = (
    *("unknown", "grid", "tesla", "nvidia", "quadro", "quadrortx"),
    *("nvidiartx", "vapps", "vpc", "vcs", "vws", "cloudgaming"),
)


def value(cuda: str, brands: tuple[str, ...], branches: tuple[int, ...]) -> str:
    """The first alternative is the CUDA version, the others driver branches for which there is a compat package."""
    older = (f"brand={brand},driver>={n},driver<{n + 1}" for n in branches for brand in brands)
    return " ".join((f"cuda>={cuda}", *older))


CUDA_11_0: Final = value("11.0", ("tesla",), (418, 440, 450))
CUDA_12_1: Final = value("12.1", _TWELVE_ONE, (470, 525))
CUDA_12_9: Final = value("12.9", _THIRTEEN, (535, 550, 560, 565, 570))
CUDA_13_0: Final = value("13.0", _THIRTEEN, (535, 550, 565, 570, 575))

H100: Final = GpuFacts((9, 0), "nvidia")
A100: Final = GpuFacts((8, 0), "nvidia")
V100: Final = GpuFacts((7, 0), "tesla")
RTX_3090: Final = GpuFacts((8, 6), "geforce")


def node(driver: str = "560.35.03", cuda: str = "12.6", *gpus: GpuFacts) -> RequirementFacts:
    return RequirementFacts(driver, cuda, gpus or (H100,))


CUDA: Final = "NVIDIA_REQUIRE_CUDA"
NO_GPU = RequirementFacts("560.35.03", "12.6")


def failed(value: str, facts: RequirementFacts | None = None) -> str | None:
    found = unmet({CUDA: value}, facts or node())
    return found.condition if found else None


# value, node, the condition that fails (None: all hold)
REAL = {
    "12.1, an older branch with a compat package": (CUDA_12_1, node("525.147.05", "12.0"), None),
    "12.1, the oldest of them": (CUDA_12_1, node("470.57.02", "11.4", V100), None),
    "12.1, GeForce is listed": (CUDA_12_1, node("525.60.13", "12.0", RTX_3090), None),
    "12.1, a branch between those listed": (CUDA_12_1, node("515.65.01", "11.7"), "cuda>=12.1"),
    "12.1, nvs is not listed": (CUDA_12_1, node("525.60.13", "12.0", GpuFacts((6, 1), "nvs")), "cuda>=12.1"),
    "12.9 on 560": (CUDA_12_9, node(), None),
    "12.9 on 555, a branch that is not listed": (CUDA_12_9, node("555.42.06", "12.5"), "cuda>=12.9"),
    "12.9 on 570 with GeForce": (CUDA_12_9, node("570.124.06", "12.8", RTX_3090), "cuda>=12.9"),
    "12.9 on 580 with GeForce": (CUDA_12_9, node("580.95.05", "13.0", RTX_3090), None),
    "13.0 on 580": (CUDA_13_0, node("580.95.05", "13.0"), None),
    "13.0 on 560": (CUDA_13_0, node(), "cuda>=13.0"),
    "13.0 on 550 by a brand of its own": (CUDA_13_0, node("550.54.15", "12.4", GpuFacts((8, 9), "vws")), None),
    "13.0 on 550 by `unknown`": (CUDA_13_0, node("550.54.15", "12.4", GpuFacts((8, 9), "geforcertx")), None),
    "13.0 on 550, GeForce of the old word": (CUDA_13_0, node("550.54.15", "12.4", RTX_3090), "cuda>=13.0"),
}


@pytest.mark.parametrize(("value", "facts", "expected"), REAL.values(), ids=REAL.keys())
def test_images(value: str, facts: RequirementFacts, expected: str | None) -> None:
    assert failed(value, facts) == expected


RULES = {
    "nothing": ("", None),
    "only separators": (" , ,,  ", None),
    "equal": ("cuda=12.6", None),
    "not equal": ("cuda!=12.6", "cuda!=12.6"),
    "below": ("cuda<12.6", "cuda<12.6"),
    "above": ("cuda>12.6", "cuda>12.6"),
    "components are numbers": ("cuda>=12.10", "cuda>=12.10"),
    "trailing zeros do not count": ("cuda=12.6.0.0", None),
    "nor do leading ones": ("cuda=012.06", None),
    "a major alone is the zero of it": ("cuda<=12", "cuda<=12"),
    "a longer driver version is newer": ("driver>560.35", None),
    "arch": ("arch>=9.0,arch<9.1", None),
    "arch too high": ("arch>=10.0", "arch>=10.0"),
    "brand": ("brand=nvidia", None),
    "brand in any case": ("brand=NVIDIA", None),
    "property in any case": ("CUDA>=12,Brand=nvidia", None),
    "a later brand is unknown too": ("brand=unknown", None),
    "so it is not anything but that": ("brand!=unknown", "brand!=unknown"),
    "a brand that is not its own": ("brand!=tesla", None),
    "a brand nobody knows is not malformed": ("brand=next9", "brand=next9"),
    "and": ("cuda>=12,driver>=570", "driver>=570"),
    "or": ("cuda>=13 driver>=560", None),
    "or of ands": ("cuda>=13,driver>=1 cuda>=12,driver>=560", None),
    "the first alternative is the one named": ("cuda>=13 driver>=570", "cuda>=13"),
    "its first condition that fails": ("driver>=1,cuda>=13,arch>=99 driver>=570", "cuda>=13"),
    "empty pieces": (" ,cuda>=12,,driver>=1  , ", None),
    "an empty alternative is none": (", cuda>=13", "cuda>=13"),
    "an empty alternative at the end neither": ("cuda>=13 ,", "cuda>=13"),
    "the largest number": ("cuda>=999999999", "cuda>=999999999"),
}


@pytest.mark.parametrize(("value", "expected"), RULES.values(), ids=RULES.keys())
def test_rules(value: str, expected: str | None) -> None:
    assert failed(value) == expected


CLASSIC = {
    "tesla": ("brand=tesla", None),
    "tesla is not unknown": ("brand=unknown", "brand=unknown"),
    "so it is anything but that": ("brand!=unknown", None),
    "two brands cannot both be": ("brand=tesla,brand=nvidia", "brand=nvidia"),
}


@pytest.mark.parametrize(("value", "expected"), CLASSIC.values(), ids=CLASSIC.keys())
def test_a_brand_older_than_the_rule_answers_to_its_word_only(value: str, expected: str | None) -> None:
    assert failed(value, node("560.35.03", "12.6", V100)) == expected


GPUS = {
    "every gpu must meet it": ("arch>=8.0", node("1", "1", H100, A100), None),
    "one that does not fails": ("arch>=9.0", node("1", "1", H100, A100, H100), "arch>=9.0"),
    "each by an alternative of its own": ("brand=tesla arch>=9.0", node("1", "1", H100, V100), None),
    "without a gpu what is about one counts as true": ("arch>=99,brand!=unknown", NO_GPU, None),
    "and what is about the node is checked": ("arch>=99,cuda>=13", NO_GPU, "cuda>=13"),
}


@pytest.mark.parametrize(("value", "facts", "expected"), GPUS.values(), ids=GPUS.keys())
def test_gpus(value: str, facts: RequirementFacts, expected: str | None) -> None:
    assert failed(value, facts) == expected


UNKNOWN = {
    "no cuda version": ("cuda>=1", RequirementFacts("560.35.03", "", (H100,))),
    "nor any other than one": ("cuda!=99", RequirementFacts("560.35.03", "", (H100,))),
    "no driver version": ("driver>=1", RequirementFacts("", "12.6", (H100,))),
    "a driver version that is none": ("driver>=1", RequirementFacts("580.95-beta", "12.6", (H100,))),
    "a cuda version of nothing": ("cuda>=0", RequirementFacts("560.35.03", "0.0", (H100,))),
    "no arch": ("arch<99", node("1", "1", GpuFacts((0, 0), "tesla"))),
    "no brand": ("brand!=tesla", node("1", "1", GpuFacts((9, 0), ""))),
}


@pytest.mark.parametrize(("value", "facts"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_is_not_known_meets_no_condition(value: str, facts: RequirementFacts) -> None:
    assert failed(value, facts) == value
    found = unmet({CUDA: value}, facts)
    assert found is not None
    assert "an unknown fact meets no condition" in found.sentence


def test_another_alternative_may_do_without_what_is_not_known() -> None:
    assert failed("cuda>=13 driver>=560", RequirementFacts("560.35.03", "", (H100,))) is None


MALFORMED = {
    "no value": "cuda>=",
    "two equals signs": "cuda==12",
    "no operator": "12",
    "half an operator": "brand!tesla",
    "not a version": "cuda>=12.x",
    "a point at the end": "cuda>=12.",
    "a sign": "cuda>=-1",
    "digits of another script": "cuda>=\u0661\u0662",
    "a number too large": "cuda>=1000000000",
    "too many components": "cuda>=1.1.1.1.1.1.1.1.1",
    "unknown property": "bogus>=1",
    "a property that casefolds to a known one": "\u017fcuda>=1",
    "order of brands": "brand<tesla",
    "brand without a word": "brand=",
    "brand with an operator in it": "brand=a=b",
    "a tab instead of a space": "cuda>=12\tbrand=tesla",
    "a line break": "cuda>=12\ndriver>=1",
    "half a character": "cuda>=12\ud800",
    "one condition of many characters": "brand=" + "a" * 123,
    "a version of many digits": "cuda>=" + "1" * 5000,
    "behind an alternative that holds": "cuda>=1 bogus>=1",
    "behind a condition that does not": "cuda>=99,bogus>=1",
}


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("facts", [node(), NO_GPU], ids=["a gpu", "no gpu"])
def test_what_means_nothing_refuses_whatever_the_node_has(value: str, facts: RequirementFacts) -> None:
    found = unmet({CUDA: value}, facts)
    assert found is not None
    assert found.variable == CUDA
    assert f"{CUDA} cannot be understood: " in found.sentence


VARIABLES: dict[str, tuple[dict[str, str], str | None]] = {
    "none": ({}, None),
    "all must hold": ({CUDA: "cuda>=12", "NVIDIA_REQUIRE_ARCH": "arch>=10"}, "NVIDIA_REQUIRE_ARCH"),
    "the first by name is the one said": (
        {"NVIDIA_REQUIRE_B": "cuda>=99", "NVIDIA_REQUIRE_A": "x"},
        "NVIDIA_REQUIRE_A",
    ),
    "any name": ({"NVIDIA_REQUIRE_": "cuda>=13"}, "NVIDIA_REQUIRE_"),
    "jetpack is for others": ({"NVIDIA_REQUIRE_JETPACK": "csv-mounts=all"}, None),
    "names are in upper case": ({"nvidia_require_cuda": "cuda>=99"}, None),
    "a name that only ends like it": ({"MY_NVIDIA_REQUIRE_CUDA": "cuda>=99"}, None),
    "another variable of the image": ({"NVIDIA_VISIBLE_DEVICES": "all", "NV_CUDA_LIB_VERSION": "x"}, None),
    "legacy image": ({"CUDA_VERSION": "12.4.1"}, None),
    "legacy image for a newer driver": ({"CUDA_VERSION": "13.0.2"}, "CUDA_VERSION"),
    "the patch level does not count": ({"CUDA_VERSION": "12.6.3"}, None),
    "a major alone": ({"CUDA_VERSION": "12"}, None),
    "with a v": ({"CUDA_VERSION": "v12.4"}, None),
    "with a suffix": ({"CUDA_VERSION": "12.4.1-rc1"}, None),
    "a suffix without a dash": ({"CUDA_VERSION": "12.4.1rc1"}, "CUDA_VERSION"),
    "a word": ({"CUDA_VERSION": "abc"}, "CUDA_VERSION"),
    "without its point it is a very new one": ({"CUDA_VERSION": "118"}, "CUDA_VERSION"),
    "leading zero": ({"CUDA_VERSION": "12.04"}, "CUDA_VERSION"),
    "10 kB behind a version": ({"CUDA_VERSION": "12.4.1-" + "a" * 10_000}, "CUDA_VERSION"),
    "empty is not set": ({"CUDA_VERSION": ""}, None),
    "beside a requirement it does not count": ({"CUDA_VERSION": "99.0", CUDA: "cuda>=12"}, None),
    "nor is it read": ({"CUDA_VERSION": "abc", CUDA: "cuda>=12"}, None),
    "an empty requirement is none": ({"CUDA_VERSION": "99.0", CUDA: ""}, "CUDA_VERSION"),
    "a requirement of nothing is one": ({"CUDA_VERSION": "99.0", CUDA: " "}, None),
    "the legacy rule comes on top of others": ({"CUDA_VERSION": "12.4", "NVIDIA_REQUIRE_X": "x"}, "NVIDIA_REQUIRE_X"),
}


@pytest.mark.parametrize(("env", "expected"), VARIABLES.values(), ids=VARIABLES.keys())
def test_variables(env: dict[str, str], expected: str | None) -> None:
    found = unmet(env, node())
    assert (found.variable if found else None) == expected


def test_what_a_legacy_image_requires_is_named() -> None:
    found = unmet({"CUDA_VERSION": "13.0.2"}, node())
    assert found is not None
    assert found.condition == "cuda>=13.0"


TRUE = ("1", "t", "T", "true", "TRUE", "True")
NOT_TRUE = ("", "0", "f", "F", "false", "FALSE", "False", "yes", "1 ", " 1", "tRUE", "on", "01", "true\n", "\uff11")


@pytest.mark.parametrize("value", TRUE)
def test_the_check_is_turned_off(value: str) -> None:
    env = {CUDA: "bogus", "CUDA_VERSION": "abc", "NVIDIA_DISABLE_REQUIRE": value}
    assert unmet(env, node(), may_disable=True) is None


@pytest.mark.parametrize("value", NOT_TRUE)
def test_nothing_else_is_true(value: str) -> None:
    assert unmet({CUDA: "cuda>=99", "NVIDIA_DISABLE_REQUIRE": value}, node(), may_disable=True) is not None


@pytest.mark.parametrize("value", TRUE + NOT_TRUE)
def test_policy_has_to_let_it(value: str) -> None:
    assert unmet({CUDA: "cuda>=99", "NVIDIA_DISABLE_REQUIRE": value}, node()) is not None
    assert unmet({CUDA: "cuda>=1", "NVIDIA_DISABLE_REQUIRE": value}, node()) is None


def test_what_is_read() -> None:
    assert all(map(concerns, ("CUDA_VERSION", "NVIDIA_DISABLE_REQUIRE", CUDA, "NVIDIA_REQUIRE_")))
    assert not any(
        map(concerns, ("PATH", "CUDA_VERSION_X", "NVIDIA_REQUIRE", "NVIDIA_REQUIRE_JETPACK", "cuda_version"))
    )


def test_too_much_text_is_refused_unread() -> None:
    fits = "cuda>=1 " * 2000
    assert unmet({CUDA: fits.ljust(TOTAL_MAX - len(CUDA))}, node()) is None
    found = unmet({CUDA: fits.ljust(TOTAL_MAX - len(CUDA) + 1)}, node())
    assert found is not None
    assert (found.variable, found.condition) == (CUDA, "")


def test_many_variables_are_counted_together() -> None:
    found = unmet({f"NVIDIA_REQUIRE_{n}": "cuda>=1" for n in range(1000)} | {"NVIDIA_REQUIRE_LONG": "x" * 99}, node())
    assert found is not None
    assert found.variable == "NVIDIA_REQUIRE_LONG"


def test_different_conditions_are_counted_over_all_variables() -> None:
    fits = {f"NVIDIA_REQUIRE_{n:03}": f"arch>=1.{n} cuda>=1" for n in range(DIFFERENT_MAX - 1)}
    assert unmet(fits, node()) is None
    found = unmet({**fits, "NVIDIA_REQUIRE_LAST": "arch>=2.7"}, node())
    assert found is not None
    assert (found.variable, found.condition) == ("NVIDIA_REQUIRE_LAST", "arch>=2.7")
    assert f"one more than the {DIFFERENT_MAX} different conditions" in found.sentence


def best_ms(work: Callable[[], object]) -> float:
    def once() -> float:
        begin = time.process_time()
        work()
        return (time.process_time() - begin) * 1000

    return min(once() for _ in range(7))


def test_100_kb_of_alternatives_cost_little() -> None:
    env = {CUDA: "cuda>=9999 " * 9500}
    assert best_ms(lambda: unmet(env, node())) < 5


def test_the_most_that_is_read_costs_little() -> None:
    """0.3 ms on a machine of 2023: as many different ones as may be, in a thousand alternatives."""
    different = [f"arch<{n % 10}.{n // 10}" for n in range(DIFFERENT_MAX)]
    env = {CUDA: " ".join(f"{one},{other}" for one in different for other in different)[:16_000].rpartition(" ")[0]}
    assert best_ms(lambda: unmet(env, node())) < 5


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


NUMBERS = {0: "unknown", 2: "tesla", 6: "titan", 7: "vapps", 14: "nvidia", 16: "titanrtx", 17: "unknown", -1: "unknown"}


@pytest.mark.parametrize(("number", "word"), NUMBERS.items())
def test_brands_by_nvml_s_numbers(number: int, word: str) -> None:
    assert brand_word(number) == word
