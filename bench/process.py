"""A plugin as a process, and what the kernel says it costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.link import Link, listen
from nri_gpu.nri.subscribe import event_mask
from nri_gpu.runtime.plugin import EVENTS
from tests.support.daemon import TOPOLOGIES
from tests.support.driver_root import make_driver_root

EIGHT_GPUS: Final = TOPOLOGIES / "hgx-h100.toml"
OUR_EVENTS: Final = event_mask(EVENTS, "")


class Running:
    """A plugin started on a socket of its own. began: of exec. registered_s: from there to the answer to Configure."""

    def __init__(self, folder: Path, arguments: Sequence[str], name: str) -> None:
        self._listening = listen(folder / f"{name}.sock")
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[1])}
        self.began = time.perf_counter()
        with (folder / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen([sys.executable, "-m", *arguments], env=environment, stderr=log)
        self.link = Link(self._listening)
        self.link.configure()
        self.registered_s = time.perf_counter() - self.began

    def memory_mib(self) -> tuple[float, float]:
        """RSS and PSS."""
        rollup = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in rollup[1:]}
        return sizes["Rss"], sizes["Pss"]

    def cpu_s(self) -> float:
        """Seconds of CPU so far, to the nanosecond where the scheduler keeps them so."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def stop(self) -> None:
        self.link.close()
        self._process.terminate()
        self._process.wait()
        self._listening.close()


def daemon(folder: Path, name: str = "nri-gpu", *, policy: Path | None = None, state: Path | None = None) -> Running:
    """`nri-gpu run` on the 8-GPU topology, with a driver's files to stage."""
    root = folder / "driver"
    if not root.exists():
        make_driver_root(root)
    options = {
        "--socket": folder / f"{name}.sock",
        "--gpus": EIGHT_GPUS,
        "--driver-root": root,
        "--state-dir": state or folder / "state",
        "--stage-dir": folder / "staged",
        "--log-level": "INFO",
        **({"--policy": policy} if policy else {}),
    }
    return Running(folder, ["nri_gpu", "run", *(str(word) for pair in options.items() for word in pair)], name)


def nothing(folder: Path, name: str = "nothing") -> Running:
    """The plugin that does nothing, told of the same events."""
    return Running(folder, ["bench.nothing", str(folder / f"{name}.sock"), str(OUR_EVENTS)], name)
