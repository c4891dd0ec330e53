"""Versions, majors and minors, in every form that kernels have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.domain.node import Majors
from nri_gpu.host.modules import (
    majors_by_name,
    module_version,
    module_versions,
    read_majors,
    read_mig_minors,
)

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  12.2\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
CASES = {
    "sysfs": ("580.95.05\n", "", "580.95.05"),
    "sysfs goes first": ("580.95.05\n", CLOSED, "580.95.05"),
    "proc alone, closed": (None, CLOSED, "535.129.03"),
    "proc alone, open": (None, OPEN, "580.95.05"),
    "rubbish in sysfs": ("58\x1b[31m0\n", OPEN, "580.95.05"),
    "bytes": (None, "\x80\x81", ""),
    "no module": (None, None, ""),
}


@pytest.mark.parametrize(("sysfs", "proc", "version"), CASES.values(), ids=CASES)
def test_the_version_of_the_loaded_module_is_read_where_the_kernel_has_it(
    tmp_path: Path, sysfs: str | None, proc: str | None, version: str
) -> None:
    (tmp_path / "module/nvidia").mkdir(parents=True)
    for name, text in (("module/nvidia/version", sysfs), ("proc", proc)):
        if text is not None:
            (tmp_path / name).write_bytes(text.encode("latin-1"))
    assert module_version(tmp_path, tmp_path / "proc") == version


def test_a_folder_in_place_of_a_file_is_no_version(tmp_path: Path) -> None:
    (tmp_path / "module/nvidia/version").mkdir(parents=True)
    assert module_version(tmp_path, tmp_path) == ""


def test_versions_of_all_loaded_modules(tmp_path: Path) -> None:
    for name, version in (("nvidia", "580.95.05\n"), ("nvidia_uvm", "590.10\n"), ("loop", "1\n")):
        (tmp_path / "module" / name).mkdir(parents=True)
        (tmp_path / "module" / name / "version").write_text(version)
    (tmp_path / "module/nvidia_drm").mkdir()
    assert module_versions(tmp_path) == {"nvidia": "580.95.05", "nvidia_uvm": "590.10", "nvidia_drm": ""}


NEW = """Character devices:
  1 mem
195 nvidia
195 nvidia-modeset
195 nvidiactl
235 nvidia-caps
236 nvidia-caps-imex-channels
508 nvidia-uvm

Block devices:
  8 sd
259 blkext
"""

MAJORS = {
    "driver 545 and newer": (NEW, Majors(195, 508, 235, modeset=True)),
    "without nvidia-modeset": (NEW.replace("195 nvidia-modeset\n", ""), Majors(195, 508, 235, modeset=False)),
    "driver 535 has one line": ("Character devices:\n195 nvidia-frontend\n511 nvidia-uvm\n", Majors(195, 511, None)),
    "names are whole": ("Character devices:\n195 nvidiactl\n196 nvidia-uvmx\n197 xnvidia-caps\n", Majors()),
    "imex channels are not caps": ("Character devices:\n236 nvidia-caps-imex-channels\n", Majors()),
    "garbage": ("Character devices:\nnvidia 195\n x nvidia\n-1 nvidia\n\u0661 nvidia\n", Majors()),
}


@pytest.mark.parametrize(("text", "majors"), MAJORS.values(), ids=MAJORS)
def test_majors_are_read_by_whole_names(text: str, majors: Majors) -> None:
    assert read_majors(text) == majors


def test_a_name_can_have_several_majors() -> None:
    text = "Character devices:\n231 infiniband_verbs\n511 infiniband_verbs\n195 nvidia\nBlock devices:\n9 nvidia\n"
    assert majors_by_name(text) == {"infiniband_verbs": {231, 511}, "nvidia": {195}}


def test_minors_of_capabilities() -> None:
    text = "config 1\nmonitor 2\ngpu0/gi0/access 3\n\nsome other line\nx y\na 8192\nb 99999999\n"
    assert read_mig_minors(text) == {"config": 1, "monitor": 2, "gpu0/gi0/access": 3}
