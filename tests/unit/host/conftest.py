"""A host of its own for each test, where this process may make device nodes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.unit.host.host_tree import NVIDIA, HostTree


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    probe = tmp_path / "probe"
    try:
        os.mknod(probe, stat.S_IFCHR | 0o600, os.makedev(NVIDIA, 0))
    except PermissionError:
        pytest.skip("this process may not make device nodes: it needs root")
    probe.unlink()
    return HostTree(tmp_path / "host")
