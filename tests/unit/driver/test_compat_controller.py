"""Compatibility packages in the node state follow the disk, and staged ones stay while a container has them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from nri_gpu.domain.node import Inventory, Node
from nri_gpu.driver import compat as compat_module
from nri_gpu.driver.controller import DriverController
from nri_gpu.policy.model import CompatSettings, DriverSettings, Policy
from nri_gpu.system.state import NodeState
from tests.support import compat
from tests.support.driver_root import make_driver_root

V = "580.95.05"


class Bench:
    """A simulated node with a driver and a folder of packages."""

    def __init__(self, base: Path) -> None:
        self.packages, self.stage_dir = base / "packages", base / "stage"
        self.held: frozenset[str] = frozenset()
        self.node_state = NodeState(Inventory(taken_at=1, driver_version=V, simulated=True), "looking")
        root = make_driver_root(base / "root", V)
        self.controller = DriverController(
            Policy(
                driver=DriverSettings(root=str(root), stage_dir=str(self.stage_dir)),
                compat=CompatSettings(dir=str(self.packages)),
            ),
            base / "state",
            self.node_state,
            simulated=True,
            held=lambda: self.held,
            module_changed=lambda: None,
        )

    def look(self) -> Node:
        asyncio.run(self.controller.look())
        return self.node_state.node

    def cudas(self) -> list[str]:
        return [package.cuda_version for package in self.look().compat]

    def staged(self) -> set[str]:
        return {path.name for path in self.stage_dir.glob("compat*")}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    compat.make_package(bench.packages, "14.0", "600.10.01", compat.note("14.0", (580,)))
    return bench


def test_what_is_there_is_staged_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    node = bench.look()
    (package,) = node.compat
    assert (package.cuda, package.drivers) == ((14, 0), frozenset({580}))
    assert Path(package.path).parent == bench.stage_dir
    assert (Path(package.path) / "libcuda.so.1").resolve().name == "libcuda.so.600.10.01"

    def scanned(_: Path) -> None:
        raise AssertionError("scanned")

    monkeypatch.setattr(compat_module, "scan_compat", scanned)
    assert bench.look() is node


def test_changes_are_taken_up_by_a_look(bench: Bench) -> None:
    assert bench.cudas() == ["14.0"]
    shutil.copytree(bench.packages / "14.0", bench.packages / "14.1", symlinks=True)
    assert bench.cudas() == ["14.0"]  # its note is of another version
    compat.make_package(bench.packages, "13.2", "595.10.01", compat.note("13.2", (580,)))
    assert bench.cudas() == ["13.2", "14.0"]
    shutil.rmtree(bench.packages / "14.0")
    assert bench.cudas() == ["13.2"]
    shutil.rmtree(bench.packages)
    assert bench.cudas() == []


def test_a_package_stays_as_long_as_a_container_has_it(bench: Bench) -> None:
    (package,) = bench.look().compat
    bench.held = frozenset({package.generation})
    shutil.rmtree(bench.packages / "14.0")
    assert bench.cudas() == []
    assert bench.staged() == {package.generation}
    bench.held = frozenset()
    bench.look()
    assert bench.staged() == set()


def test_a_folder_that_others_can_change_gives_nothing_until_it_is_mended(bench: Bench) -> None:
    bench.packages.chmod(0o777)
    assert bench.cudas() == []
    bench.packages.chmod(0o755)
    assert bench.cudas() == ["14.0"]


def test_what_could_not_be_staged_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(compat_module, "stage_plan", full)
        assert bench.cudas() == []
    assert bench.cudas() == ["14.0"]
