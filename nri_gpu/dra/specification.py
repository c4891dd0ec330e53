"""The transient CDI specifications of prepared claims: one file a claim, one CDI device for each allocated device.

A device's only edit is its marker, a variable that tells the daemon which device of which claim a container has. The
specification's own edit is the mount that keeps a container from starting without our reply. The files hold what the
daemon signed, so only root reads them: rootless runtimes have no pods with claims.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

from nri_gpu.cdi.file import SpecFile
from nri_gpu.cdi.specification import VERSION, mount_json
from nri_gpu.domain.edits import Mount
from nri_gpu.domain.kubelet import REQUIRED_DESTINATION, REQUIRED_SOURCE
from nri_gpu.domain.names import BASE_KEY
from nri_gpu.domain.resource_claim import ClaimUid
from nri_gpu.dra.messages import Prepared
from nri_gpu.system.storage import signature

KIND: Final = f"{BASE_KEY}/claim"  # whatever name the driver has: devices of vendors below nvidia.com are left alone
FILE_MODE: Final = 0o600
_BEFORE, _AFTER = "nri-gpu-claim-", ".json"
_REQUIRED: Final = mount_json(Mount(REQUIRED_DESTINATION, REQUIRED_SOURCE, ("bind", "ro")))


class ClaimSpecifications:
    """Those in one folder, which is one of the runtime's `cdi_spec_dirs`. Their UIDs do as names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, uid: ClaimUid, prepared: Prepared) -> tuple[str, ...]:
        """Write that of a claim. Returns the qualified name of each device, in order. Raises: SpecFileError."""
        names = [f"{uid}-{at}" for at in range(len(prepared.markers))]
        devices = [
            {"name": name, "containerEdits": {"env": [f"{variable}={value}"]}}
            for name, (variable, value) in zip(names, prepared.markers, strict=True)
        ]
        document: dict[str, object] = {"cdiVersion": VERSION, "kind": KIND, "devices": devices}
        if prepared.required:
            document["containerEdits"] = {"mounts": [_REQUIRED]}
        self._file(uid).write(json.dumps(document))
        return tuple(f"{KIND}={name}" for name in names)

    def remove(self, uid: ClaimUid) -> bool:
        """Remove that of a claim. Returns whether there was one. Raises: SpecFileError."""
        return self._file(uid).remove()

    def outdated(self) -> frozenset[ClaimUid]:
        """The claims that have one in the folder from before this boot.

        A younger one whose claim the daemon lost stays until the kubelet unprepares that: without it a container that
        starts again would be refused by the runtime, which knows no reason, and not by us.
        """
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        files = self._folder.glob(f"{_BEFORE}*{_AFTER}")
        old = (file for file in files if (found := signature(file)) and found[2] < booted * 1e9)
        return frozenset(ClaimUid(file.name[len(_BEFORE) : -len(_AFTER)]) for file in old)

    def _file(self, uid: ClaimUid) -> SpecFile:
        return SpecFile(self._folder / f"{_BEFORE}{uid}{_AFTER}", KIND, FILE_MODE)
