"""Everything from the cellar to F2 is pure: importing it loads nothing that could wait, talk, log or load a library."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

import nri_gpu

PACKAGE: Final = Path(nri_gpu.__file__).parent
LOWEST_OF_F3: Final = "log"  # the last floor that may wait and talk; all below it is pure


def floors() -> list[list[str]]:
    """The house as the import-linter's contract in pyproject.toml has it, the roof first."""
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip().removeprefix("nri_gpu.") for name in layer.split("|")] for layer in layers]


_FLOORS: Final = floors()
_AT: Final = _FLOORS.index([LOWEST_OF_F3]) + 1
ABOVE: Final = tuple(name for floor in _FLOORS[:_AT] for name in floor)
ROOMS: Final = tuple(name for floor in _FLOORS[_AT:] for name in floor)
FORBIDDEN: Final = frozenset({"asyncio", "socket", "pynvml", "nri_gpu.log", "ctypes", "yaml", "grpc"})
PROGRAM: Final = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def modules() -> list[str]:
    """All modules of the rooms below F3; a room is a folder or a file."""
    found = [path for room in ROOMS for path in ((PACKAGE / room).rglob("*.py"), [PACKAGE / f"{room}.py"])]
    files = {path for paths in found for path in paths if path.exists()}
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    return sorted(name.removesuffix(".__init__") for name in names)


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


def test_every_room_has_its_floor_in_the_contract() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} <= {*ROOMS, *ABOVE}
