"""Containerds side by side, each with at most one plugin, all alive at once: so that contenders can take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec import Struct

from bench.cpu import Meter
from bench.process import EIGHT_GPUS, OUR_EVENTS
from nri_gpu.domain.node import Loader
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import Pod
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

PROJECT: Final = Path(__file__).parents[1]
READY_S: Final = 20.0


class Cost(Struct, frozen=True):
    """Create and start of one container. cpu_s: of the runtime, of all it starts, and of the plugin."""

    wall_s: float
    cpu_s: float


class Site(Struct, frozen=True):
    """One containerd, measured."""

    node: Containerd
    meter: Meter

    @property
    def state(self) -> Path:
        """The state folder of nri-gpu, where it is."""
        return self.node.base / "nri-gpu" / "state"

    def pod(self, annotations: dict[str, str] | None = None) -> Pod:
        return self.node.cri.run_pod(PodSpec(annotations=annotations or {}))

    def one_life(self, pod: Pod, spec: ContainerSpec) -> Cost:
        """What a container costs until it runs; it is gone again when this returns."""
        cri = self.node.cri
        cpu_s, began = self.meter.read_s(), time.perf_counter()
        container = cri.create(pod, spec)
        cri.start(container)
        wall_s = time.perf_counter() - began
        cost = Cost(wall_s, self.meter.read_s() - cpu_s)
        cri.stop(container)
        cri.remove(container)
        return cost

    def additions(self, pod: Pod, spec: ContainerSpec) -> tuple[int, int]:
        """Device nodes and mounts in such a container's specification."""
        container = self.node.cri.run(pod, spec)
        oci = self.node.cri.status(container).oci
        self.node.cri.stop(container)
        self.node.cri.remove(container)
        return len(oci["linux"].get("devices") or ()), len(oci["mounts"])


class Sites:
    """Makes them, and takes all of it away at the end of `with`, running containers included."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._runtime = packages.fetch(packages.Version.V2_1)
        self._folder = folder
        self._driver = make_driver_root(folder / "driver")

    @property
    def release(self) -> str:
        return self._runtime.release

    def bare(self) -> Site:
        """NRI off; what it is asked for by a CDI name, it finds in our specification."""
        return self._site(nri=False, cdi=True)

    def nothing(self) -> Site:
        """With a plugin that does nothing but answer."""
        site = self._site()
        arguments = ["bench.nothing", str(site.node.nri_socket), str(OUR_EVENTS)]
        # Whoever started it may be killed before cleaning up; then it goes too.
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", *arguments]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT)}
        plugin = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        self._stack.callback(plugin.wait)
        self._stack.callback(plugin.terminate)
        site.meter.add(plugin.pid)
        wait_for("the plugin", lambda: "connected and synchronized" in site.node.log_path.read_text(), READY_S)
        return site

    def ours(self, loader: Loader = Loader.FOLDERS, *, dra: bool = False) -> Site:
        """With nri-gpu, as it is when it is installed, and 8 GPUs; or with another strategy, or serving claims."""
        site = self._site()
        policy = site.node.base / "policy.toml"
        policy.write_text(f'[driver]\nloader = "{loader}"\n[dra]\nenabled = {str(dra).lower()}\n')
        launch = Launch(
            site.state.parent,
            site.node.nri_socket,
            EIGHT_GPUS,
            driver_root=self._driver,
            policy=policy,
            log_level="INFO",
        )
        daemon = self._stack.enter_context(NriGpu(launch))
        site.meter.add(daemon.pid)
        daemon.wait_ready()
        daemon.wait_logged("driver files staged")
        return site

    def _site(self, *, nri: bool = True, cdi: bool = False) -> Site:
        node = Containerd(self._runtime, nri=nri)
        self._stack.callback(node.abandon)
        if cdi:
            self._specify(node.layout.cdi / "nri-gpu.json")
        node.boot()
        return Site(node, Meter(node))

    def _specify(self, file: Path) -> None:
        places = ["--gpus", EIGHT_GPUS, "--driver-root", self._driver, "--stage-dir", self._folder / "cdi"]
        command = [sys.executable, "-m", "nri_gpu", "cdi", "generate", *map(str, places), "--output", str(file)]
        subprocess.run(command, check=True, cwd=PROJECT)
