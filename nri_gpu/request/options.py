"""The values of `extras=` (words, each once, and IMEX channels by number) and of `sharing=`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from nri_gpu.domain.claim import Operator
from nri_gpu.domain.edits import CHANNEL_MAX, Extra, Extras
from nri_gpu.domain.mps import MIB, WHOLE_PERCENT, MpsLimits
from nri_gpu.domain.text import did_you_mean, quoted
from nri_gpu.request.text import BLANKS, Piece, listed

_DIGITS_MAX: Final = len(str(CHANNEL_MAX))
_CHANNEL_SHAPE: Final = f"write imex:N, with N from 0 to {CHANNEL_MAX} without sign or leading zeros"
_WORDS: Final = tuple(extra.value for extra in Extra)
_KNOWN: Final = tuple("imex:N" if extra is Extra.IMEX else extra.value for extra in Extra)
# NVIDIA's own words for the same, in its variables and CDI classes.
_OTHER_NAMES: Final = {"mofed": Extra.RDMA, "infiniband": Extra.RDMA, "gdr": Extra.GDRCOPY, "imex-channel": Extra.IMEX}


def read_extras(piece: Piece, _: Operator) -> Extras:
    """`rdma,gds,imex:0`."""
    asked: set[Extra] = set()
    channels: set[int] = set()
    for item in piece.split(","):
        extra, channel = _read(item)
        if channel in channels or (channel is None and extra in asked):
            raise item.error(f"{quoted(item.text)} is named twice")
        asked.add(extra)
        if channel is not None:
            channels.add(channel)
    return Extras(frozenset(asked), tuple(sorted(channels)))


def _read(item: Piece) -> tuple[Extra, int | None]:
    """The extra, and of IMEX which channel."""
    word, colon, number = item.text.partition(":")
    name = word.rstrip(BLANKS)
    if name not in _WORDS:
        raise item.error(_unknown(name))
    extra = Extra(name)
    if extra is Extra.IMEX:
        return extra, _channel(item, number.lstrip(BLANKS))
    if colon:
        raise item.error(f'"{name}" takes no number: write {name} by itself')
    return extra, None


def _channel(item: Piece, text: str) -> int:
    plain = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX and (text == "0" or text[0] != "0")
    if not plain or int(text) > CHANNEL_MAX:
        raise item.error(f"{quoted(item.text)} names no IMEX channel: {_CHANNEL_SHAPE}")
    return int(text)


def _unknown(name: str) -> str:
    if not name:
        return f"an extra is missing here, known: {listed(_KNOWN)}"
    if name == "all":
        return f'"all" is not accepted, because it would mean more with each version: name {listed(_KNOWN)}'
    hint = f' (did you mean "{_OTHER_NAMES[name]}"?)' if name in _OTHER_NAMES else did_you_mean(name, _WORDS)
    return f"unknown extra {quoted(name)}, known: {listed(_KNOWN)}{hint}"


_UNITS: Final = {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3}
_NUMBER_DIGITS_MAX: Final = 12
_MEMORY_MAX: Final = 2**50  # bytes; more than any GPU has
_EXAMPLES: Final = "memory:10Gi, threads:50"


def read_sharing(piece: Piece, _: Operator) -> MpsLimits:
    """`memory:10Gi,threads:50`."""
    found: dict[str, int] = {}
    for item in piece.split(","):
        start = item.text.find(":")
        name = item.cut(0, start).text if start >= 0 else item.text
        reader = _SHARES.get(name)
        if reader is None:
            raise item.error(
                f"unknown share {quoted(name)}, known: {listed(_EXAMPLES.split(', '))}{did_you_mean(name, _SHARES)}"
            )
        if start < 0:
            raise item.error(f'"{name}" needs a value, such as in {_EXAMPLES}')
        if name in found:
            raise item.error(f"{quoted(name)} is named twice")
        found[name] = reader(item.cut(start + 1))
    return MpsLimits(found.get("memory", 0), found.get("threads", 0))


def _memory(piece: Piece) -> int:
    digits, unit = piece.text[:-2], _UNITS.get(piece.text[-2:])
    number = _decimal(digits)
    if number is None or unit is None:
        raise piece.error(f"{quoted(piece.text)} is not a share of memory: write a whole number with Ki, Mi or Gi")
    size = number * unit
    if not MIB <= size <= _MEMORY_MAX or size % MIB:
        raise piece.error(
            f"{quoted(piece.text)} is not a whole number of Mi that a GPU could have: write one, 1Mi or more"
        )
    return size // MIB


def _threads(piece: Piece) -> int:
    number = _decimal(piece.text)
    if number is None or not 1 <= number <= WHOLE_PERCENT:
        raise piece.error(
            f"{quoted(piece.text)} is not a share of threads: write a percentage from 1 to {WHOLE_PERCENT}"
        )
    return number


def _decimal(text: str) -> int | None:
    plain = text.isascii() and text.isdecimal() and len(text) <= _NUMBER_DIGITS_MAX and text[0] != "0"
    return int(text) if plain else None


_SHARES: Final[Mapping[str, Callable[[Piece], int]]] = {"memory": _memory, "threads": _threads}
