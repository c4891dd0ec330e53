"""What an operator reads when NVML's library is not there, or does not start."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.inventory.library import Library, LibraryError, StartFailure, advice

NONE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no root": (lambda root: root.rmdir(), "root is not a directory"),
    "nothing in it": (
        lambda root: None,
        "not found: searched below the driver root in .*root, .*root/usr/lib64, .*; install the driver, or",
    ),
    "none that can be loaded": (
        lambda root: (root / "libnvidia-ml.so.1").write_text("text"),
        r": found but not usable: libnvidia-ml.so.1 \(not an ELF file\); searched below",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), NONE.values(), ids=NONE)
def test_a_library_that_is_not_there_or_cannot_be_loaded_is_said(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    spoil(root)
    with pytest.raises(LibraryError) as caught:
        Library(root).find()
    assert re.search(words, str(caught.value))


ADVICE = {
    "no module": (StartFailure(9, "nvmlInit: Driver Not Loaded (9)", "/x", ""), "modprobe nvidia"),
    "no nodes": (StartFailure(9, "nvmlInit: Driver Not Loaded (9)", "/x", "580.95.05"), "nvidia-modprobe -c 255"),
    "two versions": (
        StartFailure(18, "nvmlInit: mismatch (18)", "/x/libnvidia-ml.so.390.157", "570.195.03"),
        "is 390.157 and the loaded kernel module is 570.195.03: end what `nri-gpu blockers` lists and reload the "
        "nvidia modules, or reboot the node",
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
def test_a_failed_start_comes_with_advice(failure: StartFailure, words: str) -> None:
    sentence = advice(failure)
    assert sentence.startswith(failure.error)
    assert words in sentence
