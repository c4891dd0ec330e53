"""`nri-gpu cdi generate`: printed, written, removed where nothing is true; and old drivers' files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from nri_gpu.cdi.generate import (
    BOOT_FILE,
    NotReadyError,
    SpecificationOptions,
    remove_old,
    specification_text,
)
from nri_gpu.cdi.spec_file import SpecFile
from nri_gpu.cli.main import main
from nri_gpu.domain.errors import DriverError, Exit
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capability
from nri_gpu.domain.node import Inventory, Loader, Majors
from nri_gpu.driver.stage_owner import StageOwner
from nri_gpu.system.storage import boot_id
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.driver_root import make_driver_root

V: Final = "580.95.05"
NEWER: Final = "590.10.01"


class Place:
    """Folders of one test, and the command line that stays within them."""

    def __init__(self, base: Path) -> None:
        self.base, self.driver, self.stage = base, base / "driver", base / "stage"
        self.file, self.topology = base / "cdi/nri-gpu.json", base / "node.toml"
        own = ["--driver-root", str(self.driver), "--stage-dir", str(self.stage), "--gpus", str(self.topology)]
        self.command = ["cdi", "generate", *own]

    def options(self, **fields: Any) -> SpecificationOptions:  # noqa: ANN401 - any field of a SpecificationOptions
        every = DEFAULT_CAPABILITIES
        return replace(
            SpecificationOptions(self.driver, (), self.stage, Loader.FOLDERS, every, str(self.topology), ()),
            **fields,
        )

    @property
    def simulated(self) -> str:
        """What is said of each specification of this node."""
        return f"nri-gpu: SIMULATED: the GPUs are those of {self.topology}\n"

    def generate(self, *arguments: str) -> int:
        return main([*self.command, *arguments])

    def specification(self) -> Any:  # noqa: ANN401 - parsed JSON
        return json.loads(self.file.read_text())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr("nri_gpu.records.policy_file.DEFAULT_PATH", tmp_path / "no-policy.toml")
    monkeypatch.setattr("nri_gpu.cli.cdi_command.STANDARD", ())
    made = Place(tmp_path)
    make_driver_root(made.driver, V)
    shutil.copy(FOUR_GPUS, made.topology)
    return made


def test_the_file_is_what_would_be_printed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.generate() == Exit.OK
    printed = capsys.readouterr().out
    assert place.generate("--output", str(place.file)) == Exit.OK
    assert capsys.readouterr() == ("", f"nri-gpu: {place.file} is written: 4 GPUs\n{place.simulated}")
    assert place.file.read_text() == printed
    assert place.generate("--output", str(place.file)) == Exit.OK
    assert capsys.readouterr() == ("", f"nri-gpu: {place.file} is up to date: 4 GPUs\n{place.simulated}")
    assert place.generate("--output", "-") == Exit.OK
    assert capsys.readouterr() == (printed, place.simulated)
    document = place.specification()
    assert document["devices"][-1]["name"] == "all"
    [libraries, *_] = document["containerEdits"]["mounts"]
    assert (Path(libraries["hostPath"]) / "libcuda.so.1").resolve().name == f"libcuda.so.{V}"


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


def test_compute_without_libcuda_is_not_described(place: Place) -> None:
    (place.driver / f"lib64/libcuda.so.{V}").unlink()
    node = replace(make.inventory(driver_version=V), majors=Majors(nvidia=195, nvidia_uvm=511))
    with pytest.raises(NotReadyError, match=r"no libcuda\.so for compute.* ask with capabilities=utility"):
        specification_text(node, place.options())
    specification_text(node, place.options(capabilities=frozenset({Capability.UTILITY})))


@pytest.mark.parametrize("loader", ["folders", "hwcaps", "tree"])
def test_where_no_loader_looks_into_hwcaps_every_library_has_a_mount(
    place: Place, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nri_gpu.cli.cdi_command.why_no_hwcaps", lambda: "its CPU is no x86-64-v2")
    policy = place.base / "policy.toml"
    policy.write_text(f'[driver]\nloader = "{loader}"\n')
    assert place.generate("--policy", str(policy), "--output", str(place.file)) == Exit.OK
    places = {mount["containerPath"] for mount in place.specification()["containerEdits"]["mounts"]}
    assert any(each.endswith("-linux-gnu/libcuda.so.1") for each in places) is (loader != "tree")
    assert ("/usr/local/nvidia" in places) is (loader == "tree")


def test_graphics_without_a_drm_node_is_said(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.generate("--capabilities", "graphics,compute") == Exit.OK
    assert capsys.readouterr().err == place.simulated
    shutil.copy(TOPOLOGIES / "dgx-a100.toml", place.topology)
    for words in ((), ("--output", str(place.file))):
        assert place.generate("--capabilities", "graphics,compute", *words) == Exit.OK
        assert "module nvidia-drm is not loaded: `modprobe nvidia-drm`" in capsys.readouterr().err


def test_capabilities_are_the_policys_or_those_named(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    policy = place.base / "policy.toml"
    policy.write_text('[defaults]\ncapabilities = ["utility"]\n')
    assert place.generate("--policy", str(policy)) == Exit.OK
    assert "nvidia-uvm" not in capsys.readouterr().out
    assert place.generate("--policy", str(policy), "--capabilities", "compute, utility") == Exit.OK
    assert "nvidia-uvm" in capsys.readouterr().out


# The arguments, how the verb ends, and what it says.
FAILURES: dict[str, tuple[list[str], Exit, str]] = {
    "no capability": (["--capabilities", "compute,magic"], Exit.USAGE, "'magic' is not one of compute, utility"),
    "an empty capability": (["--capabilities", "compute,"], Exit.USAGE, "'' is not one of"),
    "a file that no runtime reads": (["--output", "cdi.txt"], Exit.USAGE, "only read files that end in .json or .yaml"),
    "a broken policy": (["--policy", "broken.toml"], Exit.CONFIGURATION, "broken.toml:1: nonsense"),
    "a broken topology": (["--gpus", "broken.toml"], Exit.CONFIGURATION, "broken.toml"),
    "a file for a folder": (["--output", "broken.toml/a.json"], Exit.CONFIGURATION, "cannot be written"),
}


@pytest.mark.parametrize(("arguments", "code", "words"), FAILURES.values(), ids=FAILURES)
def test_a_failure_has_its_exit_code_and_says_why(
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: Exit,
    words: str,
) -> None:
    monkeypatch.chdir(place.base)
    Path("broken.toml").write_text("nonsense = 1\n")
    assert place.generate(*arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


def test_a_file_that_is_no_longer_true_goes(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.generate("--output", str(place.file))
    place.topology.write_text("schema = 1\n[node]\n")
    assert place.generate("--output", str(place.file)) == Exit.UNAVAILABLE
    assert not place.file.exists()
    assert f"removed {place.file}, because it is out of date" in capsys.readouterr().err


RIVAL: Final = 'kind: nvidia.com/gpu\ndevices:\n- name: "0"\n- name: "9"\n'


def test_a_file_beside_it_with_a_name_of_it_is_left_to_serve(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Runtimes resolve no name that two files of one folder have; the file was written before it was seen."""
    rival = place.file.with_name("nvidia.yaml")
    for there in (True, False):
        place.generate(*["--output", str(place.file)] * there)
        place.file.parent.mkdir(exist_ok=True)
        rival.write_text(RIVAL)
        capsys.readouterr()
        assert place.generate("--output", str(place.file)) == Exit.FINDING
        said = capsys.readouterr().err
        assert f"{place.file} and {rival} both name nvidia.com/gpu=0: " in said
        assert f"remove {rival}, and if NVIDIA's nvidia-cdi-refresh keeps that, first run `systemctl mask --now" in said
        assert (f"removed {place.file}, so that what the other file names works" in said) is there
        assert [*place.file.parent.iterdir()] == [rival]
        rival.unlink()
    assert place.generate("--output", str(place.file)) == Exit.OK


@pytest.mark.parametrize("first", [True, False], ids=["an earlier folder", "a later folder"])
def test_a_file_in_another_folder_is_named(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    rival = place.base / "other/nvidia.yaml"
    rival.parent.mkdir()
    rival.write_text(RIVAL)
    folders = (rival.parent, place.file.parent)
    monkeypatch.setattr("nri_gpu.cli.cdi_command.STANDARD", folders if first else folders[::-1])
    assert place.generate("--output", str(place.file)) == Exit.OK
    assert place.file.exists()
    assert capsys.readouterr().err == (
        f"nri-gpu: {place.file} is written: 4 GPUs\n{place.simulated}"
        f"nri-gpu: {'' if first else 'warning: '}{place.file} and {rival} both name nvidia.com/gpu=0: runtimes take "
        f"what {place.file if first else rival} says, since its folder comes later\n"
    )


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


def half_installed(place: Place) -> None:
    (place.driver / f"lib64/libnvidia-ml.so.{V}").unlink()


def upgraded(place: Place) -> None:
    shutil.rmtree(place.driver)
    make_driver_root(place.driver, NEWER)


@pytest.mark.parametrize("change", [half_installed, upgraded, lambda place: shutil.rmtree(place.driver)])
def test_staged_files_of_the_module_serve_while_the_driver_is_replaced(
    place: Place, change: Callable[[Place], object]
) -> None:
    before = specification_text(REAL, place.options())
    change(place)
    assert specification_text(REAL, place.options()) == before
    generation = next(each for each in place.stage.iterdir() if each.name.startswith(V))
    next(generation.rglob("libcuda.so.*")).unlink()
    with pytest.raises(NotReadyError):
        specification_text(REAL, place.options())


def test_what_can_be_given_has_a_name(place: Place) -> None:
    cut = make.mig_gpu(1, mig=(make.mig(1, 0), make.mig(1, 1, unavailable="it failed")))
    gpus = [make.gpu(0), cut, make.gpu(2, unavailable="it fell off the bus"), make.gpu(3, mig_enabled=True)]
    some = Majors(nvidia=195, nvidia_uvm=511)
    whole, part = ["0", make.uuid(0)], ["1:0", make.mig_uuid(1, 0)]
    for majors, names in ((make.MAJORS, [*whole, *part, "all"]), (some, [*whole, "all"])):
        document = json.loads(specification_text(make.inventory(gpus, majors=majors), place.options()))
        assert [device["name"] for device in document["devices"]] == names


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
BEFORE: Final = "1b9ac7b1-7a4e-4ad1-8f0f-6d1f1a9c1f10"  # a boot
DAY_S: Final = 86400.0


class Old(Place):
    """A staging folder, a specification beside it, and a folder where runtimes look too."""

    def write(self, inventory: Inventory = REAL) -> tuple[str, ...]:
        """As the verb does. Returns what was removed."""
        options, file = self.options(standard=(self.base / "etc", self.base / "none")), SpecFile(self.file)
        file.write(specification_text(inventory, options))
        return remove_old(options, file, inventory)

    def stale(self, name: str = OLD, boot: str | None = BEFORE) -> Path:
        """A generation of that boot."""
        folder = self.stage / name
        (folder / "compute/lib64").mkdir(parents=True)
        if boot is not None:
            (folder / BOOT_FILE).write_text(boot)
        return folder


@pytest.fixture
def old(tmp_path: Path) -> Old:
    made = Old(tmp_path)
    make_driver_root(made.driver, V)
    (tmp_path / "etc").mkdir()
    return made


def test_what_nobody_names_and_no_kernel_understands_goes(old: Old) -> None:
    folder, again = old.stale(), old.stale(f"{OLD}.1")
    assert old.write() == (OLD, f"{OLD}.1")
    assert not folder.exists()
    assert not again.exists()
    (left,) = (each for each in old.stage.iterdir() if each.is_dir())
    assert left.name.startswith(f"{V}-")
    assert old.write() == ()


KEPT = {
    "used since the boot, as a container may have it": (OLD, boot_id(), REAL),
    "another generation of the driver that runs": (f"{V}-0a1b2c3d", BEFORE, REAL),
    "another folder": ("precious", BEFORE, REAL),
    "of a simulated node": (OLD, BEFORE, replace(REAL, simulated=True)),
    "without a kernel module to compare with": (OLD, BEFORE, replace(REAL, driver_version="")),
}


@pytest.mark.parametrize(("name", "boot", "inventory"), KEPT.values(), ids=KEPT)
def test_what_stays(old: Old, name: str, boot: str, inventory: Inventory) -> None:
    folder = old.stale(name, boot)
    assert old.write(inventory) == ()
    assert folder.is_dir()


def test_what_an_earlier_version_staged_stays_until_the_next_boot(old: Old) -> None:
    folder = old.stale(boot=None)
    assert old.write() == ()
    assert (folder / BOOT_FILE).read_text() == boot_id()


@pytest.mark.parametrize("step_s", [-DAY_S, DAY_S])
def test_a_clock_that_was_set_makes_nothing_old_that_was_used_in_this_boot(old: Old, step_s: float) -> None:
    old.write()
    (used,) = (each for each in old.stage.iterdir() if each.is_dir())
    there = time.time() - step_s  # the time of day stepped since
    os.utime(used, (there, there))
    shutil.rmtree(old.driver)
    make_driver_root(old.driver, NEWER)
    assert old.write(replace(REAL, driver_version=NEWER)) == ()
    assert used.is_dir()


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
    (old.base / "etc/odd.json").mkdir()
    with pytest.raises(DriverError, match=r"old driver files stay in .*it is a folder"):
        old.write()
    assert folder.is_dir()
