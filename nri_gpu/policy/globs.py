"""Shell-style patterns over names, compiled when a policy is read so that no container waits for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate
from typing import ClassVar, Final

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
