"""Kinds of settings: each checks a raw TOML value, converts it, and describes itself as JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from nri_gpu.domain.text import quoted
from nri_gpu.policy.globs import Globs
from nri_gpu.policy.text import known_words, toml_type

# What is wrong: where inside the value ("" or "[2]"), and the sentence.
Wrong = Iterator[tuple[str, str]]

GLOBS_MAX: Final = 256  # patterns; each is compiled when the file is read


class SettingKind(Struct, frozen=True):
    """One kind of value. `convert` takes only what `faults` found nothing in; `raw` is its inverse."""

    def faults(self, raw: object) -> Wrong:
        """Everything wrong with a raw value."""
        raise NotImplementedError

    def convert(self, raw: Any) -> Any:  # noqa: ANN401 - raw TOML, checked by `faults`; the value in our types
        """The value in our types; unless a kind says otherwise, the raw one."""
        return raw

    def raw(self, value: Any) -> Any:  # noqa: ANN401 - as above
        """The value as TOML has it; unless a kind says otherwise, as it is."""
        return value

    def schema(self) -> dict[str, object]:
        """The same rule as JSON Schema."""
        raise NotImplementedError


class Declaration(Struct, frozen=True):
    """What the policy model says of a setting beside its type and default.

    flag: the command line option that overrides it, if there is one.
    """

    kind: SettingKind
    help: str
    flag: str = ""


class Text(SettingKind, frozen=True):
    """A string of one pattern, the same for our check and for an editor's. rule: the pattern in words."""

    pattern: str
    rule: str
    max_length: int

    def faults(self, raw: object) -> Wrong:
        """Not a string, too long, or not of the pattern."""
        if not isinstance(raw, str):
            yield "", f"must be a string, not {toml_type(raw)}"
        elif len(raw) > self.max_length:
            yield "", f"has {len(raw)} characters, over the limit of {self.max_length}"
        elif not re.fullmatch(self.pattern, raw):
            yield "", f"must be {self.rule}, not {quoted(raw)}"

    def schema(self) -> dict[str, object]:
        """Pattern and length."""
        return {"type": "string", "pattern": f"^(?:{self.pattern})$", "maxLength": self.max_length}


class FolderPath(Text, frozen=True):
    """A path that may end in a slash, as shells complete it, and is kept without."""

    def convert(self, raw: str) -> str:
        """Without its last slash."""
        return raw.rstrip("/") or raw[:1]


class Whole(SettingKind, frozen=True):
    """A whole number between two bounds, both included."""

    minimum: int
    maximum: int

    def faults(self, raw: object) -> Wrong:
        """Not an integer, or out of bounds."""
        if isinstance(raw, bool) or not isinstance(raw, int):
            yield "", f"must be a whole number, not {toml_type(raw)}"
        elif not self.minimum <= raw <= self.maximum:
            shown = raw if abs(raw) < 10**12 else "a huge number"
            yield "", f"must be {self.minimum} to {self.maximum}, not {shown}"

    def schema(self) -> dict[str, object]:
        """An integer with its bounds."""
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


class Flag(SettingKind, frozen=True):
    """True or false."""

    def faults(self, raw: object) -> Wrong:
        """Not a boolean."""
        if not isinstance(raw, bool):
            yield "", f"must be true or false, not {toml_type(raw)}"

    def schema(self) -> dict[str, object]:
        """A boolean."""
        return {"type": "boolean"}


class Choice(SettingKind, frozen=True):
    """One word of a closed set. but: those of it that cannot be said here."""

    words: type[StrEnum]
    but: frozenset[StrEnum] = frozenset()

    def faults(self, raw: object) -> Wrong:
        """Not one of the words."""
        if not isinstance(raw, str):
            yield "", f"must be a string, not {toml_type(raw)}"
        elif raw not in (known := [word for word in self.words if word not in self.but]):
            yield "", f"cannot be {quoted(raw)}{known_words(raw, known)}"

    def convert(self, raw: str) -> StrEnum:
        """The word."""
        return self.words(raw)

    def raw(self, value: StrEnum) -> object:
        """Its text."""
        return value.value

    def schema(self) -> dict[str, object]:
        """An enumeration."""
        return {"enum": [word.value for word in self.words if word not in self.but]}


class Choices(SettingKind, frozen=True):
    """Some of a closed set of words, each once; order does not matter. minimum: how many at least. but: not these."""

    words: type[StrEnum]
    minimum: int = 1
    but: frozenset[StrEnum] = frozenset()

    def faults(self, raw: object) -> Wrong:
        """Not a list, too short, or an item wrong or doubled."""
        return _list_faults(raw, Choice(self.words, self.but), minimum=self.minimum, maximum=len(self.words))

    def convert(self, raw: list[str]) -> frozenset[StrEnum]:
        """The set."""
        return frozenset(self.words(word) for word in raw)

    def raw(self, value: frozenset[StrEnum]) -> object:
        """In the order of their declaration."""
        return [word.value for word in self.words if word in value]

    def schema(self) -> dict[str, object]:
        """An array of unique words."""
        least = {"minItems": self.minimum} if self.minimum else {}
        return {"type": "array", "items": Choice(self.words, self.but).schema(), **least, "uniqueItems": True}


class Texts(SettingKind, frozen=True):
    """A list, maybe empty, of strings of one kind, each once; order matters."""

    item: Text
    maximum: int

    def faults(self, raw: object) -> Wrong:
        """Not a list, too long, or an item wrong or doubled."""
        return _list_faults(raw, self.item, minimum=0, maximum=self.maximum)

    def convert(self, raw: list[str]) -> Any:  # noqa: ANN401 - a tuple of strings, or what a subclass makes
        """Each as its kind has it."""
        return tuple(map(self.item.convert, raw))

    def raw(self, value: Any) -> object:  # noqa: ANN401 - as above
        """The strings."""
        return list(value)

    def schema(self) -> dict[str, object]:
        """An array of unique strings."""
        return {"type": "array", "items": self.item.schema(), "maxItems": self.maximum, "uniqueItems": True}


class Patterns(Texts, frozen=True):
    """A list, maybe empty, of shell-style patterns, each once."""

    maximum: int = GLOBS_MAX

    def convert(self, raw: list[str]) -> Globs:
        """Compiled."""
        return Globs(tuple(raw))

    def raw(self, value: Globs) -> object:
        """The patterns."""
        return list(value.patterns)


def _list_faults(raw: object, item: SettingKind, *, minimum: int, maximum: int) -> Wrong:
    if not isinstance(raw, list):
        yield "", f"must be an array, not {toml_type(raw)}"
        return
    if len(raw) < minimum:
        yield "", "must not be empty"
    seen: set[str] = set()
    for index, each in enumerate(raw):
        wrong = [message for _, message in item.faults(each)]
        if not wrong and each in seen:
            wrong = [f"{quoted(each)} is listed twice"]
        yield from ((f"[{index}]", message) for message in wrong)
        if isinstance(each, str):
            seen.add(each)
    if len(raw) > maximum and len(seen) > maximum:
        yield "", f"has {len(raw)} items, over the limit of {maximum}"


class Wholes(SettingKind, frozen=True):
    """A list, maybe empty, of whole numbers of one kind, each once; order does not matter."""

    item: Whole
    maximum: int

    def faults(self, raw: object) -> Wrong:
        """Not a list, too long, or an item wrong or doubled."""
        if not isinstance(raw, list):
            yield "", f"must be an array, not {toml_type(raw)}"
            return
        for index, each in enumerate(raw):
            wrong = [message for _, message in self.item.faults(each)]
            if not wrong and each in raw[:index]:
                wrong = [f"{each} is listed twice"]
            yield from ((f"[{index}]", message) for message in wrong[:1])
        if len(raw) > self.maximum:
            yield "", f"has {len(raw)} items, over the limit of {self.maximum}"

    def convert(self, raw: list[int]) -> frozenset[int]:
        """The set."""
        return frozenset(raw)

    def raw(self, value: frozenset[int]) -> object:
        """In order."""
        return sorted(value)

    def schema(self) -> dict[str, object]:
        """An array of unique integers."""
        return {"type": "array", "items": self.item.schema(), "maxItems": self.maximum, "uniqueItems": True}


POOL_NAMES: Final = Text(r"[A-Za-z0-9_.-]+", "a pool's name: letters, digits and _ . -", 64)


class Otherwise(StrEnum):
    """What happens to a container that asks and may not."""

    REFUSE = "refuse"
    IGNORE = "ignore"


SOCKET_PATH_MAX: Final = 107  # bytes: sun_path of a Unix socket holds 108 with its NUL (Linux: unix(7))

# Printable ASCII without blanks, because these paths are shown in refusals; no part of a path is "." or "..".
_PATH: Final = r"(?:/(?!\.\.?(?:/|$))[!-.0-~]+)+"
ANY_FOLDER: Final = FolderPath(rf"/|{_PATH}/?", 'an absolute path without blanks, "." or ".."', 1024)
FOLDER: Final = FolderPath(rf"{_PATH}/?", 'an absolute path below / without blanks, "." or ".."', 1024)
FOLDER_OR_NONE: Final = FolderPath(
    rf"|{_PATH}/?", 'empty or an absolute path below / without blanks, "." or ".."', 1024
)
ROOT_OR_NONE: Final = FolderPath(rf"|/|{_PATH}/?", 'empty or an absolute path without blanks, "." or ".."', 1024)
FILE_OR_NONE: Final = Text(rf"|{_PATH}", 'empty or an absolute path without blanks, "." or ".."', 1024)
SOCKET: Final = Text(_PATH, 'an absolute path to a socket without blanks, "." or ".."', SOCKET_PATH_MAX)
SOCKET_OR_NONE: Final = Text(rf"|{_PATH}", "empty or an absolute path to a socket", SOCKET_PATH_MAX)
NAMESPACES: Final = Patterns(Text(r"[!-~]+", "a pattern of printable ASCII without blanks", 253))
