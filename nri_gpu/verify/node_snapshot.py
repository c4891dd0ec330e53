"""`snapshot.json`: the last state of the node, and the evidence by which the next daemon sees that it still holds.

Its first line is a MAC with the state folder's key over the second, which is JSON: an edited file is ignored. It only
makes a start faster: what the kernel shows must be the same as then, and NVML is asked at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu import __version__
from nri_gpu.domain.errors import cause_of
from nri_gpu.domain.node import CompatPackage, DriverFiles, Inventory
from nri_gpu.domain.value import Recorded, canonical, decode
from nri_gpu.driver.driver_scan import Signatures, folder_signatures
from nri_gpu.driver.stage import staged_evidence
from nri_gpu.host.modules import module_version, module_versions
from nri_gpu.inventory.inventory_controller import InventoryCache
from nri_gpu.system.state import NodeState
from nri_gpu.system.storage import boot_id, read_bytes, write_whole
from nri_gpu.system.tasks import LogOnce, set_within

SNAPSHOT_FILE: Final = "snapshot.json"
SCHEMA: Final = "nri-gpu/snapshot/v2"  # from which on `taken_at` counts from the boot
BYTES_MAX: Final = 16 << 20


class SnapshotError(ValueError):
    """A fault for which a snapshot cannot be used. Says why, as a clause."""


class Evidence(Recorded, frozen=True, kw_only=True):
    """The state that has to be unchanged for the snapshot to hold."""

    boot_id: str  # of the kernel
    program: str  # our own version
    module_version: str  # of the kernel module that is loaded
    settings: tuple[str, ...]  # where the policy says the driver is
    host: Signatures  # of the driver's folders on the host
    staged: Signatures  # of the folders that containers get
    sight: str  # a digest of what the kernel shows of GPUs, MIG instances, nodes and majors
    module_versions: tuple[str, ...] = ()  # name and version of each loaded module of the driver

    def differences(self, other: Evidence) -> str:
        """Return what differs, for the log, or empty."""
        return ", ".join(text for name, text in _DIFFERENCES.items() if getattr(self, name) != getattr(other, name))


_DIFFERENCES: Final = {
    "boot_id": "the machine was booted",
    "program": "another version of nri-gpu wrote it",
    "module_version": "another kernel module is loaded",
    "module_versions": "another version of one of the kernel modules is loaded",
    "settings": "the policy names another folder for the driver or its compatibility packages",
    "host": "the driver's folders changed",
    "staged": "the staged files changed",
    "sight": "the kernel shows other GPUs or nodes",
}


class Snapshot(Recorded, frozen=True, kw_only=True):
    """The content of the file: what a grant needs of the node, and the evidence."""

    evidence: Evidence
    inventory: Inventory
    driver: DriverFiles
    compat: tuple[CompatPackage, ...] = ()
    schema: str = ""


def sight_of(glance: object) -> str:
    """Return a digest of what the kernel shows."""
    return hashlib.sha256(repr(glance).encode()).hexdigest()


def to_bytes(snapshot: Snapshot, key: bytes) -> bytes:
    body = canonical(replace(snapshot, schema=SCHEMA)).encode()
    return _mac(body, key) + b"\n" + body


def from_bytes(content: bytes, key: bytes) -> Snapshot:
    """Return the snapshot in a file. Raises: SnapshotError."""
    mac, _, body = content.partition(b"\n")
    if not hmac.compare_digest(mac, _mac(body, key)):
        raise SnapshotError("it was not written by a daemon with this state folder's key, or was changed since")
    try:
        found = decode(Snapshot, json.loads(body))
    except (ValueError, TypeError, RecursionError) as error:
        raise SnapshotError(f"it cannot be read: {error}") from error
    if found.schema != SCHEMA:
        raise SnapshotError(f"its schema is {found.schema!r}, not {SCHEMA!r}")
    return found


def read_snapshot(folder: Path, key: bytes) -> Snapshot | None:
    """Return the last snapshot, or None if there is none. Raises: SnapshotError."""
    path = folder / SNAPSHOT_FILE
    try:
        content = read_bytes(path, BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(f"it cannot be read: {cause_of(error)}") from error
    if len(content) > BYTES_MAX:
        raise SnapshotError(f"it is larger than {BYTES_MAX} bytes")
    return from_bytes(content, key)


def _mac(body: bytes, key: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode()


LOOK_S: Final = 5.0  # between two comparisons of values in memory, for what is no change of the node state
BURST_S: Final = 1.0  # after a change, for those that come with it


class EvidenceSource(Struct, frozen=True, kw_only=True):
    """The sources of the evidence."""

    driver_root: Path
    library_dirs: tuple[str, ...]
    stage_dir: Path
    compat_dir: str = ""
    look: Callable[[], Hashable]  # a glance at what the kernel shows
    # The glance from before the node state's inventory was asked for, or None before the first answer: what changed
    # since then must not count as seen.
    answered: Callable[[], Hashable]
    # The driver's folders from before the scan whose files are in the node state, or None before the first scan.
    scanned: Callable[[], Signatures | None]
    module: Callable[[], str] = module_version
    modules: Callable[[], Mapping[str, str]] = module_versions
    boot_id: Callable[[], str] = boot_id


class SnapshotController:
    """A controller that writes the snapshot after each change, and reads it once. folder: the state folder.

    A simulated node has no snapshot: its file is read in a millisecond.
    """

    def __init__(self, folder: Path, key: bytes, host: EvidenceSource, node_state: NodeState) -> None:
        self._folder = folder
        self._key = key
        self._host = host
        self._node_state = node_state
        self._written: object = None
        self.changed = asyncio.Event()
        self._faults = LogOnce()

    def restore(self, cache: InventoryCache, with_health: Callable[[Inventory], Inventory]) -> bool:
        """Use the last snapshot until the driver answers. Return whether there is one that holds.

        with_health: adds what is known of the GPUs' health since it was written.
        """
        last = self.recall()
        if last is None:
            return False
        inventory = with_health(last.inventory)
        cache.recall(inventory)
        self._node_state.put_module(last.evidence.module_version)
        self._node_state.put_compat(last.compat)
        self._node_state.put_driver(last.driver)
        self._node_state.put_inventory(inventory)
        bound = logger.bind(gpus=len(inventory.gpus), driver_version=last.driver.version)
        bound.bind(inventory_age_s=cache.age_s()).info("serving the last snapshot until the driver answers")
        return True

    def recall(self) -> Snapshot | None:
        """Return the last snapshot if everything that is visible without the driver is as it was, else None."""
        try:
            last = read_snapshot(self._folder, self._key)
        except SnapshotError as error:
            logger.bind(path=str(self._folder / SNAPSHOT_FILE), fault=str(error)).warning("snapshot ignored")
            return None
        if last is None:
            return None
        version = self._host.module()
        # The libraries must be of the module's version, whatever was written.
        if not version == last.driver.version == last.inventory.driver_version:
            version = ""
        found = folder_signatures(self._host.driver_root, self._host.library_dirs)
        now = self._evidence(version, last.driver, last.compat, found, self._host.look())
        # A boot id that cannot be read equals no other.
        if differences := last.evidence.differences(replace(now, boot_id=now.boot_id or "unknown")):
            logger.bind(fault=differences).info("last snapshot does not match the node")
            return None
        return last

    async def run(self) -> None:
        while True:
            await self.keep()
            if await set_within(self.changed, LOOK_S):
                await asyncio.sleep(BURST_S)
                self.changed.clear()

    async def keep(self) -> None:
        """Write the snapshot if something changed since it was written."""
        node, sight, scanned = self._node_state.node, self._host.answered(), self._host.scanned()
        if node.inventory.fault or node.driver is None or not node.module_version or sight is None or scanned is None:
            return  # the node cannot grant, so there is nothing to keep
        now = (node.inventory, node.driver, node.compat, node.module_version, sight, scanned)
        if now == self._written:
            return
        with self._faults.guard("snapshot not written; a restart will wait for the driver"):
            await asyncio.to_thread(self._write, *now)
            self._written = now

    def _write(
        self,
        inventory: Inventory,
        driver: DriverFiles,
        compat: tuple[CompatPackage, ...],
        version: str,
        sight: Hashable,
        scanned: Signatures,
    ) -> None:
        evidence = self._evidence(version, driver, compat, scanned, sight)
        snapshot = Snapshot(evidence=evidence, inventory=inventory, driver=driver, compat=compat)
        write_whole(self._folder / SNAPSHOT_FILE, to_bytes(snapshot, self._key))

    def _evidence(
        self, version: str, driver: DriverFiles, compat: tuple[CompatPackage, ...], host: Signatures, sight: Hashable
    ) -> Evidence:
        return Evidence(
            boot_id=self._host.boot_id(),
            program=__version__,
            module_version=version,
            settings=(
                *(str(self._host.driver_root), str(self._host.stage_dir), self._host.compat_dir),
                *self._host.library_dirs,
            ),
            host=host,
            staged=staged_evidence(driver, compat),
            sight=sight_of(sight),
            module_versions=tuple(map(" ".join, self._host.modules().items())),
        )
