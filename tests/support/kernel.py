"""A daemon that sees the kernel with NVIDIA's modules loaded: the few files in /proc that say so, in a mount namespace.

So a whole node is played at the driver's own boundary: NVML by a fake library, the kernel by these files.
"""

from __future__ import annotations

from typing import Final

from tests.support.daemon import Launch, NriGpu

DEVICES: Final = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
NVRM: Final = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (host)\n"
SCRIPT: Final = 'mount --bind "$1" /proc/devices && mount --bind "$2" /proc/driver && shift 2 && exec "$@"'


class NriGpuOnNvidia(NriGpu):
    """NriGpu beside kernel modules of a version."""

    def __init__(self, launch: Launch, version: str) -> None:
        super().__init__(launch)
        self._devices, self._driver = launch.base / "proc-devices", launch.base / "proc-driver"
        self._devices.write_text(DEVICES)
        (self._driver / "nvidia").mkdir(parents=True)
        (self._driver / "nvidia/version").write_text(NVRM.format(version=version))

    def program(self) -> list[str]:
        places = [str(self._devices), str(self._driver)]
        alone = ["unshare", "--mount", "--propagation", "private"]
        return [*alone, "/bin/sh", "-c", SCRIPT, "sh", *places, *super().program()]
