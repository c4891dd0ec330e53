"""A head start is had when nothing changed, and only then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.snapshot import SNAPSHOT_FILE, EvidenceSource, Snapshot, SnapshotController, from_bytes, to_bytes
from nri_gpu.domain.node import Inventory
from nri_gpu.driver.scan import folder_signatures, scan
from nri_gpu.driver.stage import stage
from nri_gpu.simulation.topology import load_topology
from nri_gpu.system.state import NodeState
from tests.support.daemon import FOUR_GPUS
from tests.support.driver_root import make_driver_root
from tests.support.log import Log

VERSION = "580.95.05"
KEY = bytes(32)


class Machine:
    """A node with its driver staged, and a keeper for each daemon that runs on it, one after another."""

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

    def keeper(self, key: bytes = KEY) -> SnapshotController:
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
        return SnapshotController(self.state, key, host, self.node_state)

    def keep(self) -> None:
        self.put()
        asyncio.run(self.keeper().keep())

    def recalled(self) -> Snapshot | None:
        return self.keeper().recall()

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


def test_another_nri_gpu_starts_without_it(machine: Machine, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.keep()
    monkeypatch.setattr("nri_gpu.daemon.snapshot.__version__", "9.9.9")
    assert machine.recalled() is None
    said = log.one("the last snapshot does not hold").fields["fault"]
    assert said == "another version of nri-gpu wrote it"


def test_one_from_before_it_kept_module_versions_is_not_believed(machine: Machine, log: Log) -> None:
    machine.keep()
    found = from_bytes(machine.file.read_bytes(), KEY)
    older = replace(found, evidence=replace(found.evidence, module_versions=()))
    machine.file.write_bytes(to_bytes(older, KEY))
    assert machine.recalled() is None
    assert "one of the kernel modules" in log.one("the last snapshot does not hold").fields["fault"]


def test_without_a_boot_id_no_snapshot_holds(machine: Machine) -> None:
    machine.boot = ""
    machine.keep()
    assert machine.recalled() is None


def test_without_a_module_there_is_nothing_to_serve(machine: Machine) -> None:
    machine.keep()
    machine.module = ""
    assert machine.recalled() is None


def test_files_and_module_must_be_one_driver_whatever_is_written(machine: Machine) -> None:
    machine.inventory = replace(machine.inventory, driver_version="570.26")
    machine.keep()
    assert machine.recalled() is None


def test_a_file_that_was_edited_is_ignored_with_a_line(machine: Machine, log: Log) -> None:
    machine.keep()
    machine.file.write_bytes(machine.file.read_bytes().replace(b"GPU-", b"GPU+"))
    assert machine.recalled() is None
    assert "was changed since" in log.one("snapshot ignored").fields["fault"]


def test_it_is_written_when_something_changed_and_not_before_the_driver_answered(machine: Machine) -> None:
    keeper = machine.keeper()
    machine.answered = None
    machine.put()
    asyncio.run(keeper.keep())
    assert not machine.file.exists()  # what was recalled is not written down as confirmed
    machine.answered = "four"
    asyncio.run(keeper.keep())
    first = machine.file.stat().st_ino
    asyncio.run(keeper.keep())
    assert machine.file.stat().st_ino == first
    machine.node_state.put_inventory(replace(machine.inventory, taken_at=2.0, gpus=()))
    asyncio.run(keeper.keep())
    assert machine.file.stat().st_ino != first


def test_what_changed_after_the_question_is_not_taken_for_seen(machine: Machine) -> None:
    machine.sight = "five"  # while NVML was asked, or since
    machine.keep()
    assert machine.recalled() is None


def test_a_folder_that_cannot_be_written_is_logged_once(machine: Machine, log: Log) -> None:
    machine.put()
    machine.state.rmdir()
    keeper = machine.keeper()

    async def twice() -> None:
        await keeper.keep()
        await keeper.keep()

    asyncio.run(twice())
    assert len(log.said("snapshot not written; a restart will wait for the driver")) == 1
