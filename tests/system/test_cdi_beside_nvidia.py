"""Our CDI specification beside one that NVIDIA's nvidia-ctk wrote, as the CDI library in nvidia-ctk resolves both."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.cli.main import main
from nri_gpu.domain.errors import Exit
from nri_gpu.inventory.topology_file import load_topology
from tests import ground
from tests.support.daemon import FOUR_GPUS, UUIDS
from tests.support.driver_root import make_driver_root
from tests.support.nvml import build_fake_nvml, gpus_of

OURS: Final = {f"nvidia.com/gpu={name}" for name in (*range(4), *UUIDS[:4], "all")}


class Folders:
    """Two folders of specifications as runtimes list them, and a driver that both programs describe."""

    def __init__(self, base: Path) -> None:
        self.program = ground.need("nvidia")
        self.all = (base / "etc", base / "run")
        self.driver, self.stage = make_driver_root(base / "driver", everything=True), base / "stage"
        gpus, ancestors = gpus_of(load_topology(FOUR_GPUS))
        build_fake_nvml(self.driver, gpus, ancestors=ancestors, lib_dir="lib64")
        (self.driver / "dev").mkdir()
        for folder in self.all:
            folder.mkdir()

    def ctk(self, *words: str) -> str:
        done = subprocess.run(
            [self.program / "nvidia-ctk", "cdi", *words], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    def theirs(self, folder: Path) -> Path:
        """As nvidia-cdi-refresh writes it."""
        hook, file = f"--nvidia-cdi-hook-path={self.program / 'nvidia-cdi-hook'}", folder / "nvidia.yaml"
        self.ctk("generate", "--mode=nvml", f"--driver-root={self.driver}", hook, f"--output={file}")
        return file

    def ours(self, folder: Path) -> int:
        words = ["--gpus", FOUR_GPUS, "--driver-root", self.driver, "--stage-dir", self.stage]
        return main(["cdi", "generate", *map(str, words), "--output", str(folder / "nri-gpu.json")])

    def resolved(self, folders: Sequence[Path]) -> set[str]:
        return set(self.ctk("list", *(f"--spec-dir={folder}" for folder in folders)).split())


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    if os.geteuid():
        pytest.fail("nvidia-ctk describes a driver below another root as root alone")
    made = Folders(tmp_path)
    monkeypatch.setattr("nri_gpu.records.policy_file.DEFAULT_PATH", tmp_path / "no-policy.toml")
    monkeypatch.setattr("nri_gpu.cli.cdi_command.STANDARD", made.all)
    return made


@pytest.mark.parametrize("ours_first", [True, False])
def test_in_one_folder_only_theirs_is_left_and_all_its_names_work(
    folders: Folders, capsys: pytest.CaptureFixture[str], ours_first: bool
) -> None:
    early, late = folders.all
    if ours_first:
        assert folders.ours(late) == Exit.OK
    file = folders.theirs(late)
    assert folders.ours(late) == Exit.FINDING
    assert f"{late / 'nri-gpu.json'} and {file} both name nvidia.com/gpu=0" in capsys.readouterr().err
    assert [*late.iterdir()] == [file]
    assert folders.resolved(folders.all) >= OURS
    file.unlink()
    assert folders.ours(late) == Exit.OK
    assert folders.resolved(folders.all) == OURS
    assert [*early.iterdir()] == []


@pytest.mark.parametrize("place", [0, 1])
def test_in_two_folders_each_name_works(folders: Folders, place: int) -> None:
    folders.theirs(folders.all[1 - place])
    assert folders.ours(folders.all[place]) == Exit.OK
    assert folders.resolved(folders.all) >= OURS


def test_two_files_of_an_earlier_folder_keep_their_names_from_ours(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    early, late = folders.all
    file = folders.theirs(early)
    copy = file.with_name("copy.yaml")
    copy.write_text(file.read_text())
    assert folders.ours(late) == Exit.OK
    assert folders.resolved(folders.all) == set()
    assert f"warning: {copy} and {file} both name nvidia.com/gpu=0" in capsys.readouterr().err
