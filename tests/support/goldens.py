"""Golden files: one that differs fails its test, `make generate WHAT=goldens` writes it anew; and a driver for them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from nri_gpu.domain.gpu import Capability

FIXTURES: Final = Path(__file__).parents[1] / "fixtures"
# A few of the files that go in one by one, of every capability that has some.
FILES: Final = {
    Capability.COMPUTE: ("/etc/OpenCL/vendors/nvidia.icd",),
    Capability.GRAPHICS: ("/etc/vulkan/icd.d/nvidia_icd.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"),
    Capability.DISPLAY: ("/usr/lib/xorg/modules/drivers/nvidia_drv.so",),
}
LIBRARIES: Final = (
    ("lib64/libcuda.so.580.95.05", ("libcuda.so.580.95.05", "libcuda.so.1", "libcuda.so")),
    ("lib64/libnvidia-ml.so.580.95.05", ("libnvidia-ml.so.580.95.05", "libnvidia-ml.so.1")),
)


def compare(golden: Path, text: str) -> None:
    """Hold a text against its golden file, or write that."""
    if os.environ.get("NRI_GPU_GOLDENS") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text


def compare_part(golden: Path, names: Collection[str], name: str, text: str) -> None:
    """Hold a text against its part of a golden file that has parts of these names alone, or write that part."""
    whole = golden.read_text() if golden.exists() else ""
    parts = dict(part.split("\n", 1) for part in f"\n{whole}".split("\n== ")[1:])
    if os.environ.get("NRI_GPU_GOLDENS") == "write":
        parts = {each: part for each, part in (parts | {name: f"{text}\n"}).items() if each in names}
        golden.parent.mkdir(exist_ok=True)
        golden.write_text("".join(f"== {each}\n{part.rstrip()}\n" for each, part in parts.items()))
    assert parts.keys() <= {*names}
    assert parts[name].rstrip("\n") == text
