"""What go-gpuallocator's best effort takes, as its own Go code (876e7b7) answered: measured, not worked out.

topology, available in the order they were passed, required, size, the set it took, its points.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Golden(NamedTuple):
    """One answer."""

    topology: str
    available: tuple[int, ...]
    required: frozenset[int]
    size: int
    chosen: tuple[int, ...]
    points: int


def _some(text: str) -> tuple[int, ...]:
    """`0-3` or `0,2,5`."""
    first, dash, last = text.partition("-")
    return tuple(range(int(first), int(last) + 1)) if dash else tuple(map(int, text.split(","))) if text else ()


def _case(topology: str, available: str, required: str, size: int, chosen: str, points: int) -> Golden:
    return Golden(topology, _some(available), frozenset(_some(required)), size, _some(chosen), points)


def _prefixes(topology: str, *points: int) -> list[Golden]:
    """All GPUs free, sizes from 1: always the lowest indices."""
    every = tuple(range(len(points)))
    return [
        Golden(topology, every, frozenset(), size, every[:size], points[size - 1]) for size in range(1, len(points) + 1)
    ]


_ALL: Final = "0-7"
GOLDEN: Final = (
    _case("rtx8000", "0-3", "", 1, "0", 0),
    _case("rtx8000", "0-3", "", 2, "0,3", 200),
    _case("rtx8000", "0-3", "", 3, "0-2", 230),
    _case("rtx8000", "0-3", "", 4, "0-3", 460),
    _case("dgx1-p100", _ALL, "", 1, "0", 0),
    _case("dgx1-p100", _ALL, "", 2, "0,2", 150),
    _case("dgx1-p100", _ALL, "", 3, "0-2", 410),
    _case("dgx1-p100", _ALL, "", 4, "0-3", 820),
    _case("dgx1-p100", _ALL, "", 5, "0-4", 960),
    _case("dgx1-p100", _ALL, "", 6, "0,1,2,3,4,6", 1250),
    _case("dgx1-p100", _ALL, "", 7, "0-6", 1650),
    _case("dgx1-p100", _ALL, "", 8, _ALL, 2200),
    _case("dgx1-v100", _ALL, "", 1, "0", 0),
    _case("dgx1-v100", _ALL, "", 2, "0,3", 230),
    _case("dgx1-v100", _ALL, "", 3, "0,2,3", 610),
    _case("dgx1-v100", _ALL, "", 4, "0-3", 1120),
    _case("dgx1-v100", _ALL, "", 5, "0-4", 1360),
    _case("dgx1-v100", _ALL, "", 6, "0-5", 1750),
    _case("dgx1-v100", _ALL, "", 7, "0-6", 2250),
    _case("dgx1-v100", _ALL, "", 8, _ALL, 3000),
    *_prefixes("a100, PCIe", 0, 40, 60, 120, 160, 240, 300, 400),
    *_prefixes("a100", 0, 1240, 3660, 7320, 12160, 18240, 25500, 34000),
    *_prefixes("h100, PCIe", 0, 20, 60, 120, 160, 220, 300, 400),
    *_prefixes("h100", 0, 1820, 5460, 10920, 18160, 27220, 38100, 50800),
    *_prefixes("8 x PCIe", 0, 50, 110, 220, 260, 350, 450, 600),
    _case("dgx1-v100", "1-7", "", 2, "2,3", 250),
    _case("dgx1-v100", "1-7", "", 3, "1-3", 610),
    _case("dgx1-v100", "0,1,2,4,5,6", "", 3, "0-2", 510),
    _case("dgx1-v100", "0,2,5,7", "", 2, "0,2", 130),
    _case("dgx1-v100", _ALL, "0,5", 3, "0,1,5", 370),
    _case("dgx1-v100", _ALL, "0,5", 4, "0,1,2,5", 740),
    _case("dgx1-v100", _ALL, "0,2,4,6", 4, "0,2,4,6", 600),
    _case("dgx1-v100", _ALL, "4", 1, "4", 0),
    _case("dgx1-v100", _ALL, "4", 2, "4,7", 230),
    _case("dgx1-v100", _ALL, "4", 4, "4-7", 1120),
    _case("dgx1-v100", "7,6,5,4,3,2,1,0", "", 1, "7", 0),
    _case("dgx1-v100", "7,6,5,4,3,2,1,0", "", 2, "6,7", 250),
    _case("dgx1-v100", "0,2,4,5", "", 2, "4,5", 150),
    _case("dgx1-v100", "0,4,5,6", "", 2, "5,6", 230),
    _case("dgx1-v100", "0,3,1", "", 2, "0,3", 230),
    _case("dgx1-v100", "0,1,4", "", 2, "0,4", 210),
    _case("dgx1-v100", "1-7", "0-3", 4, "", 0),
    _case("dgx1-v100", _ALL, "1-6", 4, "", 0),
    _case("dgx1-v100", "1-5", "1-6", 1, "", 0),
    _case("a100, PCIe", "1-7", "", 2, "2,3", 40),
    _case("a100, PCIe", "0,2,4,6", "", 2, "0,2", 10),
    _case("a100, PCIe", "0,2,3,4,5", "", 4, "2-5", 120),
    _case("a100, PCIe", _ALL, "3", 2, "2,3", 40),
    _case("a100, PCIe", "4,7,5,3,0,6", "3,4", 3, "3-5", 60),
    _case("a100", "5,2,0,1,6,7,4", "1", 4, "0,1,6,7", 7320),
    _case("h100, PCIe", "0,1,2,4,5,6,7", "", 4, "4-7", 120),
    _case("h100, PCIe", _ALL, "5", 4, "4-7", 120),
    _case("h100, PCIe", "0,1,4,5,6", "", 2, "0,1", 20),
    _case("h100, PCIe", "3,4,5", "", 2, "4,5", 20),
    _case("h100, PCIe", "7,5,1,2", "", 2, "5,7", 20),
    _case("h100, PCIe", "3,2,0,6,5,7,1,4", "2", 3, "0,2,3", 60),
    _case("h100", "7,1,0,6,5", "5,7", 4, "1,5,6,7", 10890),
    _case("h100", "2,0,3,4,6,7,1,5", "3", 2, "1,3", 1820),
    _case("8 x PCIe", "1-7", "", 2, "2,3", 50),
    _case("8 x PCIe", _ALL, "1", 3, "0-2", 110),
    _case("8 x PCIe", "0,2,4,5,6", "", 3, "4-6", 110),
    _case("8 x PCIe", "0,2,5,7", "", 3, "0,2,5", 50),
    _case("8 x PCIe", "0,2,5,7", "", 2, "0,2", 30),
    _case("8 x PCIe", "0,2,4,6", "", 2, "0,2", 30),
    _case("8 x PCIe", "0,4,5,7,2,6,1,3", "", 2, "0,1", 50),
    _case("8 x PCIe", "2,6,5,0,7,1,3,4", "", 2, "2,3", 50),
)
# On 16 GPUs their search takes seconds, so these are answers only to be no worse than.
GOLDEN_16: Final = tuple(
    Golden("dgx2, PCIe", tuple(range(16)), frozenset(), size, tuple(range(size)), points)
    for size, points in ((1, 0), (2, 50), (4, 260), (8, 840), (16, 2320))
)
