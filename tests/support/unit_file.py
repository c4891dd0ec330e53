"""A systemd unit as text: its lines in order, each with the comment that explains it."""

from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from tests.support.errors import HarnessError

OURS: Final = Path(__file__).parents[2] / "systemd" / "nri-gpu.service"


class Line(Struct, frozen=True):
    """One `key=value`. why: the comment lines right above it, without their marks."""

    section: str
    key: str
    value: str
    why: str


class Unit(Struct, frozen=True):
    """A unit file."""

    lines: tuple[Line, ...]

    @classmethod
    def read(cls, path: Path = OURS) -> Self:
        """Raises: HarnessError: a line that is neither comment, section nor `key=value`."""
        section, why, lines = "", [], []
        for text in path.read_text().splitlines():
            if text.startswith("#"):
                why.append(text.removeprefix("#").strip())
                continue
            if text.startswith("["):
                section = text.strip("[]")
            elif "=" in text:
                key, _, value = text.partition("=")
                lines.append(Line(section, key, value, " ".join(why)))
            elif text:
                raise HarnessError(f"{path}: what is {text!r}?")
            why = []
        return cls(tuple(lines))

    def values(self, key: str) -> list[str]:
        """All values of a key, in order."""
        return [line.value for line in self.lines if line.key == key]

    def value(self, key: str) -> str:
        """The last value of a key, which is the one that counts; empty when there is none."""
        return next(reversed(self.values(key)), "")

    def words(self, key: str) -> list[str]:
        """The words of all values of a key."""
        return " ".join(self.values(key)).split()

    def on(self, key: str) -> bool:
        """Whether a switch is on."""
        return self.value(key) in {"yes", "true", "on", "1"}
