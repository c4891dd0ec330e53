"""Trees of files that a test writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_files(base: Path, files: Mapping[str, str]) -> Path:
    """Each text at its path below `base`, with the folders that it needs. Returns `base`."""
    for path, text in files.items():
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_text(text)
    return base
