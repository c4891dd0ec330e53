"""The choice of what is kept where there is too much: nobody's many displace what others have. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def fair_share(
    items: Iterable[T], whose: Callable[[T], Hashable], most: int, size: Callable[[T], int] = lambda _: 1
) -> list[T]:
    """Return items of `most` size together, in their order: the first of each owner before the second of any."""
    every, met, turns = [*items], Counter[Hashable](), list[tuple[int, int]]()
    for at, item in enumerate(every):
        met[owner := whose(item)] += 1
        turns.append((met[owner], at))
    kept = list[int]()
    for _, at in sorted(turns):
        most -= size(every[at])
        if most < 0:
            break
        kept.append(at)
    return [every[at] for at in sorted(kept)]
