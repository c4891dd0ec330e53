"""CDI specifications in a folder that a runtime reads, for as long as a test takes: ours, and another component's."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.daemon import ENVIRONMENT, FOUR_GPUS, options


@contextmanager
def specification(
    folder: Path, driver_root: Path, stage_dir: Path, *, topology: Path = FOUR_GPUS, policy: Path | None = None
) -> Iterator[Path]:
    """The file that `nri-gpu cdi generate` makes, for files of the driver that it stages itself."""
    file = folder / "nri-gpu.json"
    given = {"--gpus": topology, "--driver-root": driver_root, "--stage-dir": stage_dir, "--output": file}
    command = [sys.executable, "-m", "nri_gpu", "cdi", "generate", *options({**given, "--policy": policy})]
    subprocess.run(command, env=ENVIRONMENT, check=True, timeout=60)
    try:
        yield file
    finally:
        file.unlink()


@contextmanager
def opening(file: Path, folder: Path, kind: str, devices: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Another component's specification: devices by name, each with the minors of the nodes that it opens.

    folder: for nodes of NVIDIA's major, which stand for those in the host's /dev.
    """
    for minor in {minor for minors in devices.values() for minor in minors}:
        os.mknod(folder / _name(minor), stat.S_IFCHR | 0o666, os.makedev(195, minor))
        (folder / _name(minor)).chmod(0o666)
    edits = {
        name: [
            {
                "path": f"/dev/{_name(each)}",
                "hostPath": f"{folder / _name(each)}",
                "type": "c",
                "major": 195,
                "minor": each,
            }
            for each in minors
        ]
        for name, minors in devices.items()
    }
    listed = [{"name": name, "containerEdits": {"deviceNodes": nodes}} for name, nodes in edits.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"cdiVersion": "0.6.0", "kind": kind, "devices": listed}))
    try:
        yield
    finally:
        file.unlink()


def _name(minor: int) -> str:
    return "nvidiactl" if minor == 255 else f"nvidia{minor}"
