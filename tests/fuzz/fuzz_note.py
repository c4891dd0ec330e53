"""Invariant: whatever a file's bytes are, it has a note that is understood, none, or one that is refused as malformed.

As a test it runs a thousand mutations of a library that a compiler made; by itself (`python -m tests.fuzz.fuzz_note
--seconds 60`) it mutates until the time is over and prints the seed that broke the invariant.
"""

from __future__ import annotations

import functools
import io
import random
import struct
import sys
import tempfile
from pathlib import Path
from typing import Final

from nri_gpu.driver.compat import NOTE_OWNER, NOTE_SECTION, read_note
from nri_gpu.driver.elf import NOTE_BYTES_MAX, MalformedError, parse_elf, parse_note
from tests.fuzz.mutation import fuzz
from tests.support import compat

NUMBERS: Final = (0, 1, 4, 7, 8, 0x7F, 0xFF, 0xFFFF, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


@functools.cache
def seed_library() -> bytes:
    """A libcuda with NVIDIA's note, small enough to hit what matters."""
    with tempfile.TemporaryDirectory() as folder:
        made = compat.make_package(Path(folder) / "packages", "13.0", "580.65.06", compat.note("13.0", (535, 580)))
        return (made / "libcuda.so.580.65.06").read_bytes()


def check(data: bytes) -> bool:
    """Whether it has a note that is understood; any other exception comes out as it is."""
    parse_elf(io.BytesIO(data))
    try:
        text = parse_note(io.BytesIO(data), NOTE_SECTION, NOTE_OWNER)
        if text is None:
            return False
        assert len(text) <= NOTE_BYTES_MAX
        cuda, drivers = read_note(text)
    except MalformedError:
        return False
    assert not cuda or all(part.isdigit() for part in cuda.split("."))
    assert all(type(each) is int for each in drivers)
    return True


def mutated(dice: random.Random) -> bytes:
    """With a few numbers and bytes changed, mostly in the header, the sections' table and the note; sometimes cut."""
    data = bytearray(seed_library())
    (table,) = struct.unpack_from("<Q", data, 40)
    note = data.index(NOTE_OWNER.encode()) - 12
    for _ in range(dice.randint(1, 4)):
        near = dice.choice((dice.randrange(64), table + dice.randrange(len(data) - table), note + dice.randrange(160)))
        at = min(near, len(data) - 8)
        if dice.random() < 0.5:
            form = dice.choice(("<I", "<I", "<Q"))
            struct.pack_into(form, data, at, dice.choice(NUMBERS) & (2 ** (8 * struct.calcsize(form)) - 1))
        else:
            data[at] = dice.randrange(256)
    return bytes(data[: dice.randrange(len(data))]) if dice.random() < 0.1 else bytes(data)


def test_the_seed_is_understood() -> None:
    assert check(seed_library())


def test_a_thousand_mutations() -> None:
    dice = random.Random(3)
    assert any([check(mutated(dice)) for _ in range(1000)])


if __name__ == "__main__":
    sys.exit(fuzz(check, mutated, __doc__))
