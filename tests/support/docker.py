"""A real Docker engine on private paths, its own containerd below it; it takes nothing along and leaves nothing behind.

    with Docker() as docker:
        docker.load()
        container = docker.run("--device", "nvidia.com/gpu=0")

No network, no firewall rule, no socket but its own. Its mounts are in a namespace of their own, and the supervisor of
`tests.support.supervisor` ends it with all its containers, also when the tests are killed.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from msgspec import Struct

from tests.support import cleanup, image, packages
from tests.support.cgroup import Cgroup, host_cgroup
from tests.support.config import Layout
from tests.support.containerd import SYSTEM_PATH
from tests.support.cri import ContainerId, Executed
from tests.support.errors import HarnessError
from tests.support.supervisor import Daemon, Supervisor
from tests.support.waiting import wait_for

SUITE: Final = "sid"  # the Debian suite with an engine of 28 or newer, whose CDI needs no experimental switch
ENGINE: Final = "docker.io"
CLIENT: Final = "docker-cli"
BOOT_TIMEOUT_S: Final = 60.0
COMMAND_TIMEOUT_S: Final = 120.0
LOG_TAIL_LINES: Final = 25

# The supervisor starts programs with `--config FILE`, in the mount namespace where all this happens. The engine and its
# containerd make folders below /run and /opt whatever their settings say. And a cgroup of our name is where the
# sweeper of abandoned instances looks for processes; what the engine starts is born there too.
WRAPPER: Final = """\
#!/bin/sh
set -e
mount -t tmpfs none /run
mkdir -p /run/opt/upper /run/opt/work
mount -t overlay -o lowerdir=/opt,upperdir=/run/opt/upper,workdir=/run/opt/work none /opt
top=/sys/fs/cgroup
[ -e "$top/cgroup.controllers" ] || top=$top/pids
mkdir -p "$top/{name}/engine"
echo $$ > "$top/{name}/engine/cgroup.procs"
HOME={base} exec {dockerd} --config-file "$2"
"""


class DockerError(Exception):
    """The client failed. Says what it said."""


class Programs(Struct, frozen=True):
    """Where the engine's parts are."""

    dockerd: Path
    client: Path
    folders: tuple[Path, ...]  # of containerd with its shim, and of runc

    @classmethod
    def fetch(cls) -> Self:
        """From the cache or from Debian. Raises: HarnessError."""
        tree = packages._cached
        return cls(
            dockerd=tree(ENGINE, SUITE) / "usr/sbin/dockerd",
            client=tree(CLIENT, SUITE) / "usr/bin/docker",
            folders=(packages.fetch(packages.Version.V2_1).folder, packages.runc().parent),
        )


class Docker:
    """One engine. cdi: the folder of its CDI specifications; bin: first on its search path."""

    def __init__(self) -> None:
        if os.geteuid():
            raise HarnessError("a private Docker engine needs root: mounts, cgroups, devices; run this with sudo")
        self._programs = Programs.fetch()
        cleanup.sweep()
        self.layout = Layout(Path(tempfile.mkdtemp(prefix=cleanup.PREFIX, dir=cleanup.PARENT)))
        self._daemon: Daemon | None = None
        try:
            for folder in (self.cdi, self.bin):
                folder.mkdir()
            self.layout.config.write_text(json.dumps(self._settings(), indent=1))
            self._supervisor = Supervisor(self.layout, Cgroup(host_cgroup()))
        except BaseException:
            shutil.rmtree(self.layout.base, ignore_errors=True)
            raise

    @property
    def base(self) -> Path:
        return self.layout.base

    @property
    def cdi(self) -> Path:
        return self.layout.cdi

    @property
    def bin(self) -> Path:
        return self.base / "bin"

    @property
    def supervisor_pid(self) -> int:
        return self._supervisor.pid

    def __enter__(self) -> Self:
        try:
            self._boot()
        except BaseException:
            self._supervisor.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._daemon:
            self._daemon.close()
        self._supervisor.close()

    def version(self) -> tuple[int, int]:
        """Major and minor number of the engine."""
        major, minor = self("version", "--format", "{{.Server.Version}}").split(".")[:2]
        return int(major), int(minor)

    def __call__(self, *arguments: str) -> str:
        """Run the client. Raises: DockerError with what it said."""
        done = self._client(*arguments)
        if done.returncode:
            raise DockerError(done.stderr.strip())
        return done.stdout.strip()

    def load(self, spec: image.ImageSpec | None = None) -> None:
        """Build an image and load it; it can be run when this returns."""
        with tempfile.NamedTemporaryFile(dir=self.base, suffix=".tar") as file:
            tar = image.build(Path(file.name), packages.busybox(), spec or image.ImageSpec())
            self("load", "--input", str(tar))

    def run(self, *options: str, image_name: str = image.NAME, command: Sequence[str] = ()) -> ContainerId:
        """`docker run -d` without a network. Raises: DockerError."""
        return ContainerId(self("run", "--detach", "--network", "none", *options, image_name, *command))

    def execute(self, container: ContainerId, *command: str, timeout_s: int = 20) -> Executed:
        """Run a command in a container to its end, as `Cri.execute` does."""
        done = self._client("exec", container, *command, timeout_s=timeout_s)
        return Executed(done.returncode, done.stdout, done.stderr)

    def inspect(self, container: ContainerId) -> Any:  # noqa: ANN401 - Docker's own JSON
        return json.loads(self("inspect", container))[0]

    def oci(self, container: ContainerId) -> Any:  # noqa: ANN401 - the OCI runtime spec's own JSON
        """The OCI spec that runc was given."""
        bundles = self.base.glob(f"exec/containerd/daemon/io.containerd.runtime.v2.task/*/{container}/config.json")
        return json.loads(next(bundles).read_text())

    @property
    def cri(self) -> Self:
        """For probes, which only ever call `execute`."""
        return self

    @property
    def cgroup(self) -> Cgroup:
        return host_cgroup()

    def container_cgroup(self, container: ContainerId) -> Path:
        return cleanup.CGROUPS / ("devices" if self.cgroup is Cgroup.V1 else "") / self.base.name / container

    def remove_all(self) -> None:
        if containers := self("ps", "--all", "--quiet").split():
            self("rm", "--force", *containers)

    def log_tail(self) -> str:
        return "\n".join(self.layout.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _settings(self) -> dict[str, object]:
        base = self.layout.base
        return {
            "hosts": [f"unix://{base}/docker.sock"],
            "data-root": str(self.layout.root),
            "exec-root": f"{base}/exec",
            "pidfile": f"{base}/docker.pid",
            "cgroup-parent": f"/{base.name}",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "cdi-spec-dirs": [str(self.cdi)],
            # Nothing of the machine's network is touched.
            "bridge": "none",
            "iptables": False,
            "ip6tables": False,
            "ip-forward": False,
            "ip-masq": False,
            "userland-proxy": False,
        }

    def _boot(self) -> None:
        wrapper = self.base / "dockerd.sh"
        wrapper.write_text(WRAPPER.format(name=self.base.name, base=self.base, dockerd=self._programs.dockerd))
        wrapper.chmod(0o755)
        search_path = ":".join([str(self.bin), *map(str, self._programs.folders), SYSTEM_PATH])
        self._daemon = self._supervisor.start(wrapper, {"PATH": search_path})
        wait_for("dockerd", self._answers, BOOT_TIMEOUT_S, self.log_tail)

    def _answers(self) -> bool:
        if self._daemon and not self._daemon.alive():
            raise HarnessError(f"dockerd ended at start; its log says:\n{self.log_tail()}")
        return not self._client("version").returncode

    def _client(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        command = [str(self._programs.client), "--host", f"unix://{self.base}/docker.sock", *arguments]
        environment = {"PATH": SYSTEM_PATH, "HOME": str(self.base), "DOCKER_CONFIG": str(self.base / "client")}
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=environment, timeout=timeout_s
        )
