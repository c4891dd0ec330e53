"""The kernel module's version, in every form that kernels tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.system.kernel_modules import module_version, module_versions

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  12.2\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
CASES = {
    "sysfs": ("580.95.05\n", "", "580.95.05"),
    "two parts": ("570.26\n", "", "570.26"),
    "sysfs goes first": ("580.95.05\n", CLOSED, "580.95.05"),
    "proc alone, closed": (None, CLOSED, "535.129.03"),
    "proc alone, open": (None, OPEN, "580.95.05"),
    "nothing in sysfs": ("\n", OPEN, "580.95.05"),
    "rubbish in sysfs": ("58\x1b[31m0\n", OPEN, "580.95.05"),
    "rubbish": ("one", "NVRM version: two\n", ""),
    "a version on a later line": (None, "NVRM version:\nKernel Module  1.2.3  \n", ""),
    "bytes": (None, "\x80\x81", ""),
    "no module": (None, None, ""),
}


@pytest.mark.parametrize(("sysfs", "proc", "version"), CASES.values(), ids=CASES)
def test_module_version(tmp_path: Path, sysfs: str | None, proc: str | None, version: str) -> None:
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
