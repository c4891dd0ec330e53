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

from nri_gpu.allocation.messages import why_not
from nri_gpu.cdi.specification import specification
from nri_gpu.domain.gpu import Capabilities, Capability, closure
from nri_gpu.domain.node import DriverTree, Loader
from nri_gpu.injection import mounts
from nri_gpu.simulation.topology import load_scenario, load_topology
from tests.support.daemon import TOPOLOGIES

FOLDER: Final = Path(__file__).parents[2] / "fixtures" / "cdi"
# One more row with each new capability.
CAPABILITIES: Final[dict[str, Capabilities]] = {
    "compute+utility": frozenset({Capability.COMPUTE, Capability.UTILITY}),
    "utility": frozenset({Capability.UTILITY}),
    "video": closure(frozenset({Capability.VIDEO})),
    "graphics": frozenset({Capability.GRAPHICS}),
    "display": closure(frozenset({Capability.DISPLAY})),
    "ngx": frozenset({Capability.NGX}),
    "utility+compat32": frozenset({Capability.UTILITY, Capability.COMPAT32}),
}
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
FOLDERS: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")
HWCAPS: Final = tuple(f"{folder}/glibc-hwcaps/x86-64-v2" for folder in FOLDERS)
# One that plays changes is a node like another when it begins.
SCENES: Final = {path.stem: load_scenario(path) for path in sorted(TOPOLOGIES.glob("*.toml"))}
NAMES: Final = [name for name, scene in SCENES.items() if scene.inventory.gpus and not scene.changes]
# Golden file -> topology, capabilities, strategy: all of the default one, and one of each other.
CASES: Final = {
    **{f"{t}.{c}.txt": (t, c, Loader.FOLDERS) for t in NAMES for c in CAPABILITIES},
    **{
        f"four-gpus.compute+utility.{loader}.txt": ("four-gpus", "compute+utility", loader)
        for loader in Loader
        if loader is not Loader.FOLDERS
    },
}


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


def tree(name: str) -> DriverTree:
    """As staged; of single files that compute and utility have, none, as on most hosts without OpenCL."""
    wanted = CAPABILITIES[name] if name not in ("compute+utility", "utility") else frozenset()
    places = tuple(place for each in Capability if each in wanted for place in FILES.get(each, ()))
    smi = ("nvidia-smi",) if Capability.UTILITY in CAPABILITIES[name] else ()
    return DriverTree(f"/stage/{name}", smi, tuple((place, f"extra{place}") for place in places), LIBRARIES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "HWCAPS_PLACES", HWCAPS)
    monkeypatch.setattr(mounts, "DEFAULT_PLACES", FOLDERS)
    topology, capabilities, loader = CASES[name]
    inventory = load_topology(TOPOLOGIES / f"{topology}.toml")
    document = specification(
        [unit for unit in inventory.units if not why_not(unit)],
        capabilities=CAPABILITIES[capabilities],
        inventory=inventory,
        tree=tree(capabilities),
        loader=loader,
    )
    golden = FOLDER / name
    text = "\n".join(lines(document)) + "\n"
    if os.environ.get("NRI_GPU_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text


def test_there_is_no_golden_file_of_nothing() -> None:
    assert {path.name for path in FOLDER.iterdir()} == CASES.keys()
