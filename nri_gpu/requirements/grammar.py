"""The grammar of a requirement: a variable's value in, alternatives out, or the piece that means nothing and why.

    value       = alternative *( " " alternative )       one of them must hold; empty pieces do not count
    alternative = condition *( "," condition )           all of them must hold
    condition   = ( "cuda" | "driver" | "arch" ) ( "=" | "!=" | "<" | "<=" | ">" | ">=" ) digits *( "." digits )
                | "brand" ( "=" | "!=" ) word            properties and words in any case

NVIDIA's two checkers read lazily or skip what they do not know, so that a slip of the finger passes on one node and
fails on another. Here the whole value is understood first, whatever the node has.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from nri_gpu.requirements.facts import Property, Version, View, version_of
from nri_gpu.requirements.text import quoted

# Bounds what hostile text costs inside a request: each is some five microseconds. CUDA 13.0 images have 25.
DIFFERENT_MAX: Final = 128  # conditions
CONDITION_MAX: Final = 128  # characters, as in NVIDIA's checker; it also keeps numbers small enough to convert

_COMPARE: Final[Mapping[str, Callable[[Version, Version], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_PROPERTIES: Final = {name.value: name for name in Property}
_CONDITION: Final = re.compile(
    r"(cuda|driver|arch)([<>]=?|!?=)([0-9.]+)|(brand)(!?=)([a-z0-9_.-]+)", re.ASCII | re.IGNORECASE
)
_OPERATOR: Final = re.compile(r"([<>=!]+)")


class Condition(NamedTuple):
    """`driver>=535`. text: as written, fit to be shown. operand: a version, or for a brand its word in lower case."""

    text: str
    property: Property
    operator: str
    operand: Version | str

    def holds(self, view: View) -> bool:
        """Whether it does. What is not known meets no condition, not even `!=`."""
        if self.property not in view:
            return True
        match view[self.property], self.operand:
            case frozenset() as words, str() as word:
                return (word in words) is (self.operator == "=")
            case tuple() as version, tuple() as operand:
                return _COMPARE[self.operator](version, operand)
            case _:
                return False


Alternative = tuple[Condition, ...]


class Malformed(NamedTuple):
    """A condition that means nothing.

    text: as written, not fit to be shown. why: a clause that quotes it and says what is wrong.
    """

    text: str
    why: str


def parse_requirement(value: str, seen: dict[str, Condition] | None = None) -> tuple[Alternative, ...] | Malformed:
    """A value's alternatives, none for a value that requires nothing; else the first condition that means nothing.

    seen: what other values of the same image had; real ones repeat the same few conditions for a dozen brands.
    """
    seen = {} if seen is None else seen
    for text in _pieces(value):
        if text in seen:
            continue
        condition = _parse_condition(text) if len(seen) < DIFFERENT_MAX else Malformed(text, _one_more(text))
        if isinstance(condition, Malformed):
            return condition
        seen[text] = condition
    pieces = dict.fromkeys(value.split(" "))
    return tuple(filter(None, (tuple(seen[text] for text in piece.split(",") if text) for piece in pieces)))


def _pieces(value: str) -> Iterator[str]:
    """Its conditions, each once, in order."""
    return filter(None, dict.fromkeys(value.replace(" ", ",").split(",")))


def _one_more(text: str) -> str:
    return f"{quoted(text)} is one more than the {DIFFERENT_MAX} different conditions that an image may have"


def _parse_condition(text: str) -> Condition | Malformed:
    match = _CONDITION.fullmatch(text) if len(text) <= CONDITION_MAX else None
    if match is None:
        return Malformed(text, _why(text))
    name, comparison, operand = filter(None, match.groups())
    about = _PROPERTIES[name.lower()]
    if about is Property.BRAND:
        return Condition(text, about, comparison, operand.lower())
    version = version_of(operand)
    return Malformed(text, _why(text)) if version is None else Condition(text, about, comparison, version)


def _why(text: str) -> str:
    """What is wrong with a condition that was not understood."""
    if len(text) > CONDITION_MAX:
        return f"{quoted(text)} is {len(text)} characters long, over the limit of {CONDITION_MAX} for a condition"
    if not (text.isascii() and text.isprintable()):
        return f"{quoted(text)} is not printable ASCII; spaces part alternatives, commas part conditions"
    name, *rest = _OPERATOR.split(text, maxsplit=1)
    comparison, about = rest[0] if rest else "", _PROPERTIES.get(name.lower())
    if about is None and rest:
        what = f"is about {quoted(name)}" if name else "is about nothing"
        return f"{quoted(text)} {what}, known: {', '.join(_PROPERTIES)}"
    allowed = ("=", "!=") if about is Property.BRAND else tuple(_COMPARE)
    if comparison not in allowed:
        return f"{quoted(text)} needs one of {' '.join(allowed)} between a property and a value"
    if about is Property.BRAND:
        return f"{quoted(text)} needs a brand such as tesla"
    return f"{quoted(text)} needs a version of digits and dots, such as 12.4"
