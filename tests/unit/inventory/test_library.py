"""Where NVML's library is looked for, and what an operator reads when it does not start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nri_gpu.inventory.library import NVML, StartFailure, advice, find_library, library_dirs

ELF64 = b"\x7fELF\x02rest"


def place(root: Path, folder: str, content: bytes = ELF64) -> Path:
    path = root / folder / NVML
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_every_folder_is_searched_in_order(tmp_path: Path) -> None:
    for folder in reversed(library_dirs(os.uname().machine)):
        path = place(tmp_path, folder)
        assert find_library(tmp_path) == path
    assert "usr/lib/aarch64-linux-gnu/nvidia/current" in library_dirs("aarch64")


@pytest.mark.parametrize("content", [b"\x7fELF\x01rest", b"", b"not a library"], ids=["32 bit", "empty", "text"])
def test_files_that_cannot_be_loaded_are_skipped(tmp_path: Path, content: bytes) -> None:
    place(tmp_path, "usr/lib64", content)
    assert find_library(tmp_path) is None
    good = place(tmp_path, "lib64")
    assert find_library(tmp_path) == good


def test_links(tmp_path: Path) -> None:
    """One that leads out of the root, to nothing or to itself is skipped; the root itself may be one."""
    elsewhere, root = place(tmp_path / "host", "usr/lib64"), tmp_path / "root"
    for folder, target in (("usr/lib64", str(elsewhere)), ("lib64", NVML), ("lib", "absent")):
        (root / folder).mkdir(parents=True)
        (root / folder / NVML).symlink_to(target)
    assert find_library(root) is None
    found = place(root, "usr/lib")
    link = tmp_path / "link"
    link.symlink_to("root")
    assert find_library(link) == link / found.relative_to(root)


ADVICE = {
    "no module": (StartFailure(9, "nvmlInit: Driver Not Loaded (9)", "/x", ""), "modprobe nvidia"),
    "no nodes": (StartFailure(9, "nvmlInit: Driver Not Loaded (9)", "/x", "580.95.05"), "nvidia-modprobe -c 255"),
    "two versions": (
        StartFailure(18, "nvmlInit: mismatch (18)", "/x/libnvidia-ml.so.390.157", "570.195.03"),
        "is 390.157 and the loaded kernel module is 570.195.03: stop what uses the GPUs and reload the nvidia modules, "
        "or reboot the node",
    ),
    "unknown versions": (
        StartFailure(18, "nvmlInit: mismatch (18)", "/x/libnvidia-ml.so.1", ""),
        "is of an unknown version and the loaded kernel module is of an unknown version",
    ),
    "no permission": (StartFailure(4, "nvmlInit: failed", "/x", ""), "SELinux"),
    "no function": (StartFailure(13, "nvmlInit: failed", "/x", ""), "update the driver"),
    "anything else": (StartFailure(999, "nvmlInit: failed", "/x", ""), "dmesg"),
}


@pytest.mark.parametrize(("failure", "words"), ADVICE.values(), ids=ADVICE)
def test_advice(failure: StartFailure, words: str) -> None:
    sentence = advice(failure)
    assert sentence.startswith(failure.error)
    assert words in sentence
