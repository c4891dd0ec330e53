"""A host below a temporary folder: /dev with real nodes (of majors that no driver serves), /proc and /sys as text."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.host.facts import DevEntry, HostFacts, look
from nri_gpu.host.kernel_view import HostFolders

# Above 511, the last one that the kernel gives out on its own.
NVIDIA: Final = 1510
UVM: Final = 1511
CAPS: Final = 1512
OLD_UVM: Final = 1601

PARAMS: Final = """\
ResmanDebugLevel: 4294967295
ModifyDeviceFiles: {modify}
DeviceFileUID: {uid}
DeviceFileGID: {gid}
DeviceFileMode: {mode}
RegistryDwords: ""
"""
INFORMATION: Final = """\
Model: \t\t NVIDIA H100 80GB HBM3
GPU UUID: \t GPU-00000000-0000-0000-0000-00000000000{minor}
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Excluded:\t {excluded}
"""
# Shell, since a Python would take most of the tests' time.
MODPROBE: Final = """\
#!/bin/sh
base={base}
for module; do :; done
echo "$* [$(tr '\\0' ' ' < /proc/$$/environ)]" >> $base/calls
{script}
"""
# What the kernel does when the modules come up.
LOADS: Final = """
[ ! -d $base/waiting/$module ] || cp -r $base/waiting/$module/. $base
awk 'FNR == NR { majors = majors $0 "\\n"; next } /^$/ { printf "%s", majors } { print }' \\
    $base/majors/$module $base/proc/devices > $base/devices
mv $base/devices $base/proc/devices
state=$base/sys/module/$(echo $module | tr - _)
mkdir -p $state
echo live > $state/initstate
"""


@dataclass(slots=True)
class HostTree:
    """A machine with GPUs whose driver is not loaded; `loaded()` is after modprobe, still without nodes."""

    base: Path
    minors: tuple[int, ...] = (0, 1)
    places: HostFolders = field(init=False)

    def __post_init__(self) -> None:
        self.places = HostFolders(**{name: self.base / name for name in ("dev", "proc", "sys")}, host=self.base)
        self.dev.mkdir(parents=True)
        (self.dev / "char").mkdir()
        self.write("proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n  7 loop\n")
        for minor in self.minors:
            self.device(minor)
            self.write(f"waiting/nvidia/proc/driver/nvidia/gpus/{address(minor)}/information", information(minor))
        self.write("waiting/nvidia/proc/driver/nvidia/params", params())
        self.write("majors/nvidia", f"{NVIDIA} nvidia\n{NVIDIA} nvidiactl\n{CAPS} nvidia-caps\n")
        self.write("majors/nvidia-uvm", f"{UVM} nvidia-uvm\n")
        self.write("majors/nvidia-modeset", f"{NVIDIA} nvidia-modeset\n")
        self.modprobe(LOADS)

    @property
    def dev(self) -> Path:
        return self.places.dev

    def write(self, path: str, text: str) -> Path:
        target = self.base / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def device(self, minor: int, vendor: str = "0x10de", kind: str = "0x030200") -> None:
        self.write(f"sys/bus/pci/devices/{address(minor)}/vendor", f"{vendor}\n")
        self.write(f"sys/bus/pci/devices/{address(minor)}/class", f"{kind}\n")

    def bind(self, minor: int, driver: str) -> None:
        """Bind a GPU to a driver; to none where that is empty."""
        link = self.base / f"sys/bus/pci/devices/{address(minor)}/driver"
        link.unlink(missing_ok=True)
        if driver:
            link.symlink_to(f"../../../bus/pci/drivers/{driver}")

    def modprobe(self, script: str) -> None:
        """Another program in place of the host's own."""
        program = self.write("bin/modprobe", MODPROBE.format(base=self.base, script=script))
        program.chmod(0o755)
        self.write("proc/sys/kernel/modprobe", f"{program}\n")

    def calls(self) -> list[str]:
        path = self.base / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def loaded(self) -> HostTree:
        """The driver's modules are in the kernel."""
        for module in ("nvidia", "nvidia-uvm"):
            self.write(f"sys/module/{module.replace('-', '_')}/initstate", "live\n")
        for minor in self.minors:
            self.write(f"proc/driver/nvidia/gpus/{address(minor)}/information", information(minor))
        self.write("proc/driver/nvidia/params", params())
        lines = "".join((self.base / "majors" / module).read_text() for module in ("nvidia", "nvidia-uvm"))
        self.write("proc/devices", f"Character devices:\n  1 mem\n{lines}\nBlock devices:\n  7 loop\n")
        return self

    def mig(self, name: str, minor: int, *, modify: int = 1, mode: int = 0o444) -> None:
        """A MIG instance: `gpu0/gi1` or `gpu0/gi1/ci0`."""
        gpu, _, instance = name.partition("/")
        text = f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: {modify}\n"
        self.write(f"proc/driver/nvidia/capabilities/{gpu}/mig/{instance}/access", text)
        table = self.base / "proc/driver/nvidia-caps/mig-minors"
        before = table.read_text() if table.exists() else "config 1\nmonitor 2\n"
        self.write("proc/driver/nvidia-caps/mig-minors", f"{before}{name}/access {minor}\n")

    def node(self, path: str, major: int, minor: int, mode: int = 0o666, uid: int = 0, gid: int = 0) -> Path:
        target = self.dev / path
        target.parent.mkdir(exist_ok=True)
        os.mknod(target, stat.S_IFCHR, os.makedev(major, minor))
        os.chown(target, uid, gid)
        target.chmod(mode)
        return target

    def look(self) -> HostFacts:
        return look(self.places)

    def entries(self) -> dict[str, DevEntry]:
        return {str(path): entry for path, entry in self.look().entries.items()}


def address(minor: int) -> str:
    return f"0000:{0x18 + minor:02x}:00.0"


def information(minor: int, excluded: str = "No") -> str:
    return INFORMATION.format(address=address(minor), minor=minor, excluded=excluded)


def params(modify: int = 1, uid: int = 0, gid: int = 0, mode: int | str = 0o666) -> str:
    return PARAMS.format(modify=modify, uid=uid, gid=gid, mode=mode)


def host_below(folder: Path) -> HostTree:
    """A host, or a skip where this process may not make device nodes."""
    probe = folder / "probe"
    try:
        os.mknod(probe, stat.S_IFCHR | 0o600, os.makedev(NVIDIA, 0))
    except PermissionError:
        pytest.skip("this process may not make device nodes: it needs root")
    probe.unlink()
    return HostTree(folder / "host")
