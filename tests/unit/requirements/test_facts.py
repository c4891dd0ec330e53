"""Versions, brands, and one view for each kind of GPU."""

from __future__ import annotations

import pytest

from nri_gpu.requirements.check import (
    BRANDS,
    GpuFacts,
    Property,
    RequirementFacts,
    Version,
    brand_word,
    brand_words,
    version_of,
    views,
)

VERSIONS: dict[str, Version | None] = {
    "12": (12,),
    "12.0": (12,),
    "12.0.0.1": (12, 0, 0, 1),
    "580.159.04": (580, 159, 4),
    "0": (),
    "0.0": (),
    "": None,
    ".": None,
    "12.": None,
    ".5": None,
    "1..2": None,
    "12 ": None,
    "12\n": None,
    "v12": None,
    "1e1": None,
    "-1": None,
    "\u0661": None,
    "9" * 9: (999999999,),
    "9" * 10: None,
}


@pytest.mark.parametrize(("text", "expected"), VERSIONS.items(), ids=ascii)
def test_versions(text: str, expected: Version | None) -> None:
    assert version_of(text) == expected


NUMBERS = {
    0: "unknown",
    1: "quadro",
    2: "tesla",
    6: "titan",
    7: "vapps",
    11: "cloudgaming",
    14: "nvidia",
    16: "titanrtx",
}
NEWER = {17: "unknown", 999: "unknown", -1: "unknown"}


@pytest.mark.parametrize(("number", "word"), (NUMBERS | NEWER).items())
def test_nvml_s_numbers(number: int, word: str) -> None:
    assert brand_word(number) == word


@pytest.mark.parametrize("number", range(len(BRANDS)))
def test_from_the_seventh_on_a_brand_is_unknown_too(number: int) -> None:
    word = brand_word(number)
    assert brand_words(word.upper()) == ({word} if number < 7 else {word, "unknown"})


def test_gpus_of_one_kind_are_one_view() -> None:
    kinds = (GpuFacts((9, 0), "nvidia"), GpuFacts((9, 0), "nvidia"), GpuFacts((8, 0), "nvidia"))
    seen = views(RequirementFacts("1", "2", kinds))
    assert [view[Property.ARCH] for view in seen.values()] == [(9,), (8,)]


def test_without_a_gpu_there_is_a_view_of_the_node() -> None:
    assert views(RequirementFacts("1", "", ())) == {None: {Property.DRIVER: (1,), Property.CUDA: None}}
