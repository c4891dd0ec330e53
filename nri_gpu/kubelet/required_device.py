"""The required CDI device: keeps a container that the kubelet gave GPUs from starting until our reply undoes it.

docs/guard.md explains it. Its specification never changes, so a runtime finds the same one whichever version of
nri-gpu wrote it, and also when none runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from nri_gpu.cdi.file import SpecFile, SpecFileError
from nri_gpu.cdi.specification import VERSION
from nri_gpu.domain.kubelet import REQUIRED_DESTINATION, REQUIRED_KIND, REQUIRED_NAME, REQUIRED_SOURCE
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.kubelet import FailClosed, KubeletSettings
from nri_gpu.system.log_once import LogOnce

FILE_NAME: Final = "nri-gpu-required.json"
_MOUNT: Final = {
    "hostPath": REQUIRED_SOURCE,
    "containerPath": REQUIRED_DESTINATION,
    "type": "bind",
    "options": ["bind", "ro"],
}
SPECIFICATION: Final = json.dumps(
    {
        "cdiVersion": VERSION,
        "kind": REQUIRED_KIND,
        "devices": [{"name": REQUIRED_NAME, "containerEdits": {"mounts": [_MOUNT]}}],
    }
)
NO_RUNTIME: Final = "no runtime is connected yet"
TOO_OLD: Final = "the runtime speaks NRI 0.6 or older, where a reply cannot remove a mount"


class RequiredDevice:
    """Decides whether Allocate may answer the device, and keeps its specification on disk."""

    def __init__(self, settings: KubeletSettings) -> None:
        self._file = SpecFile(Path(settings.cdi_dir) / FILE_NAME)
        self._wanted = settings.fail_closed is FailClosed.AUTO
        self._runtime_fault = NO_RUNTIME
        self._log = LogOnce()

    def configured(self, configured: Configured) -> None:
        """The runtime told its version."""
        self._runtime_fault = "" if configured.from_nri_0_7 else TOO_OLD

    def write(self) -> None:
        """Write the specification if it is wanted and not there. A failure is logged, and `fault` returns it."""
        if not self._wanted:
            return
        try:
            self._file.write(SPECIFICATION)
        except SpecFileError as error:
            self._log.warning("required CDI device not written, containers can start without nri-gpu", str(error))
        else:
            self._log.clear()

    def name(self) -> str:
        """The device's qualified name for an Allocate now; empty where it must not be answered."""
        if not self.fault():
            self.write()
        return "" if self.fault() else f"{REQUIRED_KIND}={REQUIRED_NAME}"

    def fault(self) -> str:
        """Why the device does not protect containers, so that only the guard stops those we never saw."""
        return self._runtime_fault or self._log.fault if self._wanted else 'kubelet.fail_closed = "guard" in the policy'
