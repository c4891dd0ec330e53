"""`nri-gpu cdi generate`: printed, written, kept up to date, removed where nothing is true; and old drivers' files."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.cdi.file import SpecFile
from nri_gpu.cdi.generate import (
    NotReadyError,
    SpecificationOptions,
    SpecificationWatch,
    booted_at,
    remove_old,
    specification_text,
)
from nri_gpu.cli.main import main
from nri_gpu.domain.errors import DriverError, Exit
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES
from nri_gpu.domain.node import Inventory, Loader, Majors
from nri_gpu.driver.owner import StageOwner
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.driver_root import make_driver_root
from tests.support.waiting import wait_for

V: Final = "580.95.05"
WAIT_S: Final = 10.0


class Place(Struct, frozen=True):
    """Folders of one test, and the command line that stays within them."""

    base: Path

    @property
    def driver(self) -> Path:
        return self.base / "driver"

    @property
    def stage(self) -> Path:
        return self.base / "stage"

    @property
    def file(self) -> Path:
        return self.base / "cdi" / "nri-gpu.json"

    @property
    def topology(self) -> Path:
        return self.base / "node.toml"

    def options(self, **fields: Any) -> SpecificationOptions:  # noqa: ANN401 - any field of a SpecificationOptions
        every = DEFAULT_CAPABILITIES
        return replace(
            SpecificationOptions(self.driver, (), self.stage, Loader.FOLDERS, every, str(self.topology), 0.02, ()),
            **fields,
        )

    def generate(self, *arguments: str) -> int:
        own = ["--driver-root", str(self.driver), "--stage-dir", str(self.stage), "--gpus", str(self.topology)]
        return main(["cdi", "generate", *own, *arguments])

    def specification(self) -> Any:  # noqa: ANN401 - parsed JSON
        return json.loads(self.file.read_text())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr("nri_gpu.daemon.policy_file.DEFAULT_PATH", tmp_path / "no-policy.toml")
    monkeypatch.setattr("nri_gpu.cli.cdi.STANDARD", ())
    made = Place(tmp_path)
    make_driver_root(made.driver, V)
    shutil.copy(FOUR_GPUS, made.topology)
    return made


@pytest.mark.parametrize("topology", sorted(TOPOLOGIES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_topology(place: Place, capsys: pytest.CaptureFixture[str], topology: Path) -> None:
    shutil.copy(topology, place.topology)
    code = place.generate()
    captured = capsys.readouterr()
    if topology.stem == "none":
        assert (code, captured.out) == (Exit.UNAVAILABLE, "")
        return
    assert code == Exit.OK
    document = json.loads(captured.out)
    assert document["devices"][-1]["name"] == "all"
    [libraries, *_] = document["containerEdits"]["mounts"]
    assert (Path(libraries["hostPath"]) / "libcuda.so.1").resolve().name == f"libcuda.so.{V}"


def test_the_file_is_what_would_be_printed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.generate() == Exit.OK
    printed = capsys.readouterr().out
    assert place.generate("--output", str(place.file)) == Exit.OK
    assert capsys.readouterr() == ("", "")
    assert place.file.read_text() == printed


def test_what_changes_while_it_is_written_is_written_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver that is still being installed; systemd says nothing of it while the unit runs."""
    write = SpecFile.write

    def write_and_upgrade(file: SpecFile, text: str) -> bool:
        if not place.file.exists():
            shutil.rmtree(place.driver)
            make_driver_root(place.driver, "590.1.2")
        return write(file, text)

    monkeypatch.setattr(SpecFile, "write", write_and_upgrade)
    assert place.generate("--output", str(place.file)) == Exit.OK
    assert "/590.1.2-" in place.file.read_text()


def test_capabilities_are_the_policys_or_those_named(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    policy = place.base / "policy.toml"
    policy.write_text('[defaults]\ncapabilities = ["utility"]\n')
    assert place.generate("--policy", str(policy)) == Exit.OK
    assert "nvidia-uvm" not in capsys.readouterr().out
    assert place.generate("--policy", str(policy), "--capabilities", "compute, utility") == Exit.OK
    assert "nvidia-uvm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--capabilities", "compute,magic"], "'magic' is not one of compute, utility"),
        (["--capabilities", "compute,"], "'' is not one of"),
        (["--watch"], "give --output"),
        (["--output", "nvidia.txt"], "runtimes only read files that end in .json or .yaml"),
    ],
)
def test_wrong_usage_is_2(place: Place, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert place.generate(*arguments) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


def test_a_broken_policy_is_78(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    policy = place.base / "policy.toml"
    policy.write_text("nonsense = 1\n")
    assert place.generate("--policy", str(policy)) == Exit.CONFIGURATION
    assert f"{policy}:1: nonsense" in capsys.readouterr().err


def test_a_broken_topology_is_78(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.topology.write_text("schema = 9\n")
    assert place.generate() == Exit.CONFIGURATION
    assert str(place.topology) in capsys.readouterr().err


def test_a_file_that_is_no_longer_true_goes(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.generate("--output", str(place.file))
    place.topology.write_text("schema = 1\n[node]\n")
    assert place.generate("--output", str(place.file)) == Exit.UNAVAILABLE
    assert not place.file.exists()
    assert f"removed {place.file}, because it is out of date" in capsys.readouterr().err


def test_a_rival_is_named(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.file.parent.mkdir()
    rival = place.file.with_name("nvidia.yaml")
    rival.write_text("kind: nvidia.com/gpu\nhooks:\n- hookName: createContainer\n")
    assert place.generate("--output", str(place.file)) == Exit.OK
    assert f"{rival} describes nvidia.com/gpu too, with hooks: runtimes refuse" in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_77(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.file.parent.write_text("a file")
    assert place.generate("--output", str(place.file)) == Exit.PERMISSION
    assert "cannot be written" in capsys.readouterr().err


def test_without_a_driver_it_is_69_and_says_where_it_looked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["cdi", "generate", "--driver-root", str(tmp_path), "--stage-dir", str(tmp_path / "stage")])
    captured = capsys.readouterr()
    assert (code, captured.out) == (Exit.UNAVAILABLE, "")
    assert str(tmp_path) in captured.err


REAL: Final = make.inventory(driver_version=V)
NOT_READY = {
    "a fault of the driver": (replace(REAL, fault="the driver is ill"), "the driver is ill"),
    "no nvidia module": (replace(REAL, majors=Majors()), "kernel module nvidia is not loaded"),
    "no uvm module": (replace(REAL, majors=Majors(nvidia=195)), "kernel module nvidia-uvm is not loaded"),
    "no GPU": (replace(REAL, gpus=()), "no available GPU (there is none)"),
    "MIG mode only": (make.inventory([make.gpu(0, mig_enabled=True)]), "GPU 0: it is in MIG mode"),
    "MIG devices without their major": (
        make.inventory([make.mig_gpu(0)], majors=Majors(nvidia=195, nvidia_uvm=511)),
        "nvidia-caps has no major",
    ),
    "another module": (replace(REAL, driver_version="570.1"), f"are {V} but its loaded kernel module is 570.1"),
}


@pytest.mark.parametrize(("inventory", "words"), NOT_READY.values(), ids=NOT_READY)
def test_nothing_half_true_is_written(place: Place, inventory: Inventory, words: str) -> None:
    with pytest.raises(NotReadyError) as caught:
        specification_text(inventory, place.options())
    assert words in str(caught.value)


def test_a_driver_without_files_is_refused_on_a_real_node_only(place: Place) -> None:
    shutil.rmtree(place.driver / "lib64")
    with pytest.raises(NotReadyError, match="driver"):
        specification_text(REAL, place.options())
    document = json.loads(specification_text(replace(REAL, simulated=True), place.options()))
    assert "mounts" not in document["containerEdits"]


def test_a_gpu_that_cannot_be_given_has_no_name(place: Place) -> None:
    gpus = [make.gpu(0), make.gpu(1, unavailable="it fell off the bus"), make.gpu(2, mig_enabled=True)]
    document = json.loads(specification_text(make.inventory(gpus), place.options()))
    assert [device["name"] for device in document["devices"]] == ["0", make.uuid(0), "all"]


def test_mig_devices_have_names_and_their_gpu_has_none(place: Place) -> None:
    gpus = [make.gpu(0), make.mig_gpu(1, mig=(make.mig(1, 0), make.mig(1, 1, unavailable="it failed")))]
    some = Majors(nvidia=195, nvidia_uvm=511)
    whole = ["0", make.uuid(0)]
    parts = ["1:0", make.mig_uuid(1, 0)]
    for majors, names in ((make.MAJORS, [*whole, *parts, "all"]), (some, [*whole, "all"])):
        document = json.loads(specification_text(make.inventory(gpus, majors=majors), place.options()))
        assert [device["name"] for device in document["devices"]] == names


def watched(place: Place, *steps: Callable[[], object]) -> None:
    """Run the watch; after each step wait until `step` no longer raises AssertionError, OSError or ValueError."""

    async def main() -> None:
        watch = SpecificationWatch(place.options(), SpecFile(place.file))
        running = asyncio.create_task(watch.run())
        for step in steps:
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    step()
                except (AssertionError, OSError, ValueError):
                    if running.done() or time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(0.01)
                else:
                    break
        watch.stop()
        assert await asyncio.wait_for(running, WAIT_S) == Exit.OK

    asyncio.run(main())


def has_gpus(place: Place, number: int) -> Callable[[], None]:
    def check() -> None:
        assert len(place.specification()["devices"]) == 2 * number + 1

    return check


def test_watch_follows_the_gpus(place: Place) -> None:
    def lose_one() -> None:
        text = place.topology.read_text()
        gpu = text.rindex("[[gpu]]")
        place.topology.write_text(text[:gpu] + text[text.index("[[link]]", gpu) :].split("[[link]]")[0])

    watched(place, has_gpus(place, 4), lose_one, has_gpus(place, 3))
    assert place.file.exists(), "it stays, for containers go on being started"


def test_watch_follows_the_driver(place: Place) -> None:
    def generation() -> str:
        return str(place.specification()["containerEdits"]["mounts"][0]["hostPath"])

    def upgrade() -> None:
        shutil.rmtree(place.driver)
        make_driver_root(place.driver, "590.1.2")

    def new() -> None:
        assert "590.1.2-" in generation()

    watched(place, has_gpus(place, 4), upgrade, new)


def test_watch_removes_what_is_not_true_and_writes_it_again(place: Place) -> None:
    text = place.topology.read_text()

    def gone() -> None:
        assert not place.file.exists()

    steps = (
        has_gpus(place, 4),
        lambda: place.topology.write_text("schema = 1\n[node]\n"),
        gone,
        lambda: place.topology.write_text(text),
        has_gpus(place, 4),
    )
    watched(place, *steps)


def test_watch_starts_where_nothing_can_be_said_yet(place: Place) -> None:
    place.topology.rename(place.base / "later")
    watched(place, lambda: (place.base / "later").rename(place.topology), has_gpus(place, 4))


def test_watch_as_a_process_hears_signals(place: Place) -> None:
    """SIGHUP: look again now, where the pause would be a minute. SIGTERM: an end in good order."""
    places = ["--gpus", place.topology, "--driver-root", place.driver, "--stage-dir", place.stage]
    command = [sys.executable, "-m", "nri_gpu", "cdi", "generate", "--watch", "--output", place.file, *places]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    try:
        wait_for("the file", place.file.exists, WAIT_S)
        shutil.copy(TOPOLOGIES / "dgx-a100.toml", place.topology)
        process.send_signal(signal.SIGHUP)
        wait_for("eight GPUs", lambda: len(place.specification()["devices"]) == 17, WAIT_S)
        process.terminate()
        _, log = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == Exit.OK
    assert log.count("CDI specification written") == 2
    assert place.file.exists()


def test_the_folder_of_a_daemon_is_left_to_it(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon removes what none of its grants names, and knows of no container of Docker's."""
    owner = StageOwner(place.stage, place.base / "state")
    owner.take()
    owner.close()
    before = sorted(place.stage.iterdir())
    assert place.generate("--output", str(place.file)) == Exit.UNAVAILABLE
    assert f"{place.stage} belongs to `nri-gpu run` with state folder {place.base}/state" in capsys.readouterr().err
    assert sorted(place.stage.iterdir()) == before


OLD: Final = "570.26-0a1b2c3d"
BOOT: Final = 1_000_000.0
MINUTE_S: Final = 60.0  # clocks are set while a machine runs


class Old(Struct, frozen=True):
    """A staging folder, a specification beside it, and a folder where runtimes look too."""

    base: Path

    @property
    def stage(self) -> Path:
        return self.base / "stage"

    @property
    def standard(self) -> Path:
        return self.base / "etc"

    @property
    def options(self) -> SpecificationOptions:
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
        self.file.write(specification_text(inventory, self.options))
        return remove_old(self.options, self.file, inventory, BOOT)

    def stale(self, name: str = OLD, at: float = BOOT - 1) -> Path:
        """A generation from before."""
        folder = self.stage / name
        (folder / "compute/lib64").mkdir(parents=True)
        os.utime(folder, (at, at))
        return folder


@pytest.fixture
def old(tmp_path: Path) -> Old:
    made = Old(tmp_path)
    make_driver_root(tmp_path / "driver", V)
    made.standard.mkdir()
    return made


def test_what_nobody_names_and_no_kernel_understands_goes(old: Old) -> None:
    folder, again = old.stale(), old.stale(f"{OLD}.1")
    assert old.write() == (OLD, f"{OLD}.1")
    assert not folder.exists()
    assert not again.exists()
    (left,) = (each for each in old.stage.iterdir() if each.is_dir())
    assert left.name.startswith(f"{V}-")
    assert old.write() == ()


def test_what_was_staged_since_the_boot_stays(old: Old) -> None:
    """A container of this boot may have been started with it."""
    folder = old.stale(at=BOOT + 1)
    assert old.write() == ()
    assert folder.is_dir()


def test_another_generation_of_the_driver_that_runs_stays(old: Old) -> None:
    folder = old.stale(f"{V}-0a1b2c3d")
    assert old.write() == ()
    assert folder.is_dir()


@pytest.mark.parametrize("where", ["cdi/other.json", "etc/other.yaml"])
def test_what_another_specification_names_stays(old: Old, where: str) -> None:
    folder = old.stale()
    other = old.base / where
    other.parent.mkdir(exist_ok=True)
    other.write_text(json.dumps({"hostPath": f"{folder}/compute/lib64"}))
    assert old.write() == ()
    other.unlink()
    assert old.write() == (OLD,)


def test_a_specification_that_cannot_be_read_may_name_any(old: Old) -> None:
    folder = old.stale()
    (old.standard / "odd.json").mkdir()
    with pytest.raises(DriverError, match=r"old driver files stay in .*Is a directory"):
        old.write()
    assert folder.is_dir()


@pytest.mark.parametrize("inventory", [replace(REAL, simulated=True), replace(REAL, driver_version="")])
def test_without_a_kernel_module_to_compare_with_all_stay(old: Old, inventory: Inventory) -> None:
    folder = old.stale()
    assert old.write(inventory) == ()
    assert folder.is_dir()


def test_other_folders_are_nobodys_business(old: Old) -> None:
    folder = old.stale("precious")
    assert old.write() == ()
    assert folder.is_dir()


def test_the_boot_is_when_the_kernel_says() -> None:
    with Path("/proc/stat").open() as stat:
        (btime,) = (float(line.split()[1]) for line in stat if line.startswith("btime"))
    assert abs(booted_at() - btime) < MINUTE_S
