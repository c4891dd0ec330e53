"""The version before this one as it was released, out of this checkout's git: it runs beside today's in tests."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.support.cache import cache_folder, kept

COMMIT: Final = "d995626f621ce1ce7e532a8c2ece32ed396af36f"
PROJECT: Final = Path(__file__).parents[2]


def released() -> Mapping[str, str]:
    """The environment in which `python -m nri_gpu` is that version. Skip the test where git does not have it."""
    return {"PYTHONPATH": str(kept(cache_folder() / f"released-{COMMIT[:8]}", _unpack))}


def _unpack(folder: Path) -> None:
    command = ["git", "-C", str(PROJECT), "archive", COMMIT, "nri_gpu"]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"git does not have {COMMIT[:8]}, the version before this one: `git fetch --unshallow` brings it")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
