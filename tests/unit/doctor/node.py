"""A healthy node below a folder, real files and real sockets, which tests break in one place each."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.answers import DaemonStatus, PolicyStatus, RuntimeConnection
from nri_gpu.daemon.view import status_of
from nri_gpu.doctor.examine import DoctorDocument, examine
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.runtimes import container_runtime
from nri_gpu.domain.finding import Finding, Level
from nri_gpu.domain.node import Majors
from nri_gpu.host.actions import MakeLink, MakeNode, make_plan
from nri_gpu.plugin.guard_status import GuardStatus, process_started, write_guard_status
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import BUILT_IN, NamespaceRules, Policy
from tests.support import builders as make
from tests.support.driver_root import make_driver_root
from tests.support.goldens import compare_part
from tests.support.views import view
from tests.unit.host.host_tree import OLD_UVM, HostTree, host_below

GOLDENS: Final = Path(__file__).parent / "goldens"
# What Python says of a file that is not TOML differs by its release.
NO_TOML: Final = re.compile(r"(?<=is not TOML: ).*?(?=\. It runs|$)", re.MULTILINE)
VERSION: Final = "580.95.05"
RELEASE: Final = "6.1.0-44-amd64"
CONTAINERD: Final = "#!/bin/sh\necho containerd github.com/containerd/containerd {version} deadbeef\n"
CONFIG: Final = 'version = 3\n[plugins."io.containerd.nri.v1.nri"]\n  disable = false\n'
TOML: Final = "etc/containerd/config.toml"
K3S: Final = "var/lib/rancher/k3s/agent/etc/containerd/config.toml"
DOCKERS: Final = 'disabled_plugins = ["cri"]\n'
PLUGINS: Final = "var/lib/kubelet/device-plugins"
CHECKPOINT: Final = f"{PLUGINS}/kubelet_internal_checkpoint"
HEALTHY: Final = '{"Data": {"RegisteredDevices": {"nvidia.com/gpu": ["GPU-1", "GPU-2"]}}, "Checksum": 1}'
HEALTHY_POLICY: Final = Policy(namespaces=NamespaceRules(allow=Globs(("ml",))))
HEALTHY_GUARD: Final = GuardStatus(
    pid=os.getpid(), started=process_started(os.getpid()), connected=True, runtime="containerd", validates=True
)


def free(size_bytes: int, inodes: int = 1 << 20, flags: int = 0) -> os.statvfs_result:
    """What statvfs(3) answers of a file system with that much free."""
    block = 4096
    blocks = size_bytes // block
    return os.statvfs_result((block, block, 1 << 24, blocks, blocks, 1 << 24, inodes, inodes, flags, 255))


class DoctorNode:
    """Two GPUs, their driver, containerd 2.1, the daemon and its guard."""

    def __init__(self, tree: HostTree, sockets: ExitStack) -> None:
        self.tree, self.root, self._sockets = tree.loaded(), tree.base, sockets
        (self.root / "run").mkdir()
        (self.root / "var").mkdir()
        (self.root / "var/run").symlink_to("../run")
        self._driver()
        self.process(2, "kthreadd")
        self.process(700, "containerd", "/usr/bin/containerd")
        self.write("proc/700/environ", "LANG=C\0PATH=/usr/local/sbin:/usr/sbin:/usr/bin\0")
        self.program("2.1.9")
        self.write("etc/containerd/config.toml", CONFIG)
        self.opens(700, self.listen("run/nri/nri.sock"))
        self.guard(HEALTHY_GUARD)
        for name in ("nri-gpu", "nri-gpu-guard"):
            self.write(f"etc/systemd/system/{name}.service", "")
        self.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
        (self.root / "run/nri-gpu").mkdir(mode=0o700)
        for name in ("key", "ledger.json"):
            self.write(f"run/nri-gpu/{name}", "").chmod(0o600)
        self.seen = Examined(
            root=self.root,
            policy=HEALTHY_POLICY,
            status=self.status(),
            now_s=time.time(),
            clock=lambda: 0,
            statvfs=lambda _: free(8 << 30),
        )

    def _driver(self) -> None:
        for minor in self.tree.minors:
            self.bind(minor, "nvidia")
        for module in ("nvidia", "nvidia_uvm"):
            self.write(f"sys/module/{module}/version", f"{VERSION}\n")
        make_driver_root(self.root, VERSION, "debian")
        self.make_nodes()
        self.write("proc/sys/kernel/osrelease", f"{RELEASE}\n")
        self.write(f"lib/modules/{RELEASE}/modules.dep", "updates/dkms/nvidia.ko:\n")
        self.listen("run/nvidia-persistenced/socket")

    def bind(self, minor: int, driver: str) -> None:
        self.tree.bind(minor, driver)

    def make_nodes(self) -> None:
        """What `nri-gpu prepare` would do."""
        for action in make_plan(self.tree.look()).actions:
            if isinstance(action, MakeNode):
                node = action.node
                self.tree.node(str(action.path), node.major, node.minor, node.mode)
            elif isinstance(action, MakeLink):
                (self.tree.dev / action.path).symlink_to(action.target)

    def write(self, path: str, text: str) -> Path:
        return self.tree.write(path, text)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def process(self, pid: int, name: str, *arguments: str) -> None:
        self.write(f"proc/{pid}/comm", f"{name[:15]}\n")
        self.write(f"proc/{pid}/cmdline", "\0".join(arguments) + "\0")

    def program(self, version: str, pid: int = 700) -> None:
        name = (self.root / f"proc/{pid}/comm").read_text().strip()
        self.write(f"usr/bin/{name}", CONTAINERD.format(version=version)).chmod(0o755)
        link = self.root / f"proc/{pid}/exe"
        link.unlink(missing_ok=True)
        link.symlink_to(f"/usr/bin/{name}")

    def listen(self, path: str) -> socket.socket:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        listener = self._sockets.enter_context(closing(socket.socket(socket.AF_UNIX)))
        listener.bind(str(target))
        listener.listen()
        return listener

    def opens(self, pid: int, listener: socket.socket, path: str = "/var/run/nri/nri.sock") -> None:
        """The process listens with this socket, and has a pipe and a connection to somebody who left."""
        inode = os.fstat(listener.fileno()).st_ino
        lines = (f"0: 2 0 00010000 0001 01 {inode} {path}\n", f"0: 3 0 00000000 0001 03 {inode + 1} {path}\n", "0: 2\n")
        self.write(f"proc/{pid}/net/unix", f"Num RefCount Protocol Flags Type St Inode Path\n{''.join(lines)}")
        (self.root / f"proc/{pid}/fd").mkdir(parents=True, exist_ok=True)
        for number, target in enumerate(("pipe:[1]", f"socket:[{inode + 1}]", f"socket:[{inode}]")):
            (self.root / f"proc/{pid}/fd/{number}").symlink_to(target)

    def dead_socket(self, path: str) -> None:
        """The file that a process leaves behind."""
        (self.root / path).unlink(missing_ok=True)
        self.listen(path).close()

    def guard(self, status: GuardStatus) -> None:
        write_guard_status(self.root / "run/nri-gpu-guard", status)

    def status(self, **fields: Any) -> DaemonStatus:  # noqa: ANN401 - of a View
        fields = {"policy": PolicyStatus(BUILT_IN, ""), **fields}
        return status_of(view(node=make.node(driver_version=VERSION, majors=Majors(1510, 1511, 1512)), **fields))

    def examine(self, **changes: Any) -> DoctorDocument:  # noqa: ANN401 - of Examined
        seen = replace(self.seen, **changes)
        return examine(seen, container_runtime(seen))

    def found(self, **changes: Any) -> dict[str, Finding]:  # noqa: ANN401 - of Examined
        """What is not ok, by subject."""
        return {each.subject: each for each in self.examine(**changes).findings if each.level is not Level.OK}

    def hold(self, golden: str, names: Collection[str], name: str, **changes: Any) -> None:  # noqa: ANN401 - of Examined
        """Hold what is not ok against its part of a golden file."""
        lines = [
            line
            for each in self.found(**changes).values()
            for line in (f"{each.level} {each.subject}: {each.meaning}", *(f"  {fix}" for fix in each.fix))
        ]
        text = "\n".join(lines).replace(f"{self.root}/", "/").replace(str(self.root), "/")
        text = NO_TOML.sub("...", text.replace(f"pid {os.getpid()}", "pid ..."))
        compare_part(GOLDENS / f"{golden}.txt", names, name, text)

    def found_by_nobody(self) -> dict[str, Finding]:
        """The same for a user who is not root."""
        for path in (self.root.parent, self.root):
            path.chmod(0o755)
        os.seteuid(65534)
        try:
            return self.found()
        finally:
            os.seteuid(0)

    def only(self, **changes: Any) -> Finding:  # noqa: ANN401 - of Examined
        """The one finding that is not ok."""
        (finding,) = self.found(**changes).values()
        return finding


def stopped(node: DoctorNode) -> None:
    for name in ("comm", "cmdline", "exe"):
        node.remove(f"proc/700/{name}")


def installed(node: DoctorNode) -> None:
    node.write("usr/bin/nvidia-container-runtime", "")


def away(**fields: Any) -> RuntimeConnection:  # noqa: ANN401 - of a RuntimeConnection
    return RuntimeConnection(**{"ready": True, "since_s": 0.0, "name": "containerd", "version": "2.1.9", **fields})


def old_uvm(node: DoctorNode) -> None:
    """A node from before the module was loaded again."""
    node.remove("dev/nvidia-uvm")
    node.tree.node("nvidia-uvm", OLD_UVM, 0)


@pytest.fixture
def node(folder: Path) -> Iterator[DoctorNode]:
    with ExitStack() as sockets:
        yield DoctorNode(host_below(folder), sockets)
