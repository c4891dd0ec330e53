"""The CUDA programs of this folder: each NAME.c needs a C compiler, or to be at hand compiled."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from tests.support import packages

FOLDER: Final = Path(__file__).parent
NAMES: Final = tuple(sorted(source.stem for source in FOLDER.glob("*.c")))


def compile_program(name: str, folder: Path) -> Path:
    """`folder/NAME`. Raises: HarnessError, subprocess.CalledProcessError."""
    program = folder / name
    subprocess.run([*packages.gcc(), "-O2", "-o", program, FOLDER / f"{name}.c", "-ldl"], check=True)
    return program


def program(name: str, folder: Path) -> Path:
    """That of the folder NRI_GPU_PROGRAMS, else one that is compiled to `folder`. Raises: HarnessError."""
    compiled = os.environ.get("NRI_GPU_PROGRAMS")
    return Path(compiled) / name if compiled else compile_program(name, folder)
