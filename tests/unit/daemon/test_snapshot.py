"""Snapshots: read back whole or not at all, and used only where nothing changed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.snapshot import (
    BYTES_MAX,
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
from nri_gpu.domain.node import Inventory
from nri_gpu.driver.scan import folder_signatures, scan
from nri_gpu.driver.stage import stage
from nri_gpu.simulation.topology import load_topology
from nri_gpu.system.state import NodeState
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


def kept(folder: Path, content: bytes) -> Path:
    (folder / SNAPSHOT_FILE).write_bytes(content)
    return folder


def test_it_comes_back(tmp_path: Path) -> None:
    found = read_snapshot(kept(tmp_path, to_bytes(SNAPSHOT, KEY)), KEY)
    assert found
    assert (found.inventory, found.driver, found.evidence) == (SNAPSHOT.inventory, DRIVER, EVIDENCE)
    assert to_bytes(found, KEY) == to_bytes(SNAPSHOT, KEY)


def test_none_is_no_error(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path, KEY) is None


def signed(body: str) -> bytes:
    """As a daemon of another version might write it."""
    import hashlib
    import hmac

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
    "a schema of tomorrow": (signed(json.dumps(BODY | {"schema": "nri-gpu/snapshot/v2"})), "its schema is"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_used_says_why(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(SnapshotError, match=words.replace("[", r"\[")):
        read_snapshot(kept(tmp_path, content), KEY)


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / SNAPSHOT_FILE).mkdir()
    with pytest.raises(SnapshotError, match="Is a directory"):
        read_snapshot(tmp_path, KEY)


def test_differences_are_named() -> None:
    assert EVIDENCE.differences(EVIDENCE) == ""
    other = replace(
        EVIDENCE, boot_id="c", module_version="590.1", sight="", host=(), staged=(), settings=(), program="1"
    )
    assert EVIDENCE.differences(other) == (
        "the machine was booted, another version of nri-gpu wrote it, another kernel module is loaded, "
        "the policy names another place for the driver, the driver's folders changed, the staged files changed, "
        "the kernel shows other GPUs or nodes"
    )


VERSION = "580.95.05"


class Machine:
    """A node with its driver staged, and a controller for each daemon that runs on it, one after another."""

    def __init__(self, base: Path) -> None:
        self.root, self.stage_dir = base / "root", base / "stage"
        make_driver_root(self.root, VERSION)
        self.state = base / "state"
        self.state.mkdir()
        self.files = stage(scan(self.root), self.stage_dir)
        self.scanned = folder_signatures(self.root)
        self.inventory = load_topology(FOUR_GPUS, wall=lambda: 1.0)
        self.module, self.boot = VERSION, "boot"
        self.modules = {"nvidia": VERSION, "nvidia_uvm": VERSION, "nvidia_modeset": VERSION}
        self.sight: Hashable = "four"
        self.answered: Hashable = "four"
        self.library_dirs: tuple[str, ...] = ()
        self.node_state = NodeState(Inventory(taken_at=0, fault="starting"))

    def put(self) -> None:
        self.node_state.put_module(VERSION)
        self.node_state.put_inventory(self.inventory)
        self.node_state.put_driver(self.files)

    def controller(self) -> SnapshotController:
        host = EvidenceSource(
            driver_root=self.root,
            library_dirs=self.library_dirs,
            stage_dir=self.stage_dir,
            look=lambda: self.sight,
            answered=lambda: self.answered,
            scanned=lambda: self.scanned,
            module=lambda: self.module,
            modules=lambda: self.modules,
            boot_id=lambda: self.boot,
        )
        return SnapshotController(self.state, KEY, host, self.node_state)

    def keep(self) -> None:
        self.put()
        asyncio.run(self.controller().keep())

    def recalled(self) -> Snapshot | None:
        return self.controller().recall()

    @property
    def file(self) -> Path:
        return self.state / SNAPSHOT_FILE

    def library(self) -> Path:
        """A staged one; it is a hard link to the host's."""
        tree = next(iter(self.files.trees.values()))
        return Path(tree.path, tree.libraries[0][0])

    def host_library(self) -> Path:
        return next(self.root.rglob("libcuda.so.*"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_next_daemon_has_it(machine: Machine) -> None:
    assert machine.recalled() is None
    machine.keep()
    found = machine.recalled()
    assert found
    assert (found.inventory, found.driver) == (machine.inventory, machine.files)
    assert machine.file.stat().st_mode & 0o777 == 0o600


def _write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"evil")
    os.utime(path, ns=(1, 1))  # the clock of a file system is coarse


CHANGES: dict[str, Callable[[Machine], object]] = {
    "the machine was booted": lambda it: setattr(it, "boot", "another"),
    "another kernel module is loaded": lambda it: setattr(it, "module", "590.10"),
    "another version of one of the kernel modules is loaded": lambda it: setattr(
        it, "modules", {"nvidia": VERSION, "nvidia_uvm": "590.10"}
    ),
    "the policy names another place for the driver": lambda it: setattr(it, "library_dirs", ("/opt/lib",)),
    "the kernel shows other GPUs or nodes": lambda it: setattr(it, "sight", "three"),
    "the driver's folders changed": lambda it: it.host_library().with_name("libnew.so").touch(),
    "the staged files changed": lambda it: _write_into(it.library()),
}


@pytest.mark.parametrize(("why", "change"), CHANGES.items(), ids=CHANGES)
def test_a_change_takes_it_away(machine: Machine, log: Log, why: str, change: Callable[[Machine], object]) -> None:
    machine.keep()
    change(machine)
    assert machine.recalled() is None
    assert why in log.one("the last snapshot does not hold").fields["fault"]


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


def test_one_from_before_it_kept_module_versions_is_not_believed(machine: Machine, log: Log) -> None:
    machine.keep()
    found = from_bytes(machine.file.read_bytes(), KEY)
    older = replace(found, evidence=replace(found.evidence, module_versions=()))
    machine.file.write_bytes(to_bytes(older, KEY))
    assert machine.recalled() is None
    assert "one of the kernel modules" in log.one("the last snapshot does not hold").fields["fault"]


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


def test_a_folder_that_cannot_be_written_is_logged_once(machine: Machine, log: Log) -> None:
    machine.put()
    machine.state.rmdir()
    controller = machine.controller()

    async def twice() -> None:
        await controller.keep()
        await controller.keep()

    asyncio.run(twice())
    assert len(log.said("snapshot not written; a restart will wait for the driver")) == 1
