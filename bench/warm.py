"""A start from the last snapshot: the node through a made-up NVML, kernel modules that are loaded, a runtime's socket.

From exec to a container that has its eight GPUs, while NVML is still being asked.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.effort import Effort
from bench.figures import Figure
from bench.link import Link, listen
from bench.process import EIGHT_GPUS, installed
from bench.requests import life
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.verify.node_snapshot import SNAPSHOT_FILE
from tests.support.daemon import Launch
from tests.support.driver_root import make_driver_root
from tests.support.kernel import NriGpuOnNvidia
from tests.support.nvml import build_fake_nvml
from tests.support.nvml.build import DRIVER, gpus_of
from tests.support.waiting import wait_for

PATIENCE_S: Final = 30.0
STAMPED: Final = 'date +%s%N >"$0"; exec "$@"'  # the moment of exec, behind the making of a namespace
SERVED: Final = (100.0, 80.0)  # ms: a warm start serves in under 100


class Stamped(NriGpuOnNvidia):
    """Says when it was executed."""

    def words(self) -> list[str]:
        return ["/bin/sh", "-c", STAMPED, str(self.stamp), *installed("nri_gpu.cli.main")]

    @property
    def stamp(self) -> Path:
        return self.launch.base / "executed"


def figures(folder: Path, effort: Effort) -> Iterator[Figure]:
    """Medians of some starts; the first is a cold one, and leaves the snapshot."""
    if os.geteuid():
        yield Figure("warm starts: left out, a made-up driver needs root", 0.0, "")
        return
    root = make_driver_root(folder / "warm-root", DRIVER)
    gpus, ancestors = gpus_of(load_topology(EIGHT_GPUS))
    build_fake_nvml(root, gpus, ancestors=ancestors, driver=DRIVER)
    launch = Launch(folder / "warm", folder / "warm.sock", topology=None, driver_root=root)
    daemon = Stamped(launch, DRIVER)
    _start(daemon, launch.socket, until=launch.state / SNAPSHOT_FILE)
    found = [_start(daemon, launch.socket) for _ in range(effort.starts)]
    registered, granted = (statistics.median(times) for times in zip(*found, strict=True))
    yield Figure("exec to registered, with a snapshot", registered, "ms", 200, 110)
    yield Figure("exec to the first 8-GPU grant, with a snapshot", granted, "ms", *SERVED)


def _start(daemon: Stamped, socket: Path, until: Path | None = None) -> tuple[float, float]:
    """Milliseconds from exec to registered, and to granted. until: a file to wait for before it is stopped."""
    socket.unlink(missing_ok=True)
    listening = listen(socket)
    daemon.start()
    link = Link(listening)
    link.configure()
    registered = time.time_ns()
    link.call("Synchronize", b"")
    while not link.call("CreateContainer", life(0, "all").create)[0].status.ok:
        time.sleep(0.002)
    granted = time.time_ns()
    if until:
        wait_for("the snapshot", until.exists, PATIENCE_S, daemon.log)
    link.close()
    listening.close()
    daemon.__exit__()
    executed = int(daemon.stamp.read_text())
    return (registered - executed) / 1e6, (granted - executed) / 1e6
