"""`snapshot.json`: what the daemon last believed of the node, and by what the next one tells that it still holds.

A first line with a mac of the state folder's key over the second, which is JSON: who edits it has it ignored. It is a
head start and never the truth: the kernel's own facts must be the same as then, and NVML is asked at once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.codec import canonical, decode
from nri_gpu.domain.gpu import DriverFiles, Inventory

FILE: Final = "snapshot.json"
SCHEMA: Final = "nri-gpu/snapshot/v1"
BYTES_MAX: Final = 16 << 20
# Device, inode and time of change of a folder, as `driver.watch` has them; None where it is not.
Signs = tuple[tuple[int, int, int] | None, ...]


class SnapshotError(ValueError):
    """A snapshot that cannot be used. Says why, as a clause."""


class Evidence(Struct, frozen=True, kw_only=True):
    """All that has to be the same, or the snapshot is of another node.

    boot_id: of the kernel. program: our own version. module_version: of the kernel module that is loaded.
    module_versions: of nvidia, nvidia-uvm and the others of the driver. settings: where policy says that the driver
    is. host: of the driver's folders on the host. staged: of the folders that containers get. sight: a digest of what
    the kernel shows of GPUs, MIG instances, nodes and majors.
    """

    boot_id: str
    program: str
    module_version: str
    settings: tuple[str, ...]
    host: Signs
    staged: Signs
    sight: str
    module_versions: tuple[str, ...] = ()

    def differences(self, other: Evidence) -> str:
        """In words, empty where there are none."""
        return ", ".join(words for name, words in _WORDS.items() if getattr(self, name) != getattr(other, name))


_WORDS: Final = {
    "boot_id": "the machine was booted",
    "program": "another version of nri-gpu wrote it",
    "module_version": "another kernel module is loaded",
    "module_versions": "another version of one of the kernel modules is loaded",
    "settings": "policy says another place of the driver",
    "host": "the driver's folders changed",
    "staged": "the staged files changed",
    "sight": "the kernel shows other GPUs or nodes",
}


class Snapshot(Struct, frozen=True, kw_only=True):
    """What is kept: all that a grant needs of the node, and the evidence."""

    evidence: Evidence
    inventory: Inventory
    driver: DriverFiles
    schema: str = ""


def sight_of(glance: object) -> str:
    """A digest of a glance."""
    return hashlib.sha256(repr(glance).encode()).hexdigest()


def to_bytes(snapshot: Snapshot, key: bytes) -> bytes:
    """The file's content."""
    body = canonical(replace(snapshot, schema=SCHEMA)).encode()
    return _mac(body, key) + b"\n" + body


def from_bytes(content: bytes, key: bytes) -> Snapshot:
    """The snapshot in a file. Raises: SnapshotError."""
    mac, _, body = content.partition(b"\n")
    if not hmac.compare_digest(mac, _mac(body, key)):
        raise SnapshotError("it was not written by a daemon with this state folder's key, or was changed since")
    try:
        found = decode(Snapshot, json.loads(body))
    except (ValueError, TypeError, RecursionError) as error:  # CodecError is a ValueError
        raise SnapshotError(f"it cannot be read: {error}") from error
    if found.schema != SCHEMA:
        raise SnapshotError(f"its schema is {found.schema!r}, not {SCHEMA!r}")
    return found


def read(folder: Path, key: bytes) -> Snapshot | None:
    """The last one; None where there is none. Raises: SnapshotError."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(f"it cannot be read: {error.strerror}") from error
    if len(content) > BYTES_MAX:
        raise SnapshotError(f"it is larger than {BYTES_MAX} bytes")
    return from_bytes(content, key)


def _mac(body: bytes, key: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode()
