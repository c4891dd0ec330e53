"""Debian's Podman on private paths, as root and with runc; it takes nothing along and leaves nothing behind.

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
from tests.support.cri import ContainerId
from tests.support.errors import HarnessError

COMMAND_TIMEOUT_S: Final = 120.0
STORAGE: Final = "containers/storage"
# What the machine's limits may not allow are Podman's own for a container.
RUN: Final = ("--detach", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
HOLDER: Final = """\
mount -t tmpfs none /run
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
runtime = "runc"
tmp_dir = "{base}/tmp"
static_dir = "{base}/static"
volume_path = "{base}/volumes"
[engine.runtimes]
runc = ["{runc}"]
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
    """One Podman. base: stands for the host's /, with Podman's usual folders below it. cdi: of CDI specifications."""

    def __init__(self) -> None:
        if os.geteuid():
            raise HarnessError(
                "Podman as root is tried, which needs root: mounts, cgroups, devices; run this with sudo"
            )
        self.base = Path(tempfile.mkdtemp(prefix="nri-gpu-podman-"))
        self.cdi = self.base / "cdi"
        self.cdi.mkdir()
        (self.base / "containers.conf").write_text(SETTINGS.format(base=self.base, runc=packages.runc()))
        (self.base / "storage.conf").write_text(STORES.format(base=self.base, storage=STORAGE))
        self._environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.base),
            "CONTAINERS_CONF": f"{self.base}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.base}/storage.conf",
        }

    def __enter__(self) -> Self:
        command = [*packages.as_if_installed("podman", "conmon"), "sh", "-ec", HOLDER, "sh", str(self.base)]
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
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
        command = ["nsenter", "--mount", "--target", str(self._holder.pid), "podman", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self._environment, timeout=COMMAND_TIMEOUT_S
        )
        if done.returncode:
            raise HarnessError(f"podman {arguments[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    def load(self) -> None:
        """Build an image and load it."""
        self("load", "--input", str(image.build(self.base / "image.tar", packages.busybox(), image.ImageSpec())))

    def run(self, *options: str, command: Sequence[str] = ()) -> ContainerId:
        """`podman run -d` without a network."""
        parent = ("--cgroup-parent", f"/{self.base.name}")
        return ContainerId(self("run", *RUN, *parent, *options, image.NAME, *command))

    def inspect(self, container: ContainerId) -> Any:  # noqa: ANN401 - Podman's own JSON
        return json.loads(self("inspect", container))[0]
