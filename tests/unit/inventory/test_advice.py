"""What an operator reads when NVML does not start."""

from __future__ import annotations

import pytest

from nri_gpu.inventory.library import StartFailure, advice, library_version

LIBRARY = "/usr/lib64/libnvidia-ml.so.580.95.05"


def test_not_loaded_says_modprobe() -> None:
    assert "modprobe nvidia" in advice(StartFailure(9, "nvmlInit: Driver Not Loaded (9)", LIBRARY, ""))


def test_loaded_without_nodes_says_how_to_make_them() -> None:
    sentence = advice(StartFailure(9, "nvmlInit: Driver Not Loaded (9)", LIBRARY, "580.95.05"))
    assert "/dev/nvidiactl" in sentence
    assert "nvidia-modprobe -c 255" in sentence


def test_mismatch_names_both_versions() -> None:
    sentence = advice(StartFailure(18, "nvmlInit: mismatch (18)", LIBRARY, "570.195.03"))
    assert "580.95.05" in sentence
    assert "570.195.03" in sentence
    assert "reboot" in sentence


def test_mismatch_without_versions_is_still_a_sentence() -> None:
    assert "unknown version" in advice(StartFailure(18, "nvmlInit: mismatch (18)", "/x/libnvidia-ml.so.1", ""))


@pytest.mark.parametrize(("code", "word"), [(4, "SELinux"), (13, "update the driver"), (999, "dmesg"), (0, "dmesg")])
def test_other_codes(code: int, word: str) -> None:
    assert word in advice(StartFailure(code, "nvmlInit: failed", LIBRARY, ""))


@pytest.mark.parametrize(
    ("path", "version"),
    [(LIBRARY, "580.95.05"), ("/x/libnvidia-ml.so.390.157", "390.157"), ("/x/libnvidia-ml.so.1", "")],
)
def test_version_in_a_file_name(path: str, version: str) -> None:
    assert library_version(path) == version
