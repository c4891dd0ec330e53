"""The CDI device that holds back what the kubelet gave GPUs to until our reply lets it start (docs/guard.md).

Its specification is static, so that a runtime finds the same one whichever version of us wrote it, or none of us runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.cdi.file import SpecFile, SpecFileError
from nri_gpu.cdi.specification import VERSION
from nri_gpu.domain.kubelet import REQUIRED_DESTINATION, REQUIRED_KIND, REQUIRED_NAME, REQUIRED_SOURCE
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.kubelet import FailClosed, KubeletSettings

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
NOT_CONNECTED: Final = "no runtime is connected yet"
TOO_OLD: Final = "the runtime speaks NRI 0.6 or older, where no reply can take a mount away"


class RequiredDevice:
    """Whether Allocate may answer it, and its specification on disk."""

    def __init__(self, settings: KubeletSettings) -> None:
        self._file = SpecFile(Path(settings.cdi_dir) / FILE_NAME)
        self._wanted = settings.fail_closed is FailClosed.AUTO
        self._of_runtime = NOT_CONNECTED
        self._said = ""

    def configured(self, configured: Configured) -> None:
        """What the runtime said of itself."""
        self._of_runtime = "" if configured.from_nri_0_7 else TOO_OLD

    def write(self) -> str:
        """The specification, unless it is there. Returns why that failed; empty when it did not."""
        if not self._wanted:
            return ""
        try:
            self._file.write(SPECIFICATION)
        except SpecFileError as error:
            if str(error) != self._said:
                logger.bind(fault=str(error)).warning("what the kubelet gives starts without us, too")
            self._said = str(error)
            return self._said
        self._said = ""
        return ""

    def name(self) -> str:
        """For an Allocate of now; empty where it would be in the way, or is not wanted."""
        return "" if self.why_not() or self.write() else f"{REQUIRED_KIND}={REQUIRED_NAME}"

    def why_not(self) -> str:
        """Why only the guard stops containers that we never saw; empty when the device does."""
        return self._of_runtime or self._said if self._wanted else 'kubelet.fail_closed = "guard" in the policy'
