"""A real containerd on private paths: boots in about a second, and leaves nothing behind, however its owner ends.

    with Containerd(packages.fetch(Version.V2_1)) as node:
        pod = node.cri.run_pod()
        container = node.cri.run(pod, ContainerSpec(command=("/bin/sleep", "60")))

Its mounts, its /run/containerd and, in v2 mode, its view of /sys/fs/cgroup are in a mount namespace of their own;
everything else is the machine's. Containers lie in the cgroup /<name of the base folder>/<container id>.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from tests.support import cleanup, config, image, packages, runc_devices_only
from tests.support.cgroup import Cgroup, host_cgroup
from tests.support.cri import ContainerId, Cri, CriError
from tests.support.errors import HarnessError
from tests.support.supervisor import Daemon, Supervisor
from tests.support.waiting import wait_for

BOOT_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 15.0
LOG_TAIL_LINES: Final = 25
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Containerd:
    """One instance. Made, it has its folders, where launched plugins may be dropped; `boot` (or `with`) starts it.

    cgroup: what it sees; by default what the machine has. runc: instead of the usual one. environment: beside PATH, of
    containerd and all it starts. Times are in seconds.
    Raises: HarnessError when the machine cannot run it.
    """

    def __init__(
        self,
        runtime: packages.Runtime,
        *,
        cgroup: Cgroup | None = None,
        nri: bool = True,
        runc: Path | None = None,
        environment: Mapping[str, str] | None = None,
        request_timeout_s: float = 2.0,
    ) -> None:
        self.runtime = runtime
        self.cgroup = cgroup or host_cgroup()
        self._given_runc = runc
        self._environment = {"PATH": f"{runtime.folder}:{SYSTEM_PATH}"} | dict(environment or {})
        _require_machine(self.cgroup)
        cleanup.sweep()
        self._daemon: Daemon | None = None
        self._images: dict[str, image.ImageSpec] = {}
        self.layout = config.Layout(Path(tempfile.mkdtemp(prefix=cleanup.PREFIX, dir=cleanup.PARENT)))
        try:
            self._write_files(nri, request_timeout_s)
            self._supervisor = Supervisor(self.layout, self.cgroup)
        except BaseException:
            shutil.rmtree(self.base, ignore_errors=True)
            raise
        self.cri = Cri(self.cri_socket, cgroup_parent=f"/{self.base.name}")

    def __enter__(self) -> Self:
        try:
            self.boot()
        except BaseException:
            self.abandon()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def base(self) -> Path:
        return self.layout.base

    @property
    def nri_socket(self) -> Path:
        return self.layout.nri_socket

    @property
    def cri_socket(self) -> Path:
        return self.layout.cri_socket

    @property
    def plugin_path(self) -> Path:
        """Where containerd looks for plugins to launch, `NN-name`, when it boots."""
        return self.layout.plugin_path

    @property
    def plugin_config_path(self) -> Path:
        return self.layout.plugin_config_path

    @property
    def log_path(self) -> Path:
        return self.layout.log

    @property
    def pid(self) -> int:
        """The daemon's process id. Raises: HarnessError when it does not run."""
        return self._running().pid

    @property
    def supervisor_pid(self) -> int:
        """The process whose mount namespace containerd lives in: `/proc/<supervisor_pid>/root` shows its mounts."""
        return self._supervisor.pid

    def boot(self) -> None:
        """Start, wait until CRI answers, and bring the test image in."""
        self._start()
        self.import_image()

    def stop(self) -> None:
        """Remove all pods, end containerd, take everything away. Raises: HarnessError if it left something itself."""
        left: cleanup.Leftovers | None = None
        try:
            if self._daemon and self._daemon.alive():
                self.cri.remove_all()
                self.terminate()
                left = self._settled()
        finally:
            self.abandon()
        if left:
            raise HarnessError(f"containerd {self.runtime.release} left behind:\n{left}")

    def abandon(self) -> None:
        """Take everything away at once, running containers too, and ask containerd nothing."""
        self.cri.close()
        try:
            self._supervisor.close()
        finally:
            self._forget_daemon()

    def terminate(self) -> None:
        """SIGTERM, and wait. Containers live on."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait. Containers live on."""
        self._end(signal.SIGKILL)

    def restart(self, *, kill: bool = False) -> None:
        """End containerd if it runs, by SIGKILL if asked, and start it again. Containers live on, and images stay."""
        if self._daemon:
            self._end(signal.SIGKILL if kill else signal.SIGTERM)
        self._start()

    def import_image(self, spec: image.ImageSpec | None = None) -> None:
        """Build an image and import it, unless it is there; it can be run when this returns."""
        spec = spec or image.ImageSpec()
        if self._images.get(spec.name) == spec:
            return
        with tempfile.NamedTemporaryFile(dir=self.base, suffix=".tar") as file:
            self.import_tar(image.build(Path(file.name), packages.busybox(), spec), spec.name)
        self._images[spec.name] = spec

    def import_tar(self, tar: Path, name: str) -> None:
        """Import an OCI layout tar; the image can be run when this returns."""
        self.ctr("images", "import", str(tar))
        wait_for(f"image {name}", lambda: self.cri.has_image(name), STOP_TIMEOUT_S)

    def ctr(self, *arguments: str) -> str:
        """Run containerd's own client in CRI's namespace. Raises: HarnessError with what it said."""
        command: list[str | Path] = [
            self.runtime.ctr,
            "--address",
            str(self.cri_socket),
            "--namespace",
            "k8s.io",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HarnessError(f"ctr {shlex.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout

    def container_cgroup(self, container: ContainerId, controller: str = "devices") -> Path:
        """The container's cgroup folder, readable from outside; on v2 there is one, whatever the controller."""
        root = Path(f"/proc/{self._supervisor.pid}/root{cleanup.CGROUPS}")
        hierarchy = root / controller if self.cgroup is Cgroup.V1 else root
        return hierarchy / self.base.name / container

    def leftovers(self) -> cleanup.Leftovers:
        """What runs, is mounted, or has a cgroup now, containerd itself included."""
        return cleanup.leftovers(self.base, self._supervisor.pid)

    def log_tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _write_files(self, nri: bool, request_timeout_s: float) -> None:
        self.layout.make()
        v3 = self.runtime.number >= (2, 0)
        text = config.render(self.layout, v3=v3, runc=self._runc(), nri=nri, request_timeout_s=request_timeout_s)
        self.layout.config.write_text(text)

    def _start(self) -> None:
        self._forget_daemon()
        self._daemon = self._supervisor.start(self.runtime.containerd, self._environment)
        wait_for(f"containerd {self.runtime.release}", self._answers, BOOT_TIMEOUT_S, self.log_tail)

    def _answers(self) -> bool:
        if not self._running().alive():
            raise HarnessError(f"containerd {self.runtime.release} ended at start; its log says:\n{self.log_tail()}")
        try:
            return bool(self.cri.version(timeout_s=1))
        except CriError:
            return False  # not listening yet, or still loading its plugins

    def _end(self, number: signal.Signals) -> None:
        daemon = self._running()
        daemon.signal(number)
        if not daemon.wait(STOP_TIMEOUT_S):
            raise HarnessError(f"containerd {self.runtime.release} ignores {number.name}:\n{self.log_tail()}")
        self._forget_daemon()

    def _settled(self) -> cleanup.Leftovers:
        # A shim ends on its own, a moment after its last container was removed.
        with contextlib.suppress(HarnessError):
            wait_for("leftovers", lambda: not self.leftovers(), STOP_TIMEOUT_S)
        return self.leftovers()

    def _running(self) -> Daemon:
        if self._daemon is None:
            raise HarnessError("containerd does not run; boot or restart it")
        return self._daemon

    def _forget_daemon(self) -> None:
        if self._daemon:
            self._daemon.close()
            self._daemon = None

    def _runc(self) -> Path:
        real = self._given_runc or packages.runc()
        if self.cgroup is host_cgroup():
            return real
        return runc_devices_only.write_wrapper(self.layout.runc_wrapper, real)


def _require_machine(cgroup: Cgroup) -> None:
    if os.geteuid():
        raise HarnessError("a private containerd needs root: mounts, cgroups, devices; run this with sudo")
    if cgroup is Cgroup.V1 and host_cgroup() is Cgroup.V2:
        raise HarnessError("this machine has cgroup v2 only, so a containerd on cgroup v1 cannot run here")
