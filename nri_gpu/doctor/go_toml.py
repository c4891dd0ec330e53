"""TOML as the Go libraries of containerd and CRI-O read it, and the durations in it.

Sources: pelletier/go-toml marshal.go and toml.go (1.9.5), unmarshaler.go (2.3, 2.4); BurntSushi/toml parse.go; Go's
time.ParseDuration.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

Toml = dict[str, object]
_MARK: Final = b"\xef\xbb\xbf"  # of the order of bytes, as some editors write it
_COMMENT: Final = re.compile(r"#[^\n]*")
_CONTROL: Final = dict.fromkeys({*range(32), 127} - {ord("\t")}, " ")
_DURATION: Final = re.compile(r"[-+]?(?:0|(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:h|ms|us|µs|μs|ns|m|s))+)")
_AMOUNT: Final = re.compile(r"([0-9.]+)(h|ms|us|µs|μs|ns|m|s)")
_UNITS_S: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
DEPTH: Final = 5  # of the tables that we read, and more
_LONGEST_S: Final = (1 << 63) / 1e9


class TomlLibrary(Struct, frozen=True):
    """A library, as far as it departs from TOML 1.0."""

    skips_mark: bool = False  # a file may begin with a byte order mark
    any_bytes: bool = False  # text may have bytes that are not UTF-8, and comments control characters
    any_case: bool = True  # a setting may be named in any case, else in lower or in upper case


GO_TOML_1: Final = TomlLibrary(skips_mark=True, any_bytes=True, any_case=False)  # containerd 1.x
GO_TOML_2: Final = TomlLibrary()  # containerd 2.x
BURNT_SUSHI: Final = TomlLibrary(skips_mark=True)  # CRI-O


def parse_toml(content: bytes, library: TomlLibrary) -> Toml:
    """Return what a file says. Raises: ValueError, RecursionError."""
    body = content.removeprefix(_MARK)
    if body != content and not library.skips_mark:
        raise ValueError("it begins with a byte order mark, which an editor wrote and this release does not read")
    if library.any_bytes:
        text = _COMMENT.sub(lambda comment: comment[0].translate(_CONTROL), body.decode(errors="replace"))
        return tomllib.loads(text.replace("\r", "\n"))
    try:
        return tomllib.loads(body.decode())
    except UnicodeDecodeError as error:
        line, byte = body.count(b"\n", 0, error.start) + 1, body[error.start]
        raise ValueError(f"line {line} has the byte 0x{byte:02x}, which is not UTF-8") from None


def spelled(table: Toml, names: Mapping[str, str], library: TomlLibrary, depth: int = DEPTH) -> Toml:
    """Return a table with its settings named as in `names`, and tables in it likewise.

    names: of settings, by their lower case. depth: of tables. Of several spellings the last in the order of bytes
    counts, since containerd sorts a plugin's settings before it reads them.
    """
    found: Toml = {}
    for key in sorted(table):
        name, value = names.get(key.lower(), key), table[key]
        if not library.any_case and key not in {name, name.lower(), name.upper()}:
            name = key
        if isinstance(value, dict):
            value = spelled(value, names, library, depth - 1) if depth else value
            value = merged(before, value) if isinstance(before := found.get(name), dict) else value
        found[name] = value
    return found


def merged(before: Toml, after: Toml) -> Toml:
    """Return two tables together: their tables merged likewise, and all else replaced, lists too."""
    together = dict(before)
    for key, value in after.items():
        old = together.get(key)
        together[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return together


def seconds(duration: str) -> float | None:
    """Return the seconds of a duration as Go writes it, `2s` or `1m30s`, or None if it is none."""
    if not _DURATION.fullmatch(duration):
        return None
    amount = sum(float(number) * _UNITS_S[unit] for number, unit in _AMOUNT.findall(duration))
    return None if amount > _LONGEST_S else -amount if duration.startswith("-") else amount
