"""The site, built and checked by the first worker whose test wants it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cache import once
from tools.files import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    return once(tmp_path_factory, worker_id, "site", _build)


def _build(folder: Path) -> None:
    command = [sys.executable, "-m", "tools.site", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
