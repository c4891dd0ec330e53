"""The choice of what is kept where there is too much."""

from __future__ import annotations

import pytest

from nri_gpu.observe.fair_share import fair_share


@pytest.mark.parametrize(
    ("most", "kept"),
    [(9, "aaaabbc"), (7, "aaaabbc"), (6, "aaabbc"), (5, "aabbc"), (4, "aabc"), (3, "abc"), (2, "ab"), (0, "")],
)
def test_the_many_of_one_owner_go_first(most: int, kept: str) -> None:
    assert "".join(fair_share("aaaabbc", str, most)) == kept


def test_sizes_count_and_the_order_stays() -> None:
    assert fair_share(["aaaa", "b", "aa", "cc"], lambda each: each[0], 7, len) == ["aaaa", "b", "cc"]
