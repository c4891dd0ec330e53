"""Invariant: whatever a file's bytes are, it has a note that is understood, or none, or one that is malformed."""

from __future__ import annotations

import functools
import io
import tempfile
from pathlib import Path
from typing import Final

from nri_gpu.driver.compat_packages import NOTE_OWNER, NOTE_SECTION, read_note
from nri_gpu.driver.elf import NOTE_BYTES_MAX, MalformedError, parse_elf, parse_note
from tests.fuzz.target import Target
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


NOTE: Final = Target(
    check,
    good=[seed_library()],
    bad=[b"", b"\x7fELF", seed_library()[:100]],
    pieces=[NOTE_OWNER, NOTE_SECTION, *(number.to_bytes(8, "little") for number in NUMBERS)],
)
TARGETS: Final = {"note": NOTE}
