"""What may stand behind `sharing=`: a share of the GPU's memory and one of its multiprocessors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from nri_gpu.domain.claim import Operator
from nri_gpu.domain.mps import MIB, WHOLE_PERCENT, Sharing
from nri_gpu.request.text import Piece, guess, listed, quoted

_UNITS: Final = {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3}
_DIGITS_MAX: Final = 12
_MEMORY_MAX: Final = 2**50  # bytes; more than any GPU has
_EXAMPLES: Final = "memory:10Gi, threads:50"


def read_sharing(piece: Piece, _: Operator) -> Sharing:
    """`memory:10Gi,threads:50`."""
    found: dict[str, int] = {}
    for item in piece.split(","):
        start = item.text.find(":")
        name = item.cut(0, start).text if start >= 0 else item.text
        reader = _SHARES.get(name)
        if reader is None:
            raise item.error(
                f"unknown share {quoted(name)}, known: {listed(_EXAMPLES.split(', '))}{guess(name, _SHARES)}"
            )
        if start < 0:
            raise item.error(f'"{name}" needs a value, such as in {_EXAMPLES}')
        if name in found:
            raise item.error(f"{quoted(name)} is named twice")
        found[name] = reader(item.cut(start + 1))
    return Sharing(found.get("memory", 0), found.get("threads", 0))


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
    plain = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX and text[0] != "0"
    return int(text) if plain else None


_SHARES: Final[Mapping[str, Callable[[Piece], int]]] = {"memory": _memory, "threads": _threads}
