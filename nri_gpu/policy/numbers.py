"""A kind of setting: a set of whole numbers."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from nri_gpu.policy.kinds import Whole
from nri_gpu.policy.text import toml_type


class Wholes(Struct, frozen=True):
    """A list, maybe empty, of whole numbers of one kind, each once; order does not matter."""

    item: Whole
    maximum: int

    def faults(self, raw: object) -> Iterator[tuple[str, str]]:
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
