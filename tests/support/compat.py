"""Make a folder that looks like one of NVIDIA's forward-compatibility packages, with a C compiler."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support.driver_root import STUBS, compile_stub

# Library -> its SONAME, as package cuda-compat-13-0 has them.
LIBRARIES: Final = {
    "libcuda": "libcuda.so.1",
    "libcudadebugger": "libcudadebugger.so.1",
    "libnvidia-nvvm": "libnvidia-nvvm.so.4",
    "libnvidia-ptxjitcompiler": "libnvidia-ptxjitcompiler.so.1",
}


def note(cuda: str, drivers: Sequence[int]) -> str:
    """What NVIDIA's note says, in its words."""
    return json.dumps({"Format": 1, "CUDA Version": cuda, "Driver": list(drivers), "Device": [1, 2, 7]})


def make_package(folder: Path, cuda: str, version: str, said: str | None = None) -> Path:
    """The package for a CUDA version at `<folder>/<cuda>`, and that path. said: its note's text; None: no note."""
    place = folder / cuda
    place.mkdir(parents=True)
    major, minor = map(int, cuda.split("."))
    for name, soname in LIBRARIES.items():
        options = ["-shared", "-fPIC", f"-Wl,-soname,{soname}"]
        if name == "libcuda":
            options.append(f"-DSTUB_CUDA={major * 1000 + minor * 10}")
            options += _note_option(folder, said)
        compile_stub(STUBS / "compat.c", place / f"{name}.so.{version}", version, *options)
        (place / soname).symlink_to(f"{name}.so.{version}")
    (place / "libcuda.so").symlink_to("libcuda.so.1")
    return place


def _note_option(folder: Path, said: str | None) -> list[str]:
    if said is None:
        return []
    text = folder.parent / "note.json"
    text.write_text(said)
    return [f'-DSTUB_NOTE="{text}"']
