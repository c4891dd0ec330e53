"""Reads tables of a TOML file strictly: notes every fault with its key path, and goes on reading."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, TypeVar

from nri_gpu.domain.errors import Fault

T = TypeVar("T")
SECONDS_MAX: Final = 31_536_000  # a year
MAJOR_MAX: Final = 4095  # 12 bits (linux/kdev_t.h)

_KINDS: Final = {str: "text", int: "a whole number", bool: "true or false", dict: "a table", list: "an array of tables"}


class Notes:
    """The faults of one file, and the values that must be unique in it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.faults: list[Fault] = []
        self._firsts: dict[tuple[str, Hashable], str] = {}

    def fault(self, path: str, message: str) -> None:
        """Notes one fault at a key path."""
        self.faults.append(Fault(self.file, path, message))

    def apart(self) -> Notes:
        """For values that may repeat those so far, but not each other; faults go to the same list."""
        other = Notes(self.file)
        other.faults = self.faults
        return other

    def once(self, kind: str, value: Hashable, path: str) -> None:
        """Notes a fault if `value` occurred before under this `kind`."""
        first = self._firsts.setdefault((kind, value), path)
        if first != path:
            self.fault(path, f"the same as {first}")


class Table:
    """One table. A value that is missing or wrong is noted, and reads as None.

    path: of the table, `gpu[2]`; empty for the file's own.
    """

    def __init__(self, notes: Notes, data: dict[str, Any], path: str = "") -> None:
        self._notes = notes
        self._data = data
        self._path = path
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        self._read.add(key)
        return key in self._data

    def text(self, key: str, *, default: str | None = None, optional: bool = False) -> str | None:
        """A string."""
        return self._take(key, str, default, optional=optional)

    def seconds(self, key: str) -> float:
        """A number of seconds from 0, whole or not."""
        value = self._data.get(key)
        if type(value) is not float:
            return float(self.number(key, 0, SECONDS_MAX) or 0)
        self._read.add(key)
        if not 0 <= value <= SECONDS_MAX:  # false of NaN too
            self.wrong(key, f"{value} is not from 0 to {SECONDS_MAX}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean."""
        taken = self._take(key, bool, default)
        return default if taken is None else taken

    def maybe_flag(self, key: str) -> bool | None:
        """A boolean, or nothing."""
        return self._take(key, bool, None, optional=True)

    def number(self, key: str, low: int, high: int, *, optional: bool = False) -> int | None:
        """A whole number from `low` to `high`."""
        number = self._take(key, int, None, optional=optional)
        if number is not None and not low <= number <= high:
            self.wrong(key, f"{number} is not from {low} to {high}")
            return None
        return number

    def parsed(
        self, key: str, parse: Callable[[str], T], *, default: str | None = None, optional: bool = False
    ) -> T | None:
        """A string that `parse` understands; its ValueError is the fault."""
        text = self.text(key, default=default, optional=optional)
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            self.wrong(key, str(error))
            return None

    def one_of(self, key: str, words: Iterable[str], *, default: str | None = None) -> str | None:
        """A string that is one of these words."""
        text, known = self.text(key, default=default), tuple(words)
        if text is None or text in known:
            return text
        self.wrong(key, f"{text[:64]!r} is none of {', '.join(filter(None, known))}")
        return None

    def words(self, key: str) -> list[str] | None:
        """An array of texts, or one text with commas between; None where it is missing."""
        if not self.has(key):
            return None
        value = self._data[key]
        words = value.split(",") if isinstance(value, str) else value
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return [word.strip() for word in words if word.strip()]
        self.wrong(key, "must be an array of texts, or one text with commas")
        return None

    def table(self, key: str, *, optional: bool = False) -> Table:
        """A table below this one; an empty one where it is missing."""
        data = self._take(key, dict, None, optional=optional)
        # Below a table that is noted as missing, nothing more is noted.
        notes = self._notes if data is not None or optional else Notes(self._notes.file)
        return Table(notes, data or {}, self._at(key))

    def tables(self, key: str) -> list[Table]:
        """An array of tables; empty where it is missing."""
        items = self._take(key, list, None, optional=True) or []
        below = []
        for place, item in enumerate(items):
            if isinstance(item, dict):
                below.append(Table(self._notes, item, self._at(f"{key}[{place}]")))
            else:
                self.wrong(f"{key}[{place}]", "must be a table")
        return below

    def apart(self) -> Table:
        """The same table, whose values may repeat those of tables before it."""
        return Table(self._notes.apart(), self._data, self._path)

    def once(self, key: str, value: Hashable | None, *, among: str) -> None:
        """Notes a fault if another table has the same value under this key."""
        if value is not None:
            self._notes.once(f"{among}.{key}", value, self._at(key))

    def wrong(self, key: str, message: str) -> None:
        """Notes a fault of this key."""
        self._notes.fault(self._at(key), message)

    def done(self) -> None:
        """Notes every key that was not read."""
        for key in sorted(self._data.keys() - self._read):
            self.wrong(key, f"unknown key (known here: {', '.join(sorted(self._read))})")

    def flag_or_tables(self, key: str) -> tuple[bool, list[Table]]:
        """A boolean, or an array of tables, which means true."""
        if isinstance(self._data.get(key), list):
            return True, self.tables(key)
        return self.flag(key, default=False), []

    def _take(self, key: str, kind: type[T], default: T | None, *, optional: bool = False) -> T | None:
        self._read.add(key)
        if key not in self._data:
            if default is None and not optional:
                self.wrong(key, f"missing; {_KINDS[kind]}")
            return default
        value = self._data[key]
        if type(value) is not kind:  # a bool is an int to isinstance
            self.wrong(key, f"must be {_KINDS[kind]}")
            return None
        return value

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path and key else self._path or key
