"""What may stand behind `extras=`: words, each once, and IMEX channels by number."""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.claim import Operator
from nri_gpu.domain.extras import CHANNEL_MAX, Extra, Extras
from nri_gpu.request.text import BLANKS, Piece, guess, listed, quoted

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
    hint = f' (did you mean "{_OTHER_NAMES[name]}"?)' if name in _OTHER_NAMES else guess(name, _WORDS)
    return f"unknown extra {quoted(name)}, known: {listed(_KNOWN)}{hint}"
