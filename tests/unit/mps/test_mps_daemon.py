"""Which daemons of before are taken over, and that none is followed by another in the same folder."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, GpuUuid
from nri_gpu.domain.node import DriverFiles, DriverTree
from nri_gpu.driver.trees import HOST_BINARIES
from nri_gpu.mps.mps_daemon import CONTROL, SERVER, SMI, MpsDaemon, MpsError, MpsTools
from nri_gpu.mps.mps_folders import DaemonFolder, clients
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.system.process import process_of
from nri_gpu.system.tasks import cancelled
from tests.support.cgroup import Freezer
from tests.support.little import few_descriptors
from tests.support.waiting import aside, wait_for

UUID = GpuUuid("GPU-0")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """What was noted as a daemon."""
    with subprocess.Popen(["sleep", "60"]) as running:
        yield running
        running.kill()


@pytest.fixture
def tools(tmp_path: Path) -> MpsTools:
    """Of a daemon that answers."""
    (tmp_path / CONTROL).write_text("#!/bin/sh\ncat\n")
    (tmp_path / CONTROL).chmod(0o755)
    return MpsTools(tmp_path, tmp_path)


def children() -> set[str]:
    """Our child processes, zombies included."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def adopted(folder: DaemonFolder, tools: MpsTools) -> tuple[bool, DaemonFolder]:
    async def adopt() -> tuple[bool, DaemonFolder]:
        daemon = MpsDaemon(folder, lambda: DaemonFolder(folder.state, UUID, "next"))
        return await daemon.adopt(tools, MpsSettings()), daemon.folder

    return asyncio.run(adopt())


@pytest.mark.parametrize("taken", [True, False])
def test_one_that_serves_is_taken_over_and_another_is_ended(
    child: subprocess.Popen[bytes], tools: MpsTools, tmp_path: Path, taken: bool
) -> None:
    clients(tmp_path).mkdir(parents=True)
    folder, process = DaemonFolder(tmp_path, UUID, "a"), process_of(child.pid)
    if not taken:
        (tmp_path / CONTROL).write_text("#!/bin/sh\nexit 1\n")
    assert process
    folder.make()
    folder.note(process)
    assert adopted(folder, tools) == (taken, folder if taken else DaemonFolder(tmp_path, UUID, "next"))
    assert (child.poll() is None) is taken


def test_the_folder_of_a_dead_one_is_not_used_again_and_that_of_none_is(tools: MpsTools, tmp_path: Path) -> None:
    clients(tmp_path).mkdir(parents=True)
    folder = DaemonFolder(tmp_path, UUID, "a")
    folder.make()
    assert adopted(folder, tools) == (False, folder)
    folder.file.write_text("1 1 a\n")
    assert adopted(folder, tools) == (False, DaemonFolder(tmp_path, UUID, "next"))


@pytest.mark.parametrize("free", [0, 1, 2])
async def test_one_that_cannot_be_looked_at_is_not_taken_for_gone(
    child: subprocess.Popen[bytes], tools: MpsTools, tmp_path: Path, free: int
) -> None:
    """free: descriptors: with none its note cannot be read, with one it cannot be watched, with two not be asked."""
    clients(tmp_path).mkdir(parents=True)
    folder, process = DaemonFolder(tmp_path, UUID, "a"), process_of(child.pid)
    assert process
    folder.make()
    folder.note(process)
    daemon = MpsDaemon(folder, lambda: DaemonFolder(tmp_path, UUID, "next"))
    with few_descriptors(free), pytest.raises(MpsError, match="Too many open files"):
        await daemon.adopt(tools, MpsSettings())
    assert daemon.folder == folder
    assert await daemon.adopt(tools, MpsSettings())


async def test_a_controller_ends_at_once_beside_a_program_that_cannot_be_killed(
    tools: MpsTools, tmp_path: Path, freezer: Freezer
) -> None:
    (tmp_path / SMI).write_text(f"#!/bin/sh\n{freezer.joining}exec sleep 60\n")
    (tmp_path / SMI).chmod(0o755)
    daemon = MpsDaemon(DaemonFolder(tmp_path, UUID, "a"), lambda: DaemonFolder(tmp_path, UUID, "next"))
    clients(tmp_path).mkdir(parents=True)
    daemon.folder.make()
    starting = asyncio.create_task(daemon.start(tools, MpsSettings()))
    await aside(wait_for, "the program", lambda: freezer.pids, 10)
    freezer.freeze()
    before = time.monotonic()
    await cancelled([starting])
    assert time.monotonic() - before < 1.0
    with pytest.raises(MpsError, match=f"{SMI} {freezer.pids[0]} still hangs in the kernel and cannot be killed"):
        await daemon.start(tools, MpsSettings())


@pytest.mark.parametrize("written", [0, 1])
async def test_a_daemon_that_cannot_be_noted_is_not_left_behind(tools: MpsTools, tmp_path: Path, written: int) -> None:
    """written: how many notes the state folder has room for."""
    clients(tmp_path).mkdir(parents=True)
    (tmp_path / SMI).write_text("#!/bin/sh\n")
    (tmp_path / SMI).chmod(0o755)
    folder = DaemonFolder(tmp_path, UUID, "a")
    folder.make()
    daemon = MpsDaemon(folder, lambda: DaemonFolder(tmp_path, UUID, "next"))
    draft = folder.file.with_name(".daemon.new")
    if written:
        (tmp_path / SMI).write_text(f"#!/bin/sh\nmkdir {draft}\n")
    else:
        draft.mkdir()
    before = children()
    with pytest.raises(MpsError):
        await daemon.start(tools, MpsSettings())
    assert children() <= before
    assert daemon.folder.generation == ("next" if written else "a")


DIES = """
import asyncio, os, sys
from pathlib import Path
from nri_gpu.mps.mps_daemon import MpsDaemon, MpsTools
from nri_gpu.mps.mps_folders import DaemonFolder
from nri_gpu.policy.mps_settings import MpsSettings

class Dies(DaemonFolder):
    def note(self, process):
        if process.pid:
            print(process.pid, flush=True)
            os._exit(9)

tools, state = map(Path, sys.argv[1:])
daemon = MpsDaemon(Dies(state, "GPU-0", "a"), lambda: None)
asyncio.run(daemon.start(MpsTools(tools, tools), MpsSettings()))
"""


def test_no_daemon_runs_that_was_not_noted(tools: MpsTools, tmp_path: Path) -> None:
    """As nri-gpu is killed between its start and its note."""
    (tmp_path / SMI).write_text("#!/bin/sh\n")
    (tmp_path / SMI).chmod(0o755)
    (tmp_path / CONTROL).write_text(f"#!/bin/sh\ntouch {tmp_path}/runs\nexec sleep 60\n")
    state = tmp_path / "state"
    clients(state).mkdir(parents=True)
    DaemonFolder(state, UUID, "a").make()
    died = subprocess.run([sys.executable, "-c", DIES, tmp_path, state], capture_output=True, text=True, check=False)
    assert died.returncode == 9, died.stderr
    wait_for("its end", lambda: process_of(int(died.stdout)) is None, 5)
    assert not (tmp_path / "runs").exists()


def test_nothing_is_made_where_nothing_bounds_it(tmp_path: Path) -> None:
    clients(tmp_path).mkdir(parents=True)
    daemon = MpsDaemon(DaemonFolder(tmp_path, UUID, "a"), lambda: DaemonFolder(tmp_path, UUID, "next"))
    with pytest.raises(MpsError, match="no file system of its own"):
        daemon.prepare()
    assert list(clients(tmp_path).iterdir()) == []


def test_a_driver_without_its_server_is_told_before_a_client_meets_it() -> None:
    tree = DriverTree("/staged", (CONTROL, SMI), (), (), ())
    with pytest.raises(MpsError, match=f"has no {SERVER}: install that part of it"):
        MpsTools.of(DriverFiles("580.95.05", "g", {DEFAULT_CAPABILITIES: tree}, {}))


def test_programs_that_containers_cannot_run_are_run_from_beside_the_trees() -> None:
    """As those of NixOS, whose loader is in /nix/store."""
    files = DriverFiles("580.95.05", "g", {DEFAULT_CAPABILITIES: DriverTree("/staged", (), (), (), ())}, {})
    assert MpsTools.of(replace(files, host_binaries=(CONTROL, SERVER, SMI))).bin == Path("/", HOST_BINARIES)
