"""The site, built and checked by the first worker whose test wants it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cache import kept
from tools.files import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    own = tmp_path_factory.getbasetemp()
    return kept((own if worker_id == "master" else own.parent) / "site", _build)


def _build(folder: Path) -> None:
    command = [sys.executable, "-m", "tools.site", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
