"""Debian's Podman on private paths, as root; it takes nothing along and leaves nothing behind.

    with Podman() as podman:
        podman.load()
        container = podman.run("--device", "nvidia.com/gpu=0")

No network, no lock in /dev/shm. All commands run in one mount namespace, which a shell holds: that removes all
containers once its stdin ends, also when the tests are killed.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.support import image, packages
from tests.support.cleanup import remove_cgroups
from tests.support.cri import ContainerId, Executed
from tests.support.errors import HarnessError

COMMAND_TIMEOUT_S: Final = 120.0
STORAGE: Final = "containers/storage"
# What the machine's limits may not allow are Podman's own for a container.
RUN: Final = ("--detach", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
# crun starts nothing beside a cgroup v2 that has controllers of its own.
HOLDER: Final = """\
mount -t tmpfs none /run
if mountpoint --quiet /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
mkdir /run/cdi
mount --bind "$1/cdi" /run/cdi
echo ready
cat
podman rm --all --force --time 0 > "$1/removed" 2>&1
"""
SETTINGS: Final = """\
[engine]
lock_type = "file"
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "{runtime}"
tmp_dir = "{base}/tmp"
static_dir = "{base}/static"
volume_path = "{base}/volumes"
[engine.runtimes]
runc = ["{runc}"]
crun = ["/usr/bin/crun"]
[network]
network_config_dir = "{base}/net"
"""
STORES: Final = """\
[storage]
driver = "overlay"
graphroot = "{base}/var/lib/{storage}"
runroot = "{base}/run/{storage}"
"""


class Podman:
    """One Podman. base: stands for the host's /, with Podman's usual folders below it. cdi: of CDI specifications.

    runtime: runc or crun. suite: of a later Debian, which both come from; empty: of the machine's own.
    """

    def __init__(self, runtime: str = "runc", suite: str = "") -> None:
        if os.geteuid():
            raise HarnessError(
                "Podman as root is tried, which needs root: mounts, cgroups, devices; run this with sudo"
            )
        self.base = Path(tempfile.mkdtemp(prefix="nri-gpu-podman-"))
        self.cdi = self.base / "cdi"
        self.cdi.mkdir()
        self._suite, runc = suite, "/usr/bin/runc" if suite else packages.runc()
        settings = SETTINGS.format(base=self.base, runtime=runtime, runc=runc)
        (self.base / "containers.conf").write_text(settings)
        (self.base / "storage.conf").write_text(STORES.format(base=self.base, storage=STORAGE))
        self._environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.base),
            "CONTAINERS_CONF": f"{self.base}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.base}/storage.conf",
        }

    def __enter__(self) -> Self:
        names = ("podman", "conmon", "crun", "runc") if self._suite else ("podman", "conmon")
        laid = packages.as_if_installed(*names, suite=self._suite)
        self._holder = subprocess.Popen(
            [*laid, "sh", "-ec", HOLDER, "sh", str(self.base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        assert self._holder.stdout
        if self._holder.stdout.readline() != "ready\n":
            raise HarnessError("Podman's mount namespace cannot be made")
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.communicate(timeout=COMMAND_TIMEOUT_S)
        remove_cgroups(self.base.name)
        shutil.rmtree(self.base)

    def __call__(self, *arguments: str) -> str:
        """Run a command. Raises: HarnessError with what it said."""
        done = self._client(*arguments)
        if done.returncode:
            raise HarnessError(f"podman {arguments[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    def _client(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        command = ["nsenter", "--mount", "--target", str(self._holder.pid), "podman", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=self._environment, timeout=timeout_s
        )

    def load(self, spec: image.ImageSpec | None = None) -> None:
        """Build an image and load it."""
        tar = image.build(self.base / "image.tar", packages.busybox(), spec or image.ImageSpec())
        self("load", "--input", str(tar))

    def run(self, *options: str, command: Sequence[str] = (), image_name: str = image.NAME) -> ContainerId:
        """`podman run -d` without a network."""
        parent = ("--cgroup-parent", f"/{self.base.name}")
        return ContainerId(self("run", *RUN, *parent, *options, image_name, *command))

    def execute(self, container: ContainerId, *command: str, timeout_s: int = 20) -> Executed:
        """Run a command in a container to its end, as `Cri.execute` does."""
        done = self._client("exec", container, *command, timeout_s=timeout_s)
        return Executed(done.returncode, done.stdout, done.stderr)

    def inspect(self, container: ContainerId) -> Any:  # noqa: ANN401 - Podman's own JSON
        return json.loads(self("inspect", container))[0]
