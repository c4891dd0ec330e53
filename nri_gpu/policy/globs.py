"""Shell-style patterns over names, compiled when a policy is read so that no container waits for it."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import Final

from msgspec import Struct
from msgspec.structs import force_setattr

_WILD: Final = frozenset("*?[")


class Globs(Struct, frozen=True):
    """Patterns in the operator's order; `*`, `?`, `[a-z]`, `[!a-z]`; whole names, case matters."""

    patterns: tuple[str, ...]
    _literals: frozenset[str] = frozenset()
    _wild: re.Pattern[str] | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "_literals", frozenset(filter(is_literal, self.patterns)))
        if wild := [translate(pattern) for pattern in self.patterns if not is_literal(pattern)]:
            force_setattr(self, "_wild", re.compile("|".join(wild)))

    def match(self, name: str) -> bool:
        """Whether one of the patterns matches."""
        return name in self._literals or (self._wild is not None and self._wild.match(name) is not None)

    def first(self, name: str) -> int | None:
        """Index of the first pattern that matches, None where none does."""
        return next((index for index, each in enumerate(self.patterns) if Globs((each,)).match(name)), None)


def is_literal(pattern: str) -> bool:
    """Whether a pattern can only match itself."""
    return _WILD.isdisjoint(pattern)


EVERYTHING: Final = Globs(("*",))
NOTHING: Final = Globs(())
