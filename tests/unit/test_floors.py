"""Everything from the cellar to F2 is pure: importing it loads nothing that could wait, talk, log or load a library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import nri_gpu

PACKAGE: Final = Path(nri_gpu.__file__).parent
ROOMS: Final = (
    "_pb",
    "domain",
    "request",
    "policy",
    "allocation",
    "injection",
    "wire",
    "nri",
)
FORBIDDEN: Final = frozenset({"asyncio", "socket", "pynvml", "loguru", "ctypes", "yaml", "grpc"})
# Whatever has F3's name has F3's imports; the roof stands on it.
ABOVE: Final = ("runtime", "inventory", "driver", "settings", "telemetry", "verbs", "cli", "__main__")
PROGRAM: Final = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def modules() -> list[str]:
    found = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in found]
    return sorted({name.removesuffix(".__init__") for name in names} | {"nri_gpu.decide"})


@pytest.fixture(scope="module")
def loaded() -> frozenset[str]:
    """What a fresh interpreter has loaded once all of the house below F3 is imported."""
    # -S keeps the environment's own start-up hooks out of it, so the path is given by hand.
    paths = [str(PACKAGE.parent), *filter(None, sys.path)]
    program = f"import sys; sys.path[:0] = {paths!r}\n{PROGRAM}"
    command = [sys.executable, "-S", "-c", program, *modules()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return frozenset(json.loads(done.stdout))


def test_every_module_was_imported(loaded: frozenset[str]) -> None:
    assert len(modules()) > 30
    assert set(modules()) <= loaded


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_nothing_below_f3_loads(name: str, loaded: frozenset[str]) -> None:
    assert not {module for module in loaded if module == name or module.startswith(f"{name}.")}


def test_no_import_points_up(loaded: frozenset[str]) -> None:
    upstairs = tuple(f"nri_gpu.{name}" for name in ABOVE)
    assert not {module for module in loaded if module.startswith(upstairs)}


def test_every_room_of_the_house_has_its_floor() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms == {*ROOMS, *ABOVE, "decide", "__init__"}
