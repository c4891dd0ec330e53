"""Rules that can never decide, because an earlier one takes all that they match.

Told by their patterns alone: where it says so, it is so; where it cannot tell, it says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

from nri_gpu.policy.globs import Globs, is_literal
from nri_gpu.policy.rules import Rule

# Each rule is held against so many earlier ones, and as many about its very namespace: `check` must end, too.
BROAD_MAX: Final = 256
_NAMES: Final = ("namespace", "pod", "container", "runtime_handler")


def shadowed(rules: tuple[Rule, ...]) -> Iterator[tuple[int, int]]:
    """Index of each rule that can never decide, and of the earlier one because of which."""
    broad: list[int] = []
    of_namespace: dict[str, list[int]] = {}
    for index, rule in enumerate(rules):
        own = rule.namespace.patterns if rule.namespace and all(map(is_literal, rule.namespace.patterns)) else ()
        earlier = sorted(
            {*broad[:BROAD_MAX], *(each for name in own for each in of_namespace.get(name, [])[:BROAD_MAX])}
        )
        before = next((each for each in earlier if covers(rules[each], rule)), None)
        if before is not None:
            yield index, before
            continue  # whatever it covers, the earlier one does
        for name in own:
            of_namespace.setdefault(name, []).append(index)
        if not own:
            broad.append(index)


def covers(broad: Rule, narrow: Rule) -> bool:
    """Whether everything that one rule matches is matched by another."""
    return (
        all(_globs_cover(getattr(broad, name), getattr(narrow, name)) for name in _NAMES)
        and (broad.qos is None or (narrow.qos is not None and narrow.qos <= broad.qos))
        and _labels_cover(broad, narrow)
    )


def _labels_cover(broad: Rule, narrow: Rule) -> bool:
    wanted = dict(narrow.labels or ())
    return all(key in wanted and _globs_cover(globs, wanted[key]) for key, globs in broad.labels or ())


def _globs_cover(broad: Globs | None, narrow: Globs | None) -> bool:
    if broad is None:
        return True
    patterns = ("*",) if narrow is None else narrow.patterns
    # A label must be there to match at all, and any other name always is: `*` and no pattern then mean the same.
    return all(any(pattern_covers(one, other) for one in broad.patterns) for other in patterns)


def pattern_covers(broad: str, narrow: str) -> bool:
    """Whether a pattern matches whatever another does."""
    if broad in (narrow, "*"):
        return True
    if is_literal(narrow):
        return fnmatchcase(narrow, broad)
    # Read as a name, the narrow one stands for all it matches, if only `*` of the broad one can take its wild parts.
    return "?" not in broad and "[" not in broad and "[" not in narrow and fnmatchcase(narrow, broad)
