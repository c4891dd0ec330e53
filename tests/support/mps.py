"""Stand-ins for NVIDIA's MPS programs, with the same command line, environment, pipes and control commands.

The control daemon listens in its pipe directory, writes NVIDIA's pid file there and what it was started with into its
log directory. A client is `mps_client.c`, in an image of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.mps.mps_folders import DaemonFolder, clients, noted_folders
from tests.support import packages
from tests.support.glibc import glibc_files
from tests.support.image import ImageSpec

CONTROL: Final = Path(__file__).with_name("mps_control.py")
SMI: Final = """#!/bin/sh
# -i UUID -c MODE: says what it was asked, and remembers it.
echo "$2 $4" >> {log}
"""


def install(root: Path, log: Path) -> Path:
    """Put them into a flat driver root in place of its own. log: what compute modes were set. Returns the root."""
    control = root / "bin/nvidia-cuda-mps-control"
    control.write_text(f"#!{Path(sys.executable).resolve()} -IS\n" + CONTROL.read_text())
    smi = root / "bin/nvidia-smi"
    smi.write_text(SMI.format(log=log))
    for program in (control, smi):
        program.chmod(0o755)
    return root


IMAGE: Final = "localhost/nri-gpu/mps-client:1"
SIZE_MIB: Final = 16


@contextmanager
def shared(folder: Path) -> Iterator[Path]:
    """As /run on a node, where systemd makes all mounts shared: what is mounted below later, a runtime sees."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "--make-shared", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def client_files(state: Path, size_mib: int = SIZE_MIB) -> Iterator[Path]:
    """What the systemd unit mounts on a node, smaller. For a runtime that sees it: below what is `shared`."""
    base = clients(state)
    base.mkdir(parents=True, exist_ok=True)
    options = f"size={size_mib}m,nr_inodes=4k,mode=0700,nosuid,nodev,noexec"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", base], check=True)
    try:
        yield base
    finally:
        subprocess.run(["umount", "--lazy", base], check=True)


def client_image(folder: Path) -> ImageSpec:
    """An image with `/bin/mps_client COMMAND`."""
    program = folder / "mps_client"
    subprocess.run([*packages.gcc(), "-o", program, Path(__file__).with_name("mps_client.c")], check=True)
    return ImageSpec(IMAGE, extra=glibc_files({"/bin/mps_client": program}))


def noted(state: Path, uuid: str) -> DaemonFolder | None:
    """Where a GPU's daemon was noted, living or not."""
    return next((place for place in noted_folders(state) if place.uuid == GpuUuid(uuid)), None)


def noted_pid(state: Path, uuid: str) -> int:
    """The process of a GPU's daemon as it was noted; 0 where none lives."""
    place = noted(state, uuid)
    process = place.noted() if place else None
    return process.pid if process else 0


def end_all(state: Path) -> None:
    """Kill what a test left running."""
    for place in noted_folders(state):
        if process := place.noted():
            os.kill(process.pid, signal.SIGKILL)
