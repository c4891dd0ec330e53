"""A plugin as a process, and what the kernel says it costs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.link import Link, listen
from nri_gpu.cli.ask_daemon import ask
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.nri.subscription import event_mask
from nri_gpu.plugin.handlers import EVENTS
from tests.support.daemon import TOPOLOGIES
from tests.support.driver_root import make_driver_root
from tests.support.nvml import build_fake_nvml, gpus_of

AS_INSTALLED: Final = """
import importlib, site, sys
sys.path.append(sys.argv.pop(1))
name = sys.argv.pop(1)
sys.argv[0] = name
sys.exit(importlib.import_module(name).main())
"""
EIGHT_GPUS: Final = TOPOLOGIES / "hgx-h100.toml"
# What asks NVML, and what waits for its events.
CHILDREN: Final = ("nri_gpu.inventory.nvml_program", "nri_gpu.health.nvml_events")
SETTLED_S: Final = 30.0
OUR_EVENTS: Final = event_mask(EVENTS, "")


def installed(module: str, *arguments: str) -> list[str]:
    """The command of a module's `main` as users have it: without the finder of a checkout's editable installation."""
    return [sys.executable, "-S", "-c", AS_INSTALLED, sysconfig.get_path("purelib"), module, *arguments]


def memory_mib(pid: int) -> tuple[float, float]:
    """RSS and PSS of a process."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in rollup[1:]}
    return sizes["Rss"], sizes["Pss"]


def cpu_s(pid: int) -> float:
    """Seconds of CPU that its threads have used so far, to the nanosecond where the scheduler keeps them so."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Running:
    """A plugin started on a socket of its own. began: of exec. registered_s: from there to the answer to Configure."""

    def __init__(self, folder: Path, arguments: Sequence[str], name: str) -> None:
        self._listening = listen(folder / f"{name}.sock")
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[1])}
        self.began = time.perf_counter()
        with (folder / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(installed(*arguments), env=environment, stderr=log)
        self.link = Link(self._listening)
        self.link.configure()
        self.registered_s = time.perf_counter() - self.began

    def reconnect(self) -> None:
        """As after a restart of the runtime: the plugin connects, registers and is configured again."""
        self.link.close()
        self.link = Link(self._listening)
        self.link.configure()

    @property
    def pid(self) -> int:
        return self._process.pid

    def memory_mib(self, child: str = "") -> tuple[float, float]:
        """RSS and PSS, its own or those of the child that runs this module. Raises: LookupError: there is no such."""
        return memory_mib(self._child(child) if child else self.pid)

    def _child(self, module: str) -> int:
        """Raises: LookupError."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        for pid in (pid for task in tasks for pid in (task / "children").read_text().split()):
            if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                return int(pid)
        raise LookupError(f"no child runs {module}")

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def stop(self) -> None:
        self.link.close()
        self._process.terminate()
        self._process.wait()
        self._listening.close()


def daemon(folder: Path, name: str = "nri-gpu", *, policy: Path | None = None, state: Path | None = None) -> Running:
    """`nri-gpu run` on the 8-GPU topology, with a driver's files to stage."""
    options = daemon_options(folder, name, policy=policy, state=state)
    return Running(folder, ["nri_gpu.cli.main", "run", *options], name)


def daemon_options(folder: Path, name: str, *, policy: Path | None = None, state: Path | None = None) -> list[str]:
    """The options of `daemon`, whose files they name."""
    root = folder / "driver"
    if not root.exists():
        make_driver_root(root)
    options = {
        "--socket": folder / f"{name}.sock",
        "--gpus": EIGHT_GPUS,
        "--driver-root": root,
        "--state-dir": state or folder / "state",
        "--stage-dir": folder / (f"staged-{state.name}" if state else "staged"),  # it belongs to one state folder
        "--log-level": "INFO",
        **({"--policy": policy} if policy else {}),
    }
    return [str(word) for pair in options.items() for word in pair]


def nvml_daemon(folder: Path) -> Running:
    """`nri-gpu run` on the same node told by a made-up NVML, of which it hears events too: with both its children.

    Returns once all of it is known, and files are staged. Raises: LookupError: a child did not start.
    """
    root = make_driver_root(folder / "nvml")
    gpus, ancestors = gpus_of(load_topology(EIGHT_GPUS))
    build_fake_nvml(root, gpus, ancestors=ancestors, lib_dir="lib64")
    policy = folder / "events.toml"
    policy.write_text('[health]\nevents = "all"\n')
    options = {
        "--socket": folder / "nvml.sock",
        "--driver-root": root,
        "--state-dir": folder / "nvml-state",
        "--stage-dir": folder / "nvml-staged",
        "--policy": policy,
        "--log-level": "INFO",
    }
    plugin = Running(
        folder, ["nri_gpu.cli.main", "run", *(str(word) for pair in options.items() for word in pair)], "nvml"
    )
    plugin.link.call("Synchronize", b"")
    until = time.monotonic() + SETTLED_S
    while not _settled(plugin, folder / "nvml-state" / CONTROL_SOCKET):
        if time.monotonic() > until:
            plugin.stop()
            raise LookupError(f"no NVML processes within {SETTLED_S:g} s: see {folder / 'nvml.log'}")
        time.sleep(0.05)
    return plugin


def _settled(plugin: Running, control: Path) -> bool:
    try:
        said = ask(control, "status", DaemonStatus)
        for child in CHILDREN:
            plugin.memory_mib(child)
    except (OSError, ValueError, LookupError):
        return False
    return len(said.gpus) == len(load_topology(EIGHT_GPUS).gpus) and said.node.driver_generation != "-"


def nothing(folder: Path, name: str = "nothing") -> Running:
    """The plugin that does nothing, told of the same events."""
    return Running(folder, ["bench.nothing", str(folder / f"{name}.sock"), str(OUR_EVENTS)], name)
