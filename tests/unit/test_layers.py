"""Every package below `system` is pure: importing it loads nothing that could wait, talk, log or load a library."""

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
LOWEST_WITH_IO: Final = "system"  # the lowest layer that may wait and talk; all below it is pure


def layers() -> list[list[str]]:
    """The layers as the import-linter's contract in pyproject.toml has them, the uppermost first."""
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in layers]


_LAYERS: Final = layers()
_AT: Final = _LAYERS.index([LOWEST_WITH_IO]) + 1
ABOVE: Final = tuple(name for layer in _LAYERS[:_AT] for name in layer)
PURE: Final = tuple(name for layer in _LAYERS[_AT:] for name in layer)
FORBIDDEN: Final = frozenset({"asyncio", "socket", "pynvml", "loguru", "ctypes", "yaml", "grpc"})
PROGRAM: Final = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def modules() -> list[str]:
    """All modules of the packages that are pure; generated gRPC clients and servicers are for those above."""
    found = [path for package in PURE for path in ((PACKAGE / package).rglob("*.py"), [PACKAGE / f"{package}.py"])]
    files = {path for paths in found for path in paths if path.exists() and not path.stem.endswith("_pb2_grpc")}
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    return sorted(name.removesuffix(".__init__") for name in names)


@pytest.fixture(scope="module")
def loaded() -> frozenset[str]:
    """What a fresh interpreter has loaded once all pure packages are imported."""
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
def test_nothing_in_a_pure_package_loads(name: str, loaded: frozenset[str]) -> None:
    assert not {module for module in loaded if module == name or module.startswith(f"{name}.")}


def test_no_import_points_up(loaded: frozenset[str]) -> None:
    upstairs = tuple(f"nri_gpu.{name}" for name in ABOVE)
    assert not {module for module in loaded if module.startswith(upstairs)}


def test_every_package_has_its_layer_in_the_contract() -> None:
    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert packages - {"__init__"} <= {*PURE, *ABOVE}
