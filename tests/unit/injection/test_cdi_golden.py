"""What the shipped topologies look like in CDI, line by line, so that a release shows what it injects differently.

    NRI_GPU_GOLDEN=write .venv/bin/pytest tests/unit/injection/test_cdi_golden.py

writes tests/fixtures/cdi/ anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from nri_gpu.allocation.fit import why_not
from nri_gpu.domain.gpu import Capabilities, Capability, DriverTree
from nri_gpu.injection import mounts
from nri_gpu.injection.cdi import specification
from nri_gpu.inventory.topology import load_topology
from tests.support.daemon import TOPOLOGIES

FOLDER: Final = Path(__file__).parents[2] / "fixtures" / "cdi"
# One more row with each new capability.
CAPABILITIES: Final[dict[str, Capabilities]] = {
    "compute+utility": frozenset({Capability.COMPUTE, Capability.UTILITY}),
    "utility": frozenset({Capability.UTILITY}),
}
X86_64: Final = ("/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2", "/usr/lib64/glibc-hwcaps/x86-64-v2")
NAMES: Final = [path.stem for path in sorted(TOPOLOGIES.glob("*.toml")) if load_topology(path).gpus]


def lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"{document['kind']} {document['cdiVersion']}"
    yield from _edits("every", document["containerEdits"])
    for device in document["devices"]:
        yield from _edits(device["name"], device["containerEdits"])


def _edits(name: str, edits: dict[str, Any]) -> Iterator[str]:
    yield from (f"{name}: env {pair}" for pair in edits.get("env", ()))
    for node in edits.get("deviceNodes", ()):
        number = f"{node['type']} {node['major']}:{node['minor']} {node['permissions']}"
        yield f"{name}: node {node['path']} {number} {node['fileMode']:04o} {node['uid']}:{node['gid']}"
    for mount in edits.get("mounts", ()):
        yield f"{name}: mount {mount['containerPath']} from {mount['hostPath']} {','.join(mount['options'])}"


@pytest.mark.parametrize("capabilities", CAPABILITIES)
@pytest.mark.parametrize("topology", NAMES)
def test_it_is_what_it_was(topology: str, capabilities: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "HWCAPS_PLACES", X86_64)
    inventory = load_topology(TOPOLOGIES / f"{topology}.toml")
    document = specification(
        [unit for unit in inventory.units if not why_not(unit)],
        capabilities=CAPABILITIES[capabilities],
        inventory=inventory,
        tree=DriverTree(f"/stage/{capabilities}", ("nvidia-smi",)),
    )
    golden = FOLDER / f"{topology}.{capabilities}.txt"
    text = "\n".join(lines(document)) + "\n"
    if os.environ.get("NRI_GPU_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text


def test_there_is_no_golden_file_of_nothing() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{t}.{c}.txt" for t in NAMES for c in CAPABILITIES}
