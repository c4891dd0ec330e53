"""Which staged drivers `cdi generate` removes, and which it never does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.cdi.file import SpecFile
from nri_gpu.cdi.generate import SpecificationOptions, booted_at, remove_old, specification_text
from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES
from nri_gpu.domain.node import Inventory, Loader
from tests.support import builders as make
from tests.support.driver_root import make_driver_root

V: Final = "580.95.05"
OLD: Final = "570.26-0a1b2c3d"
REAL: Final = make.inventory(driver_version=V)
BOOT: Final = 1_000_000.0
MINUTE_S: Final = 60.0  # clocks are set while a machine runs


class Place(Struct, frozen=True):
    """A staging folder, a specification beside it, and a folder where runtimes look too."""

    base: Path

    @property
    def stage(self) -> Path:
        return self.base / "stage"

    @property
    def standard(self) -> Path:
        return self.base / "etc"

    @property
    def wish(self) -> SpecificationOptions:
        return SpecificationOptions(
            self.base / "driver",
            (),
            self.stage,
            Loader.FOLDERS,
            DEFAULT_CAPABILITIES,
            None,
            refresh_s=1,
            standard=(self.standard, self.base / "none"),
        )

    @property
    def file(self) -> SpecFile:
        return SpecFile(self.base / "cdi/nri-gpu.json")

    def write(self, inventory: Inventory = REAL) -> tuple[str, ...]:
        """As the verb does. Returns what was removed."""
        self.file.write(specification_text(inventory, self.wish))
        return remove_old(self.wish, self.file, inventory, BOOT)

    def stale(self, name: str = OLD, at: float = BOOT - 1) -> Path:
        """A generation from before."""
        folder = self.stage / name
        (folder / "compute/lib64").mkdir(parents=True)
        os.utime(folder, (at, at))
        return folder


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    make_driver_root(tmp_path / "driver", V)
    made.standard.mkdir()
    return made


def test_what_nobody_names_and_no_kernel_understands_goes(place: Place) -> None:
    folder, again = place.stale(), place.stale(f"{OLD}.1")
    assert place.write() == (OLD, f"{OLD}.1")
    assert not folder.exists()
    assert not again.exists()
    (left,) = (each for each in place.stage.iterdir() if each.is_dir())
    assert left.name.startswith(f"{V}-")
    assert place.write() == ()


def test_what_was_staged_since_the_boot_stays(place: Place) -> None:
    """A container of this boot may have been started with it."""
    folder = place.stale(at=BOOT + 1)
    assert place.write() == ()
    assert folder.is_dir()


def test_another_generation_of_the_driver_that_runs_stays(place: Place) -> None:
    folder = place.stale(f"{V}-0a1b2c3d")
    assert place.write() == ()
    assert folder.is_dir()


@pytest.mark.parametrize("where", ["cdi/other.json", "etc/other.yaml"])
def test_what_another_specification_names_stays(place: Place, where: str) -> None:
    folder = place.stale()
    other = place.base / where
    other.parent.mkdir(exist_ok=True)
    other.write_text(json.dumps({"hostPath": f"{folder}/compute/lib64"}))
    assert place.write() == ()
    other.unlink()
    assert place.write() == (OLD,)


def test_a_specification_that_cannot_be_read_may_name_any(place: Place) -> None:
    folder = place.stale()
    (place.standard / "odd.json").mkdir()
    with pytest.raises(DriverError, match=r"old driver files stay in .*Is a directory"):
        place.write()
    assert folder.is_dir()


@pytest.mark.parametrize("inventory", [replace(REAL, simulated=True), replace(REAL, driver_version="")])
def test_without_a_kernel_module_to_compare_with_all_stay(place: Place, inventory: Inventory) -> None:
    folder = place.stale()
    assert place.write(inventory) == ()
    assert folder.is_dir()


def test_other_folders_are_nobodys_business(place: Place) -> None:
    folder = place.stale("precious")
    assert place.write() == ()
    assert folder.is_dir()


def test_the_boot_is_when_the_kernel_says() -> None:
    with Path("/proc/stat").open() as stat:
        (btime,) = (float(line.split()[1]) for line in stat if line.startswith("btime"))
    assert abs(booted_at() - btime) < MINUTE_S
