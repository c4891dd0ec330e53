from __future__ import annotations

import pytest

from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason

SENTENCES = {
    "plain": ("no GPU.", "nri-gpu [gpu-busy]: no GPU."),
    "line breaks and tabs": ("a\nb\tc", "nri-gpu [gpu-busy]: a?b?c."),
    "another script": ("caf\u00e9 \U0001f600", "nri-gpu [gpu-busy]: caf? ?."),
    "escapes of a terminal": ("\x1b[31mred\x7f", "nri-gpu [gpu-busy]: ?[31mred?."),
    "broken text": ("\ud800", "nri-gpu [gpu-busy]: ?."),
}


@pytest.mark.parametrize(("sentence", "shown"), SENTENCES.values(), ids=SENTENCES)
def test_a_refusal_is_printable_ascii_whatever_stands_in_it(sentence: str, shown: str) -> None:
    assert str(Reason(Code.GPU_BUSY, sentence)) == shown


def test_a_refusal_of_just_the_limit_stays_whole() -> None:
    around = len(str(Reason(Code.GPU_BUSY, "")))
    assert str(Reason(Code.GPU_BUSY, "x" * (REFUSAL_MAX - around))).endswith("x.")


def test_its_parts_make_one_sentence() -> None:
    for parts, sentence in (
        ({"cure": "mend it"}, "broken: mend it."),
        ({"why": "it fell", "cure": "mend it"}, "broken: it fell; mend it."),
        ({"why": "it fell.", "aside": ""}, "broken: it fell."),
        ({"cure": "mend it", "aside": "two are"}, "broken: mend it (two are)."),
    ):
        assert Reason(Code.GPU_BUSY, "broken", **parts).sentence == sentence


def test_a_longer_one_is_cut_and_says_so() -> None:
    text = str(Reason(Code.GPU_BUSY, "x" * REFUSAL_MAX))
    assert len(text) == REFUSAL_MAX
    assert text.endswith("x...")
