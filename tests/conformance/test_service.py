"""The daemon inside its unit's sandbox: it serves a real containerd, stages files, asks NVML, keeps grants.

No systemd runs here; `tests/support/sandbox.py` applies the unit's lines by hand and says what it leaves out.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES
from nri_gpu.driver.trees import tree_name
from tests.support import sandbox
from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS, Launch, NriGpu
from tests.support.marks import on_newest
from tests.support.nvml import FakeGpu, build_fake_nvml
from tests.support.unit_file import Unit
from tests.support.waiting import wait_for

pytestmark = on_newest

ENVIRONMENT: Final = {"PATH": os.environ["PATH"], "PYTHONPATH": str(sandbox.PROJECT)}
ASKS: Final = "device=0,1"
V: Final = "580.95.05"
# Code -> what it prints inside. Each would work outside, so none of the other tests is green by accident.
FENCES: Final = {
    "the host's files": ("open('/etc/nri-gpu-was-here', 'w')", "Read-only file system"),
    "its devices": ("os.mknod('/dev/nri-gpu-was-here', 0o20600, os.makedev(1, 1))", "Operation not permitted"),
    "homes": ("print(os.listdir('/home'))", "[]"),
    "others in /proc": ("os.stat('/proc/1')", "No such file"),
    "the network": ("socket.socket()", "Address family not supported"),
    "namespaces": ("libc('unshare', 0x20000)", "Operation not permitted"),
    "mounts": ("libc('mount', b'none', b'/tmp', b'tmpfs', 0, None)", "Operation not permitted"),
    "generated code": ("mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)", "Operation not permitted"),
    "priorities": ("os.setpriority(os.PRIO_PROCESS, 0, 5)", "Operation not permitted"),
    "setuid files": ("os.open('/tmp/x', os.O_CREAT | os.O_WRONLY, 0o4755)", "Operation not permitted"),
}
PROBE: Final = """
import ctypes, mmap, os, socket
def libc(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
try:
    {code}
except OSError as error:
    print(error)
"""


class ServiceNriGpu(NriGpu):
    """The daemon as the unit starts it: in its sandbox, its folders made for it."""

    def start(self) -> None:
        self.launch.state.mkdir(mode=0o700, exist_ok=True)
        (self.launch.base / "drivers").mkdir(mode=0o755, exist_ok=True)
        super().start()

    def program(self) -> list[str]:
        keep = [self.launch.base, self.launch.socket.parents[1]]
        keep += [self.launch.driver_root] if self.launch.driver_root else []
        return sandbox.command(super().program(), rw=(self.launch.state, self.launch.base / "drivers"), keep=keep)


class Process(Struct, frozen=True):
    """What /proc says of a process."""

    pid: int

    def status(self, key: str) -> str:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:"))

    def namespace(self, kind: str) -> str:
        return str(Path(f"/proc/{self.pid}/ns/{kind}").readlink())


@pytest.fixture
def service(launch: Launch) -> Iterator[ServiceNriGpu]:
    with ServiceNriGpu(launch) as daemon:
        daemon.wait_staged()
        yield daemon


@pytest.mark.parametrize(("code", "answer"), FENCES.values(), ids=FENCES)
def test_the_sandbox_is_there(code: str, answer: str) -> None:
    assert answer in _inside(code)


def test_it_holds_nothing_that_it_does_not_need(service: ServiceNriGpu) -> None:
    daemon, mine = Process(service.pid), Process(os.getpid())
    assert {daemon.status(key) for key in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (daemon.status("NoNewPrivs"), daemon.status("Seccomp")) == ("1", "2")
    assert daemon.status("Uid").split() == ["0"] * 4
    for kind in ("mnt", "net", "ipc", "uts"):
        assert daemon.namespace(kind) != mine.namespace(kind)


def test_it_grants_gpus_with_the_drivers_files(node: Containerd, service: ServiceNriGpu) -> None:
    container = node.cri.run_asking(ASKS)

    status = node.cri.status(container)
    assert status.env["NVIDIA_VISIBLE_DEVICES"] == ",".join(UUIDS[:2])
    assert {"/dev/nvidia0", "/dev/nvidia1"} <= set(status.device_paths)
    said = node.cri.execute(container, "nvidia-smi")
    assert f"SIMULATION of driver {V}" in said.stdout
    assert "/dev/nvidia1" in said.stdout


def test_staged_files_are_copies_that_all_may_read(service: ServiceNriGpu, launch: Launch) -> None:
    """link(2) does not cross from the read-only mount to the writable one; and UMask= must not show."""
    assert launch.driver_root
    tree = tree_name(DEFAULT_CAPABILITIES)
    [staged] = (launch.base / "drivers").glob(f"*/{tree}/lib64/libcuda.so.{V}")
    original = launch.driver_root / "lib64" / staged.name
    assert staged.read_bytes() == original.read_bytes()
    assert staged.stat().st_ino != original.stat().st_ino
    assert staged.stat().st_mode & 0o777 == 0o555
    folders = [path for path in staged.parents if path.is_relative_to(launch.base / "drivers")]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o755}


@pytest.mark.parametrize("kill", [False, True], ids=["restarted", "killed"])
@pytest.mark.short
def test_a_restart_keeps_grants(node: Containerd, service: ServiceNriGpu, kill: bool) -> None:
    node.cri.run_asking(ASKS)
    service.wait_held({"pod/main": UUIDS[:2]})
    key = (service.launch.state / "key").read_bytes()

    service.kill() if kill else service.terminate()
    (service.launch.state / "ledger.json").unlink()  # so that what is read below was rebuilt
    service.start()
    service.wait_ready()

    service.wait_held({"pod/main": UUIDS[:2]})
    assert (service.launch.state / "key").read_bytes() == key
    service.wait_logged("driver files staged")
    assert "exclusive" in node.cri.refused("device=0", "other").details


def test_nvml_is_asked_from_inside(node: Containerd, tmp_path: Path) -> None:
    """A library of the driver is loaded by a child with all that the unit forbids, and answers."""
    root = build_fake_nvml(tmp_path / "nvml", [FakeGpu(), FakeGpu()])
    with ServiceNriGpu(Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root)) as daemon:
        daemon.wait_ready()
        assert " gpus=2 " in daemon.wait_logged("inventory changed")


def test_before_a_runtime_it_is_alive_and_not_ready(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "d", tmp_path / "run" / "nri" / "nri.sock", environment={"WATCHDOG_USEC": "200000"})
    launch.socket.parents[1].mkdir()
    with ServiceNriGpu(launch) as daemon:
        daemon.wait_logged("runtime not reached")
        _until_notified(daemon, "STATUS=not connected: no NRI socket")
        _until_notified(daemon, "WATCHDOG=1")
        assert not daemon.has_notified("READY=1")
        assert daemon.terminate() == 0
        assert daemon.has_notified("STOPPING=1")


def test_reload_and_stop_are_the_units_signals(service: ServiceNriGpu) -> None:
    assert "kill -HUP ${MAINPID}" in Unit.read().value("ExecReload")
    os.kill(service.pid, signal.SIGHUP)
    service.wait_logged("policy reloaded")
    assert service.terminate() == 0


def _inside(code: str) -> str:
    command = sandbox.command([sys.executable, "-c", PROBE.format(code=code)])
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, cwd="/", timeout=60)
    return done.stdout


def _until_notified(daemon: NriGpu, line: str) -> None:
    wait_for(line, lambda: daemon.has_notified(line), 20, daemon.log)
