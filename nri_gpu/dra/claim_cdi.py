"""The transient CDI specifications of prepared claims: one file a claim, one CDI device for each allocated device.

A device's only edit is its marker, a variable that tells the daemon which device of which claim a container has. The
specification's own edit is the mount that keeps a container from starting without our reply. Its annotation is the id
of the boot in which it was written. The files hold what the daemon signed, so only root reads them: rootless runtimes
have no pods with claims.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgspec
from loguru import logger
from msgspec import Struct

from nri_gpu.cdi.spec_file import READ_MAX, SpecFile
from nri_gpu.cdi.specification import mount_json
from nri_gpu.domain.allocation import CLAIM_KIND, REQUIRED_DESTINATION, REQUIRED_SOURCE, claim_device
from nri_gpu.domain.edits import Mount
from nri_gpu.domain.names import BASE_KEY
from nri_gpu.domain.resource_claim import ClaimUid
from nri_gpu.dra.questions import Prepared
from nri_gpu.system.storage import boot_id, text_of

# Annotations came with 0.6.0, which containerd reads from 1.7.12 on (container-device-interface: specs-go/version.go).
VERSION: Final = "0.6.0"
BOOT_KEY: Final = f"{BASE_KEY}/boot"
FILE_MODE: Final = 0o600
_BEFORE, _AFTER = "nri-gpu-claim-", ".json"
_REQUIRED: Final = mount_json(Mount(REQUIRED_DESTINATION, REQUIRED_SOURCE, ("bind", "ro")))


class _Written(Struct):
    """The part of a specification that is read."""

    annotations: dict[str, str] = {}


class ClaimSpecifications:
    """The specifications of claims in a folder of the runtime's `cdi_spec_dirs`. The claims' UIDs do as names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.restored = 0  # specifications of prepared claims that were missing or changed, and were written again
        self._texts: dict[ClaimUid, str] = {}

    def write(self, uid: ClaimUid, prepared: Prepared, *, new: bool = True) -> tuple[str, ...]:
        """Write a claim's specification. Return the qualified name of each device, in order. Raises: SpecFileError.

        new: the specification need not be there yet.
        """
        names = tuple(claim_device(uid, at) for at in range(len(prepared.markers)))
        devices = [
            {"name": name.removeprefix(f"{CLAIM_KIND}="), "containerEdits": {"env": [f"{variable}={value}"]}}
            for name, (variable, value) in zip(names, prepared.markers, strict=True)
        ]
        document: dict[str, object] = {"cdiVersion": VERSION, "kind": CLAIM_KIND, "devices": devices}
        document["annotations"] = {BOOT_KEY: boot_id()}
        if prepared.required:
            document["containerEdits"] = {"mounts": [_REQUIRED]}
        file, text = self._file(uid), json.dumps(document)
        missing = not new and not file.path.exists()
        file.write(text)
        self._texts[uid] = text
        if missing:
            self._was_lost(file)
        return names

    def restore(self) -> bool:
        """Write files again that somebody removed or changed. Return whether there were any. Raises: SpecFileError."""
        lost = [file for uid, text in self._texts.items() if (file := self._file(uid)).write(text)]
        for file in lost:
            self._was_lost(file)
        return bool(lost)

    def _was_lost(self, file: SpecFile) -> None:
        self.restored += 1
        logger.bind(path=str(file.path)).warning("CDI specification of a prepared claim was missing, written again")

    def remove(self, uid: ClaimUid) -> bool:
        """Remove a claim's specification. Return whether there was one. Raises: SpecFileError."""
        self._texts.pop(uid, None)
        return self._file(uid).remove()

    def outdated(self) -> frozenset[ClaimUid]:
        """Return the claims that have a specification in the folder from before this boot.

        A specification of this boot whose claim the daemon lost stays until the kubelet unprepares the claim: without
        it a container that starts again would be refused by the runtime, which knows no reason, and not by us. A
        specification that names no boot stays too, as earlier versions wrote it.
        """
        kept = {"", boot_id()}
        old = (file for file in self.folder.glob(f"{_BEFORE}*{_AFTER}") if _boot_of(file) not in kept)
        return frozenset(ClaimUid(file.name[len(_BEFORE) : -len(_AFTER)]) for file in old)

    def _file(self, uid: ClaimUid) -> SpecFile:
        return SpecFile(self.folder / file_name(uid), CLAIM_KIND, FILE_MODE)


def file_name(uid: ClaimUid) -> str:
    """Name the specification of a claim."""
    return f"{_BEFORE}{uid}{_AFTER}"


def _boot_of(file: Path) -> str:
    """Return the id of the boot in which a specification was written; empty where it names no boot."""
    try:
        return msgspec.json.decode(text_of(file, READ_MAX) or "", type=_Written).annotations.get(BOOT_KEY, "")
    except (ValueError, RecursionError):
        return ""
