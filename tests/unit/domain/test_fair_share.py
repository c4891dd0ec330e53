"""The choice of what is kept where there is too much."""

from __future__ import annotations

import pytest

from nri_gpu.domain.fair_share import by_turn, fair_share


def test_each_owner_has_a_turn_before_any_has_another() -> None:
    assert by_turn(["a1", "a2", "b1", "a3", "c1", "b2"], lambda each: each[0]) == ["a1", "b1", "c1", "a2", "b2", "a3"]


@pytest.mark.parametrize(
    ("most", "kept"),
    [(9, "aaaabbc"), (7, "aaaabbc"), (6, "aaabbc"), (5, "aabbc"), (4, "aabc"), (3, "abc"), (2, "ab"), (0, "")],
)
def test_the_many_of_one_owner_go_first(most: int, kept: str) -> None:
    assert "".join(fair_share("aaaabbc", str, most)) == kept


def test_sizes_count_and_the_order_stays() -> None:
    assert fair_share(["aaaa", "b", "aa", "cc"], lambda each: each[0], 7, len) == ["aaaa", "b", "cc"]
