"""The daemon inside its unit's sandbox: its NVML, its port, its kubelet; and what the sandbox denies.

No systemd runs here; `tests/support/sandbox.py` applies the unit's lines by hand and says what it leaves out. With a
booted systemd, tests/packages/test_systemd.py has grants, restarts and reloads of the units.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from nri_gpu.stray.uses import Extent
from tests.support import sandbox
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.kubelet import Kubelet
from tests.support.metrics import scraped
from tests.support.nvml import FakeGpu, build_fake_nvml
from tests.support.prometheus import free_port
from tests.support.unit_file import OURS, Unit
from tests.support.waiting import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a sandbox of namespaces needs root")

KUBELET, METRICS = (OURS.parent / "nri-gpu.service.d" / name for name in ("kubelet.conf", "metrics.conf"))
GPU: Final = "nvidia.com/gpu"
# Code -> what it prints inside. Each would work outside, so none of the other tests is green by accident.
FENCES: Final = {
    "the host's files": ("open('/etc/nri-gpu-was-here', 'w')", "Read-only file system"),
    "its devices": ("os.mknod('/dev/nri-gpu-was-here', 0o20600, os.makedev(1, 1))", "Operation not permitted"),
    "homes": ("print(os.listdir('/home'))", "[]"),
    "what only its own user may read of others in /proc": ("os.readlink('/proc/1/root')", "Permission denied"),
    "the network": ("socket.socket()", "Address family not supported"),
    "the kernel's sockets": ("socket.socket(socket.AF_NETLINK)", "Address family not supported"),
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


class Sandboxed(NriGpu):
    """A daemon in the unit's sandbox with what a drop-in adds. rw: what it may write to besides its own folders."""

    def __init__(self, launch: Launch, drop_in: str = "", *options: str, rw: tuple[Path, ...] = ()) -> None:
        super().__init__(launch)
        self._drop_in = drop_in
        self._options = options
        self._rw = (launch.state, launch.base / "drivers", *rw)
        for folder in self._rw[:2]:
            folder.mkdir()

    def program(self) -> list[str]:
        unit = self.launch.base / "nri-gpu.service"
        unit.write_text(f"{OURS.read_text()}\n{self._drop_in}")
        return sandbox.command([*super().program(), *self._options], rw=self._rw, keep=[self.launch.base], unit=unit)


def inside(*program: object, rw: Sequence[Path] = (), keep: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """What a program says in the daemon's sandbox. rw, keep: as of `sandbox.command`."""
    command = sandbox.command(list(map(str, program)), rw=rw, keep=keep)
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=sandbox.PROJECT, timeout=60)


@pytest.mark.parametrize(("code", "answer"), FENCES.values(), ids=FENCES)
def test_the_sandbox_is_there(code: str, answer: str) -> None:
    assert answer in inside(sys.executable, "-c", PROBE.format(code=code)).stdout


def test_nvml_is_asked_from_inside(folder: Path) -> None:
    """A library of the driver is loaded by a child with all that the unit forbids, and answers."""
    root = build_fake_nvml(folder / "nvml", [FakeGpu(), FakeGpu()])
    with Sandboxed(Launch(folder, folder / "nri.sock", topology=None, driver_root=root)) as daemon:
        assert " gpus=2 " in daemon.wait_logged("inventory changed")


def test_a_specification_is_written_from_inside(tmp_path: Path) -> None:
    """By the CDI unit, which shares the daemon's lines: its files are for all to read, whatever UMask= says."""
    driver, rw = make_driver_root(tmp_path / "driver"), tmp_path / "rw"
    rw.mkdir()
    places = ["--gpus", FOUR_GPUS, "--driver-root", driver, "--stage-dir", rw / "stage", "--output", rw / "cdi.json"]
    done = inside(sys.executable, "-m", "nri_gpu", "cdi", "generate", *places, rw=[rw], keep=[driver])
    assert done.returncode == 0
    assert done.stderr.startswith(f"nri-gpu: {rw}/cdi.json is written: 4 GPUs\nnri-gpu: SIMULATED: ")
    assert done.stderr.count("\n") == 2
    assert (rw / "cdi.json").stat().st_mode & 0o777 == 0o644
    [tree] = [folder for folder in (rw / "stage").glob("*/compute+utility")]
    assert tree.stat().st_mode & 0o777 == 0o755


def test_without_its_drop_in_a_look_for_stray_use_tells_that_it_is_blind() -> None:
    """The child needs no system call that the unit takes away."""
    done = inside(sys.executable, "-I", "-m", "nri_gpu.stray.process_scan", "0", "195")
    assert msgspec.json.decode(done.stdout.splitlines()[-1], type=Extent).closed  # such as process 1


def test_the_drop_in_for_metrics_opens_the_loopback_alone() -> None:
    unit = Unit.read(METRICS)
    assert unit.words("IPAddressAllow") == ["localhost"]
    assert unit.words("RestrictAddressFamilies") == ["AF_INET", "AF_INET6"]
    assert all(line.why for line in unit.lines)


def test_with_it_a_port_is_served(folder: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Sandboxed(Launch(folder, folder / "nri.sock", metrics=address), METRICS.read_text()) as daemon:
        daemon.wait_logged("metrics are served")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert scraped(answer.read().decode()).value("nri_gpu_connected") == 0


def test_without_it_the_log_names_it_and_a_socket_is_served(folder: Path) -> None:
    with Sandboxed(Launch(folder, folder / "nri.sock", metrics=f"127.0.0.1:{free_port()}")) as daemon:
        assert "drop-in metrics.conf" in daemon.wait_logged("metrics are not served")
    path = folder / "state" / "metrics.sock"
    with NriGpu(Launch(folder, folder / "nri.sock", metrics=str(path))) as daemon:
        wait_for("the socket", path.exists, 10, daemon.log)


async def test_with_the_drop_in_for_the_kubelet_its_device_plugin_is_served(folder: Path) -> None:
    policy = folder / "d" / "policy.toml"
    policy.parent.mkdir()
    policy.write_text(f'[kubelet]\ndir = "{folder}/kubelet/device-plugins"\ncdi_dir = "{folder}/kubelet/cdi"\n')
    async with asyncio.timeout(60), Kubelet(folder / "kubelet") as kubelet:
        launch = Launch(policy.parent, policy.parent / "nri.sock", policy=policy)
        with Sandboxed(launch, KUBELET.read_text(), "--kubelet", rw=(folder / "kubelet",)):
            await kubelet.wait("a registration", lambda: kubelet.capacity(GPU) == 4)
            # No runtime is there, so none is offered yet.
            assert kubelet.healthy(GPU) == []
            # Made anew below the folder that the unit may write to.
            await kubelet.stop()
            shutil.rmtree(kubelet.dir, ignore_errors=True)  # the daemon removes its sockets meanwhile
            await kubelet.start()
            await kubelet.wait("a registration", lambda: kubelet.capacity(GPU) == 4)
