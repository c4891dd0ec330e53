"""Our CDI specification in a folder that a runtime reads, for as long as a test takes."""

import subprocess
import sys
from collections.abc import Iterator
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
