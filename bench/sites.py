"""Containerds side by side, each with at most one plugin, all alive at once: so that contenders can take turns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from msgspec import Struct
from msgspec.structs import replace

from bench.cpu import Meter
from bench.process import EIGHT_GPUS
from nri_gpu.domain.node import Loader
from nri_gpu.nri.subscription import Subscription
from nri_gpu.plugin.handlers import EVENTS
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, Pod
from tests.support.daemon import Launch, NriGpu
from tests.support.errors import HarnessError
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

PROJECT: Final = Path(__file__).parents[1]
READY_S: Final = 20.0
PLAIN: Final = ContainerSpec()
MEMORY: Final = Path("/dev/shm")


class Cost(Struct, frozen=True):
    """Create and start of one container. cpu_s: of the runtime, of all it starts, and of the plugin."""

    wall_s: float
    cpu_s: float


class Added(Struct, frozen=True):
    """What a container's specification has beyond a bare one's, as OCI has it."""

    nodes: Sequence[Mapping[str, Any]]
    mounts: Sequence[Mapping[str, Any]]
    hooks: Sequence[Mapping[str, Any]]

    @classmethod
    def between(cls, oci: Mapping[str, Any], bare: Mapping[str, Any]) -> Self:
        there = {mount["destination"] for mount in bare["mounts"]}
        return cls(
            oci["linux"].get("devices") or (),
            [mount for mount in oci["mounts"] if mount["destination"] not in there],
            [hook for stage in (oci.get("hooks") or {}).values() for hook in stage],
        )


class Site(Struct, frozen=True):
    """One containerd, measured."""

    node: Containerd
    meter: Meter

    @property
    def state(self) -> Path:
        """The state folder of nri-gpu, in memory as /run is where it is installed."""
        return MEMORY / self.node.base.name / "state"

    def pod(self, annotations: Mapping[str, str] | None = None) -> Pod:
        return self.node.cri.run_pod(PodSpec(annotations=annotations or {}))


class Contender(Struct, frozen=True):
    """A container that can be had again and again. present: paths that it must have, or it is not what it is said."""

    site: Site
    pod: Pod
    spec: ContainerSpec = PLAIN
    present: tuple[str, ...] = ()

    def life(self) -> Cost:
        """What a container costs until it runs; it is gone again when this returns."""
        cri, meter = self.site.node.cri, self.site.meter
        cpu_s, began = meter.read_s(), time.perf_counter()
        container = cri.run(self.pod, self.spec)
        wall_s = time.perf_counter() - began
        cost = Cost(wall_s, meter.read_s() - cpu_s)
        self._remove(container)
        return cost

    def per_second(self, jobs: int, each: int) -> float:
        """Containers of the pod that are created and started in a second by so many at once. each: of every job."""
        cri = self.site.node.cri

        def start(job: int) -> list[ContainerId]:
            return [cri.run(self.pod, replace(self.spec, attempt=1 + job * each + number)) for number in range(each)]

        with ThreadPoolExecutor(jobs) as pool:
            began = time.perf_counter()
            containers = [one for started in pool.map(start, range(jobs)) for one in started]
            took_s = time.perf_counter() - began
            list(pool.map(self._remove, containers))
        return len(containers) / took_s

    def oci(self) -> Mapping[str, Any]:
        """The specification that runc gets, after whatever stands between containerd and it.

        Raises: HarnessError: the container has not what it must have.
        """
        node = self.site.node
        container = node.cri.run(self.pod, self.spec)
        bundle = node.base / "state/io.containerd.runtime.v2.task/k8s.io" / container
        oci: Mapping[str, Any] = json.loads((bundle / "config.json").read_text())
        if self.present and (seen := node.cri.execute(container, "/bin/ls", "-d", *self.present)).code:
            raise HarnessError(f"a container of the bench lacks something: {seen.stderr}")
        self._remove(container)
        return oci

    def _remove(self, container: ContainerId) -> None:
        self.site.node.cri.stop(container)
        self.site.node.cri.remove(container)


class Sites:
    """Makes them, and takes all of it away at the end of `with`, running containers included.

    driver: a driver's root; what we stage of it, and what others mount.
    """

    def __init__(self, stack: ExitStack, folder: Path, driver: Path) -> None:
        self._stack = stack
        self._runtime = packages.fetch(packages.available()[-1])
        self.folder = folder
        self.driver = driver

    @property
    def release(self) -> str:
        return self._runtime.release

    def bare(self, specification: Path | None = None) -> Site:
        """NRI off; what it is asked for by a CDI name, it finds in this file."""
        return self._site(nri=False, specification=specification)

    def wrapped(self, program: Path, environment: Mapping[str, str]) -> Site:
        """NRI off, and another program where runc would be."""
        return self._site(nri=False, runc=program, environment=environment)

    @property
    def events(self) -> int:
        """The mask that nri-gpu subscribes by to this containerd."""
        return Subscription().mask(EVENTS, "containerd", self.release, "")

    def constant(self, created: bytes = b"") -> Site:
        """With a plugin that gives this reply to every CreateContainer, and nothing to our other events.

        created: empty, and it does nothing.
        """
        site = self._site()
        reply = site.node.base / "reply"
        reply.write_bytes(created)
        arguments = [str(site.node.nri_socket), str(self.events), str(reply)]
        return self._serve(site, [sys.executable, "-m", "bench.nothing", *arguments])

    def plugin(self, program: Path) -> Site:
        """With a plugin that is made with NRI's own library."""
        site = self._site()
        return self._serve(site, [str(program), "-idx", "01", "-socket", str(site.node.nri_socket)])

    def ours(self, loader: Loader = Loader.FOLDERS, *, dra: bool = False) -> Site:
        """With nri-gpu, as it is when it is installed, and 8 GPUs; or with another strategy, or serving claims."""
        site = self._site()
        policy = site.node.base / "policy.toml"
        policy.write_text(f'[driver]\nloader = "{loader}"\n[dra]\nenabled = {str(dra).lower()}\n')
        self._stack.callback(shutil.rmtree, site.state.parent, ignore_errors=True)
        launch = Launch(
            site.state.parent,
            site.node.nri_socket,
            EIGHT_GPUS,
            driver_root=self.driver,
            policy=policy,
            stage_dir=site.node.base / "drivers",
            log_level="INFO",
        )
        daemon = self._stack.enter_context(NriGpu(launch))
        site.meter.add(daemon.pid)
        daemon.wait_ready()
        daemon.wait_logged("driver files staged")
        return site

    def our_specification(self) -> Path:
        """Ours of CDI, with files staged beside it."""
        file = self.folder / "nri-gpu.json"
        places = ["--gpus", EIGHT_GPUS, "--driver-root", self.driver, "--stage-dir", self.folder / "cdi"]
        command = [sys.executable, "-m", "nri_gpu", "cdi", "generate", *map(str, places), "--output", str(file)]
        subprocess.run(command, check=True, cwd=PROJECT)
        return file

    def _serve(self, site: Site, command: Sequence[str]) -> Site:
        # Whoever started it may be killed before cleaning up; then it goes too.
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT)}
        with (site.node.base / "plugin.log").open("wb") as log:
            guarded = ["setpriv", "--pdeathsig", "KILL", *command]
            plugin = subprocess.Popen(guarded, env=environment, stdout=log, stderr=log)
        self._stack.callback(plugin.wait)
        self._stack.callback(plugin.terminate)
        site.meter.add(plugin.pid)
        wait_for("the plugin", lambda: "connected and synchronized" in site.node.log_path.read_text(), READY_S)
        return site

    def _site(
        self,
        *,
        nri: bool = True,
        specification: Path | None = None,
        runc: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Site:
        node = Containerd(self._runtime, nri=nri, runc=runc, environment=environment)
        self._stack.callback(node.abandon)
        if specification:
            (node.layout.cdi / specification.name).write_bytes(specification.read_bytes())
        node.boot()
        return Site(node, Meter(node))
