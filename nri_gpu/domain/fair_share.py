"""The order in which owners have their turn, and the choice of what is kept where there is too much. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")


def by_turn(items: Iterable[T], whose: Callable[[T], Hashable]) -> list[T]:
    """Return all items, the first of each owner before the second of any."""
    met, turns = Counter[Hashable](), defaultdict[int, list[T]](list)
    for item in items:
        met[owner := whose(item)] += 1
        turns[met[owner]].append(item)
    return [*chain.from_iterable(turns.values())]  # no owner has a turn that nobody had the turn before


def fair_share(
    items: Iterable[T], whose: Callable[[T], Hashable], most: int, size: Callable[[T], int] = lambda _: 1
) -> list[T]:
    """Return items of `most` size together, in their order: by turn, so that nobody's many displace others'."""
    kept = list[tuple[int, T]]()
    for at, item in by_turn(enumerate(items), lambda each: whose(each[1])):
        most -= size(item)
        if most < 0:
            break
        kept.append((at, item))
    return [item for _, item in sorted(kept, key=itemgetter(0))]
