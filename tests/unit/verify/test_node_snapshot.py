"""Snapshots: read back whole or not at all, and used only where nothing changed."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.node import CompatPackage, Inventory
from nri_gpu.driver.driver_scan import folder_signatures, scan
from nri_gpu.driver.stage import stage
from nri_gpu.inventory.inventory_controller import InventoryCache
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.inventory.topology_source import TopologySource
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import cancelled
from nri_gpu.verify.node_snapshot import (
    BURST_S,
    BYTES_MAX,
    LOOK_S,
    SNAPSHOT_FILE,
    Evidence,
    EvidenceSource,
    Snapshot,
    SnapshotController,
    SnapshotError,
    from_bytes,
    read_snapshot,
    sight_of,
    to_bytes,
)
from tests.support.daemon import FOUR_GPUS
from tests.support.driver_root import make_driver_root
from tests.support.log import Log
from tests.support.plugin import KEY, node

EVIDENCE = Evidence(
    boot_id="b",
    program="0.1",
    module_version="580.95.05",
    settings=("/",),
    host=((1, 2, 3), None),
    staged=((4, 5, 6),),
    sight=sight_of("x"),
    module_versions=("580.95.05", "580.95.05", "", ""),
)
DRIVER = node().driver
assert DRIVER
SNAPSHOT = Snapshot(evidence=EVIDENCE, inventory=node().inventory, driver=DRIVER)


def signed(body: str) -> bytes:
    """As a daemon of another version might write it."""
    return hmac.new(KEY, body.encode(), hashlib.sha256).hexdigest().encode() + b"\n" + body.encode()


WHOLE = to_bytes(SNAPSHOT, KEY)
BODY = json.loads(WHOLE.partition(b"\n")[2])
BAD = {
    "edited": (WHOLE.replace(b"H100", b"H200").replace(b"A100", b"A200"), "was changed since"),
    "half": (WHOLE[: len(WHOLE) // 2], "was changed since"),
    "empty": (b"", "not written by a daemon with this state folder's key"),
    "of another key": (to_bytes(SNAPSHOT, bytes(32)), "not written by a daemon with this"),
    "too large": (b"x" * (BYTES_MAX + 1), "is larger than"),
    "no JSON": (signed("{"), "it cannot be read"),
    "nested": (signed("[" * 100_000), "it cannot be read"),
    "another shape": (signed("[]"), "it cannot be read: Expected `object`, got `array`"),
    "a field of tomorrow": (signed(json.dumps(BODY | {"more": 1})), "unknown field `more`"),
    "a schema of tomorrow": (signed(json.dumps(BODY | {"schema": "nri-gpu/snapshot/v3"})), "its schema is"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_used_says_why(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / SNAPSHOT_FILE).write_bytes(content)
    with pytest.raises(SnapshotError, match=re.escape(words)):
        read_snapshot(tmp_path, KEY)


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / SNAPSHOT_FILE).mkdir()
    with pytest.raises(SnapshotError, match="it is a folder"):
        read_snapshot(tmp_path, KEY)


VERSION = "580.95.05"


class Machine:
    """A node with its driver staged, and a controller for each daemon that runs on it, one after another."""

    def __init__(self, base: Path) -> None:
        self.root, self.stage_dir, self.state = base / "root", base / "stage", base / "state"
        make_driver_root(self.root, VERSION)
        self.state.mkdir()
        self.file = self.state / SNAPSHOT_FILE
        self.files = stage(scan(self.root), self.stage_dir)
        self.scanned = folder_signatures(self.root)
        self.inventory = load_topology(FOUR_GPUS, boot_clock=lambda: 1.0)
        self.module, self.boot = VERSION, "boot"
        self.modules = {"nvidia": VERSION, "nvidia_uvm": VERSION, "nvidia_modeset": VERSION}
        self.sight: Hashable = "four"
        self.answered: Hashable = "four"
        self.library_dirs: tuple[str, ...] = ()
        self.compat_dir = "/opt/compat"
        staged = self.stage_dir / "compat13.0"
        staged.mkdir()
        (staged / "libcuda.so").touch()
        drivers = frozenset({570})
        self.compat = CompatPackage(
            cuda=(13, 0), version="580.65.06", drivers=drivers, generation="compat13.0", path=str(staged)
        )
        self.node_state = NodeState(Inventory(taken_at=0, fault="starting"))

    def put(self) -> None:
        self.node_state.put_module(VERSION)
        self.node_state.put_inventory(self.inventory)
        self.node_state.put_driver(self.files)
        self.node_state.put_compat((self.compat,))

    def controller(self, state: NodeState | None = None) -> SnapshotController:
        host = EvidenceSource(
            driver_root=self.root,
            library_dirs=self.library_dirs,
            stage_dir=self.stage_dir,
            compat_dir=self.compat_dir,
            look=lambda: self.sight,
            answered=lambda: self.answered,
            scanned=lambda: self.scanned,
            module=lambda: self.module,
            modules=lambda: self.modules,
            boot_id=lambda: self.boot,
        )
        return SnapshotController(self.state, KEY, host, state or self.node_state)

    def keep(self) -> None:
        self.put()
        asyncio.run(self.controller().keep())

    def recalled(self) -> Snapshot | None:
        return self.controller().recall()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def as_it_is(inventory: Inventory) -> Inventory:
    return inventory


def test_the_next_daemon_serves_it_until_the_driver_answers(machine: Machine, log: Log) -> None:
    state = NodeState(Inventory(taken_at=0, fault="starting"))
    cache = InventoryCache(TopologySource(FOUR_GPUS), state.put_inventory, lambda _: None)
    assert not machine.controller(state).restore(cache, as_it_is)
    machine.keep()
    assert machine.file.stat().st_mode & 0o777 == 0o600
    assert machine.controller(state).restore(cache, as_it_is)
    assert (state.node.inventory, state.node.driver) == (machine.inventory, machine.files)
    assert state.node.compat == (machine.compat,)  # or an image of a newer CUDA would be granted none
    assert state.node.module_version == VERSION
    assert not cache.confirmed
    assert log.one("serving the last snapshot until the driver answers").fields["gpus"] == 4


@pytest.mark.parametrize("step_s", [-86400, 86400])
def test_its_age_is_what_it_was_when_the_time_of_day_is_set(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    machine.inventory = load_topology(FOUR_GPUS)
    machine.keep()
    there = time.time() + step_s
    monkeypatch.setattr(time, "time", lambda: there)
    cache = InventoryCache(TopologySource(FOUR_GPUS), lambda _: None, lambda _: None)
    assert machine.controller().restore(cache, as_it_is)
    assert 0 < (cache.age_s() or 0) < 60


def change_a_staged_file(it: Machine) -> None:
    tree = next(iter(it.files.trees.values()))
    library = Path(tree.path, tree.libraries[0][0])  # a hard link to the host's
    with library.open("r+b") as file:
        file.write(b"evil")
    os.utime(library, ns=(1, 1))  # the clock of a file system is coarse


def kept_by(it: Machine, **evidence: object) -> None:
    """Another version of nri-gpu kept it, with this evidence."""
    found = from_bytes(it.file.read_bytes(), KEY)
    it.file.write_bytes(to_bytes(replace(found, evidence=replace(found.evidence, **evidence)), KEY))


def change_a_staged_package(it: Machine) -> None:
    Path(it.compat.path, "libcuda.so").write_bytes(b"evil")


CHANGES: dict[str, Callable[[Machine], object]] = {
    "the machine was booted": lambda it: setattr(it, "boot", "another"),
    "another kernel module is loaded": lambda it: setattr(it, "module", "590.10"),
    "another version of one of the kernel modules is loaded": lambda it: setattr(
        it, "modules", {"nvidia": VERSION, "nvidia_uvm": "590.10"}
    ),
    "the policy names another folder for the driver": lambda it: setattr(it, "library_dirs", ("/opt/lib",)),
    "the kernel shows other GPUs or nodes": lambda it: setattr(it, "sight", "three"),
    "the driver's folders changed": lambda it: next(it.root.rglob("libcuda.so.*")).with_name("libnew.so").touch(),
    "the staged files changed": change_a_staged_file,
    "staged files changed": change_a_staged_package,
    "or its compatibility packages": lambda it: setattr(it, "compat_dir", ""),
    "another version of nri-gpu wrote it": lambda it: kept_by(it, program="1"),
    "one of the kernel modules": lambda it: kept_by(it, module_versions=()),  # as before it kept them
}


@pytest.mark.parametrize(("why", "change"), CHANGES.items(), ids=CHANGES)
def test_a_change_takes_it_away(machine: Machine, log: Log, why: str, change: Callable[[Machine], object]) -> None:
    machine.keep()
    change(machine)
    assert machine.recalled() is None
    assert why in log.one("last snapshot does not match the node").fields["fault"]


UNUSABLE: dict[str, Callable[[Machine], object]] = {
    "the boot id cannot be read": lambda it: setattr(it, "boot", ""),
    "no module is loaded": lambda it: setattr(it, "module", ""),
    "files and module are two drivers": lambda it: setattr(
        it, "inventory", replace(it.inventory, driver_version="570.26")
    ),
    "the kernel showed something else since NVML was asked": lambda it: setattr(it, "sight", "five"),
}


@pytest.mark.parametrize("change", UNUSABLE.values(), ids=UNUSABLE)
def test_never_used_whatever_is_written(machine: Machine, change: Callable[[Machine], object]) -> None:
    change(machine)
    machine.keep()
    assert machine.recalled() is None


def test_a_file_that_was_edited_is_ignored_with_a_line(machine: Machine, log: Log) -> None:
    machine.keep()
    machine.file.write_bytes(machine.file.read_bytes().replace(b"GPU-", b"GPU+"))
    assert machine.recalled() is None
    assert "was changed since" in log.one("snapshot ignored").fields["fault"]


def test_it_is_written_when_something_changed_and_not_before_the_driver_answered(machine: Machine) -> None:
    controller = machine.controller()
    machine.answered = None
    machine.put()
    asyncio.run(controller.keep())
    assert not machine.file.exists()  # what was recalled is not written down as confirmed
    machine.answered = "four"
    asyncio.run(controller.keep())
    first = machine.file.stat().st_ino
    asyncio.run(controller.keep())
    assert machine.file.stat().st_ino == first
    machine.node_state.put_inventory(replace(machine.inventory, taken_at=2.0, gpus=()))
    asyncio.run(controller.keep())
    assert machine.file.stat().st_ino != first


async def test_it_is_written_soon_after_a_change(machine: Machine) -> None:
    """Not by the look, which comes later."""
    controller = machine.controller()
    machine.node_state.then(controller.changed.set, Changed.NODE)
    keeping = asyncio.create_task(controller.run())
    await asyncio.sleep(0)
    machine.put()
    async with asyncio.timeout((BURST_S + LOOK_S) / 2):
        while not machine.file.exists():  # noqa: ASYNC110 - a file tells nothing
            await asyncio.sleep(0.1)
    await cancelled([keeping])


def test_a_folder_that_cannot_be_written_is_logged_once(machine: Machine, log: Log) -> None:
    machine.put()
    machine.state.rmdir()
    controller = machine.controller()
    for _ in range(2):
        asyncio.run(controller.keep())
    assert len(log.said("snapshot not written; a restart will wait for the driver")) == 1
