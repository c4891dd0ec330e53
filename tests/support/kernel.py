"""A daemon that sees the kernel with NVIDIA's modules and GPUs: what of /proc and /sys says so, in a mount namespace.

So a whole node is played at the driver's own boundary: NVML by a fake library, the kernel by these files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.daemon import Launch, NriGpu

MAJORS: Final = "195 nvidia\n195 nvidiactl\n510 nvidia-caps\n511 nvidia-uvm\n"
DEVICES: Final = "Character devices:\n  1 mem\n{majors}\nBlock devices:\n  8 sd\n"
NVRM: Final = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (host)\n"
MODULES: Final = ("nvidia", "nvidia_uvm")
SCRIPT: Final = (
    'mount --bind "$1" /proc/devices && mount --bind "$2" /proc/driver && mount --bind "$3" /sys/bus && '
    'mount --bind "$4" /sys/module && shift 4 && exec "$@"'
)


def make_pci(bus: Path, bus_id: str, driver: str, *, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    """A function on the bus. driver: that it is bound to; empty for none."""
    device = bus / "pci/devices" / bus_id
    device.mkdir(parents=True, exist_ok=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    (device / "driver").unlink(missing_ok=True)
    if driver:
        (device / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")


def make_information(proc_driver: Path, bus_id: str, told: Mapping[str, str]) -> None:
    """What the driver tells of a GPU, as it writes it."""
    file = proc_driver / "nvidia/gpus" / bus_id / "information"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{name}: \t\t {value}\n" for name, value in {**told, "IRQ": "18"}.items()))


class NriGpuOnNvidia(NriGpu):
    """NriGpu beside kernel modules of a version; None for none yet."""

    def __init__(self, launch: Launch, version: str | None) -> None:
        super().__init__(launch)
        base = launch.base
        self._devices, self.proc_driver = base / "proc-devices", base / "proc-driver"
        self.bus, self._modules = base / "sys-bus", base / "sys-module"
        self.proc_driver.mkdir(parents=True)
        (self.bus / "pci/devices").mkdir(parents=True)
        self._modules.mkdir()
        self._devices.write_text(DEVICES.format(majors=""))
        if version:
            self.load(version)

    def load(self, version: str) -> None:
        """`modprobe nvidia nvidia-uvm`."""
        for module in MODULES:
            (self._modules / module).mkdir()
            (self._modules / module / "version").write_text(f"{version}\n")
        (self.proc_driver / "nvidia").mkdir()
        (self.proc_driver / "nvidia/version").write_text(NVRM.format(version=version))
        self._devices.write_text(DEVICES.format(majors=MAJORS))

    def module(self, name: str, version: str) -> None:
        """A module's version, where nothing else tells it from the one before."""
        (self._modules / name / "version").write_text(f"{version}\n")

    def number(self, major: int) -> None:
        """The major of GPUs' nodes is another one."""
        self._devices.write_text(DEVICES.format(majors=MAJORS.replace("195", str(major))))

    def unload(self) -> None:
        """`rmmod nvidia-uvm nvidia`."""
        self._devices.write_text(DEVICES.format(majors=""))
        shutil.rmtree(self.proc_driver / "nvidia")
        for module in MODULES:
            shutil.rmtree(self._modules / module)

    def program(self) -> list[str]:
        places = [str(each) for each in (self._devices, self.proc_driver, self.bus, self._modules)]
        mine = [] if os.geteuid() == 0 else ["--map-root-user"]
        alone = ["unshare", *mine, "--mount", "--propagation", "private"]
        return [*alone, "/bin/sh", "-c", SCRIPT, "sh", *places, *super().program()]
