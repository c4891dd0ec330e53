"""Small files of the kernel and of the host, which may not be there."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path, most: int = -1, encoding: str = "ascii") -> str | None:
    """What is in a file, odd bytes replaced; None where it cannot be read. most: bytes of it; -1: all."""
    try:
        with path.open("rb") as file:
            return file.read(most).decode(encoding, errors="replace")
    except OSError:
        return None
