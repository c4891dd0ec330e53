"""Shell-style patterns over names, compiled when a policy is read so that no container waits for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from fnmatch import translate
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr

from nri_gpu.domain.value import Value

_WILD: Final = frozenset("*?[")

Matcher = Callable[[str], object]


class Globs(Value, frozen=True):
    """Patterns in the operator's order; `*`, `?`, `[a-z]`, `[!a-z]`; whole names, case matters."""

    aside: ClassVar = ("_matchers",)

    patterns: tuple[str, ...]
    _matchers: tuple[Matcher, ...] = ()

    def __post_init__(self) -> None:
        force_setattr(self, "_matchers", tuple(_matcher(pattern) for pattern in self.patterns))

    def first(self, name: str) -> int | None:
        """Index of the first pattern that matches, None where none does."""
        return next((index for index, matches in enumerate(self._matchers) if matches(name)), None)


def is_literal(pattern: str) -> bool:
    """Whether a pattern can only match itself."""
    return _WILD.isdisjoint(pattern)


def _matcher(pattern: str) -> Matcher:
    if is_literal(pattern):
        return pattern.__eq__
    head, _, tail = pattern.partition("*")
    # Nearly all patterns have one star and nothing else, and compiling is what takes time where there are thousands.
    return _between(head, tail) if is_literal(head + tail) else re.compile(translate(pattern)).match


def _between(head: str, tail: str) -> Matcher:
    shortest = len(head) + len(tail)
    return lambda name: len(name) >= shortest and name.startswith(head) and name.endswith(tail)


EVERYTHING: Final = Globs(("*",))
NOTHING: Final = Globs(())


class Part(StrEnum):
    """What of a name is known."""

    ALL = "all"
    BEGINNING = "beginning"
    END = "end"


class Shape(NamedTuple):
    """About which name, what of it, and how many characters."""

    name: str
    part: Part
    length: int

    def of(self, text: str) -> str:
        """That part of a name."""
        if self.part is Part.ALL:
            return text
        return text[: self.length] if self.part is Part.BEGINNING else text[-self.length :]


Home = tuple[Shape, str]


class Index(Struct, frozen=True):
    """homes: shape -> text -> the rules filed there, in order. always: those that are filed nowhere."""

    homes: Mapping[Shape, Mapping[str, tuple[int, ...]]] = MappingProxyType({})
    always: tuple[int, ...] = ()

    @classmethod
    def of(cls, anchors: Sequence[Mapping[str, Globs]]) -> Index:
        """Of the patterns of each rule, by the name that they are about."""
        choices = [tuple(_choices(each)) for each in anchors]
        crowd = Counter(home for some in choices for homes in some for home in homes)
        homes: dict[Shape, dict[str, tuple[int, ...]]] = {}
        filed: dict[Home, list[int]] = {}
        for index, some in enumerate(choices):
            # The least crowded choice; a rule is filed under all of that one's homes, one for each pattern.
            for home in min(some, key=lambda each: max(crowd[home] for home in each), default=()):
                filed.setdefault(home, []).append(index)
        for (shape, text), indices in filed.items():
            homes.setdefault(shape, {})[text] = tuple(indices)
        return cls(homes, tuple(index for index, some in enumerate(choices) if not some))

    def candidates(self, names: Mapping[str, str]) -> Iterator[tuple[int, ...]]:
        """Rules that may match these names, each group in order; all others cannot."""
        yield self.always
        for shape, texts in self.homes.items():
            name = names.get(shape.name)
            if name is not None and (found := texts.get(shape.of(name))):
                yield found


def _choices(anchors: Mapping[str, Globs]) -> Iterator[frozenset[Home]]:
    """One for each name of whose every pattern the beginning is fixed, or the end."""
    for name, globs in anchors.items():
        for part in (Part.BEGINNING, Part.END):
            homes = [_home(name, pattern, part) for pattern in globs.patterns]
            known = frozenset(home for home in homes if home is not None)
            if None not in homes:
                yield known


def _home(name: str, pattern: str, part: Part) -> Home | None:
    if is_literal(pattern):
        return Shape(name, Part.ALL, 0), pattern
    if part is Part.BEGINNING:
        text = pattern[: min(at for at in map(pattern.find, "*?[") if at >= 0)]
    else:
        # A bracket that is never closed stands for itself: nothing is known of what follows.
        text = "" if "[" in pattern else pattern[max(map(pattern.rfind, "*?")) + 1 :]
    return (Shape(name, part, len(text)), text) if text else None
