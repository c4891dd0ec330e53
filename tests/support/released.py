"""The version before this one as it was released, out of this checkout's git: it runs beside today's in tests."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.support.cache import cache_folder, kept

COMMIT: Final = "d995626f621ce1ce7e532a8c2ece32ed396af36f"
BEFORE_CORDONS: Final = "6da95ad0"  # the last that knows of no GPU out of use
PROJECT: Final = Path(__file__).parents[2]


def released(commit: str = COMMIT) -> Mapping[str, str]:
    """The environment in which `python -m nri_gpu` is that version. Skip the test where git does not have it."""
    return {"PYTHONPATH": str(kept(cache_folder() / f"released-{commit[:8]}", partial(_unpack, commit, "nri_gpu")))}


def unpacked(commit: str) -> Path:
    """The whole tree of that version, not to be changed. Skip the test where git does not have it."""
    return kept(cache_folder() / f"released-tree-{commit[:8]}", partial(_unpack, commit, "."))


def _unpack(commit: str, what: str, folder: Path) -> None:
    command = ["git", "-C", str(PROJECT), "archive", commit, what]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"git does not have {commit[:8]}, a version before this one: `git fetch --unshallow` brings it")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-xC", str(folder)], input=done.stdout, check=True)
