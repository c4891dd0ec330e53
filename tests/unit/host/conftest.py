"""A host of its own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.host.host_tree import HostTree, host_below


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    return host_below(tmp_path)
