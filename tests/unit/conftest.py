"""Coroutines as tests, each with a deadline; the log as values; folders with short names for sockets."""

from __future__ import annotations

import asyncio
import inspect
import os
import platform
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import tests.support.laws  # noqa: F401 - its profile
from nri_gpu.injection import driver_mounts
from tests.support.cgroup import Freezer
from tests.support.log import Log
from tests.support.waiting import wait_for

TEST_DEADLINE_S: Final = 30.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def test_…` in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def bounded() -> None:
        async with asyncio.timeout(TEST_DEADLINE_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


@pytest.fixture
def log() -> Iterator[Log]:
    with Log() as captured:
        yield captured


@pytest.fixture(autouse=True)
def on_node1(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node of that name, as the chart tells it: goldens have no name of this machine."""
    monkeypatch.setenv("NODE_NAME", "node1")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder short enough for the path of a socket in it."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-test-") as made:
        yield Path(made)


@pytest.fixture
def on_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on x86-64, where goldens and recordings are from: its loader has more folders than others, and other names."""
    folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(driver_mounts, "DEFAULT_PLACES", folders)
    monkeypatch.setattr(driver_mounts, "HWCAPS_PLACES", tuple(f"{each}/glibc-hwcaps/x86-64-v2" for each in folders))


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    """A cgroup whose processes live until they thaw; what is left in it ends with the test."""
    if os.geteuid() or not Path("/sys/fs/cgroup/freezer/cgroup.procs").exists():
        pytest.skip("needs root, and the freezer of cgroup v1")
    frozen = Freezer()
    yield frozen
    frozen.thaw()
    for pid in frozen.pids:
        os.kill(pid, signal.SIGKILL)
    wait_for("the frozen processes to end", lambda: not frozen.pids, 10)
    frozen.folder.rmdir()
