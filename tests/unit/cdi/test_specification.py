"""The CDI specification: laws that hold for every node there may be, and the shipped topologies line by line.

    make generate WHAT=goldens

writes tests/fixtures/cdi/ anew; read the difference before you commit it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from nri_gpu.cdi import specification as cdi
from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.edits import DeviceNode, Edits, Mount
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability, Gpu, Unit, closure, whole
from nri_gpu.domain.node import DriverTree, Loader
from nri_gpu.injection.inject import Injection, plan
from nri_gpu.inventory.topology_file import load_topology
from tests.support import builders as make
from tests.support.daemon import TOPOLOGIES
from tests.support.goldens import FILES, FIXTURES, LIBRARIES, compare

SCHEMA: Final = json.loads((Path(__file__).parents[2] / "support" / "cdi_schema.json").read_text())
TREE: Final = DriverTree(
    "/stage/580.95.05-1a2b3c4d/compute+utility",
    ("nvidia-smi",),
    libraries=(("lib64/libcuda.so.580.95.05", ("libcuda.so.580.95.05", "libcuda.so.1")),),
)
MADE_BY_CDI: Final = ("devices", "mounts", "env")


def specification(
    units: Sequence[Unit], tree: DriverTree | None = TREE, loader: Loader = Loader.FOLDERS
) -> dict[str, Any]:
    inventory = make.inventory([*dict.fromkeys(map(whole, units))])
    return cdi.specification(units, capabilities=DEFAULT_CAPABILITIES, inventory=inventory, tree=tree, loader=loader)


def devices(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {device["name"]: device["containerEdits"] for device in document["devices"]}


def every_edits(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document["containerEdits"], *devices(document).values()]


def applied(document: dict[str, Any], *names: str) -> Edits:
    """What a runtime does to a container that asks for these devices, in our own words."""
    parts = [document["containerEdits"], *(devices(document)[name] for name in names)]
    nodes = [node for part in parts for node in part.get("deviceNodes", ())]
    mounts = [mount for part in parts for mount in part.get("mounts", ())]
    return Edits.of(
        devices=tuple(DeviceNode(n["path"], n["major"], n["minor"], n["fileMode"], n["uid"], n["gid"]) for n in nodes),
        mounts=tuple(Mount(m["containerPath"], m["hostPath"], tuple(m["options"])) for m in mounts),
        env=dict(pair.split("=", 1) for part in parts for pair in part.get("env", ())),
    )


def planned(*gpus: Unit, loader: Loader = Loader.FOLDERS) -> Edits:
    """What NRI gives a container for the same GPUs."""
    share = Injection(
        container=make.container(),
        gpus=gpus,
        capabilities=DEFAULT_CAPABILITIES,
        inventory=make.inventory([whole(unit) for unit in gpus]),
        tree=TREE,
        loader=loader,
        void=True,
    )
    return plan(share)


def minimum_version(document: dict[str, Any]) -> str:
    """By the rules of the CDI reference, for the fields that the schema here knows."""
    nodes = [node for edits in every_edits(document) for node in edits.get("deviceNodes", ())]
    mounts = [mount for edits in every_edits(document) for mount in edits.get("mounts", ())]
    if "." in document["kind"].partition("/")[2]:
        return "0.6.0"
    if any(name[0].isdecimal() for name in devices(document)) or any("hostPath" in node for node in nodes):
        return "0.5.0"
    return "0.4.0" if any("type" in mount for mount in mounts) else "0.3.0"


@st.composite
def gpu_sets(draw: st.DrawFn) -> tuple[Gpu, ...]:
    """Up to 16 GPUs; indices may have holes, and minors are anywhere."""
    indices = draw(st.lists(st.integers(0, 247), min_size=1, max_size=16, unique=True))
    minors = draw(st.lists(st.integers(0, 247), min_size=len(indices), max_size=len(indices), unique=True))
    pairs = zip(sorted(indices), minors, strict=True)
    return tuple(make.gpu(index, minor_number=minor) for index, minor in pairs)


def test_a_name_that_cdi_does_not_know_is_left_out() -> None:
    """Rather than have runtimes drop the whole file for it."""
    odd = make.gpu(0, uuid="GPU-with blanks")
    assert [*devices(specification((odd,)))] == ["0", "all"]


def test_what_devices_would_set_differently_is_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file that depends on which GPUs a container has: CDI would take the last one's."""

    def with_disputes(share: Injection) -> Edits:
        [gpu] = share.gpus
        assert isinstance(gpu, Gpu)
        mounts = (Mount("/etc/profile", f"/run/{gpu.minor_number}"), Mount(f"/run/{gpu.uuid}", "/run/x"))
        return plan(share).merge(Edits.of(mounts=mounts, env={"MASK": str(gpu.index)}))

    monkeypatch.setattr(cdi, "plan", with_disputes)
    document = specification(make.gpus(2))
    edits = applied(document, "0", "1")
    assert not {"/etc/profile"} & set(edits.mounts)
    assert {f"/run/{make.uuid(0)}", f"/run/{make.uuid(1)}"} <= set(edits.mounts)
    assert "MASK" not in edits.env


def test_every_part_of_edits_has_been_thought_of() -> None:
    """A new one must either be in CDI too, or be known not to be: CDI has no word for limits and cpusets."""
    other = {field.name for field in fields(Edits)} - {*MADE_BY_CDI}
    assert other == {"rlimits", "cpuset_cpus", "cpuset_mems"}


@given(gpu_sets(), st.booleans())
def test_it_is_valid_whole_and_hook_less_and_each_gpu_has_two_names(gpus: tuple[Gpu, ...], staged: bool) -> None:
    document = specification(gpus, tree=TREE if staged else None)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["cdiVersion"] == minimum_version(document)
    names = [device["name"] for device in document["devices"]]
    assert names == [name for gpu in gpus for name in (str(gpu.index), gpu.uuid)] + ["all"]
    assert "hook" not in json.dumps(document).lower()
    for edits in every_edits(document):
        for node in edits.get("deviceNodes", ()):
            assert set(node) == {"path", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"}
            assert node["permissions"] == "rw"
    named = devices(document)
    assert all(named[str(gpu.index)] == named[gpu.uuid] for gpu in gpus)


@given(gpu_sets(), st.sampled_from(Loader), st.data())
def test_a_container_gets_what_nri_gives_for_the_same_gpus(
    gpus: tuple[Gpu, ...], loader: Loader, data: st.DataObject
) -> None:
    """But for the environment: its loader's path stays its own, and its GPUs are not listed."""
    chosen = data.draw(st.lists(st.sampled_from(gpus), min_size=1, unique=True))
    document = specification(gpus, loader=loader)
    by_cdi = applied(document, *(data.draw(st.sampled_from((str(gpu.index), gpu.uuid))) for gpu in chosen))
    by_nri = planned(*chosen, loader=loader)
    assert by_cdi.devices == by_nri.devices
    assert by_cdi.mounts == by_nri.mounts
    assert by_cdi.env == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert applied(document, "all").devices == planned(*gpus).devices


@given(gpu_sets())
def test_nothing_is_set_in_two_ways(gpus: tuple[Gpu, ...]) -> None:
    """Whatever devices are asked for together, no runtime has to choose between two values."""
    values: dict[tuple[str, str], Any] = {}
    for edits in every_edits(specification(gpus)):
        for key, value in _settings(edits):
            assert values.setdefault(key, value) == value


def _settings(edits: dict[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    yield from ((("node", node["path"]), node) for node in edits.get("deviceNodes", ()))
    yield from ((("mount", mount["containerPath"]), mount) for mount in edits.get("mounts", ()))
    yield from ((("env", pair.partition("=")[0]), pair) for pair in edits.get("env", ()))


FOLDER: Final = FIXTURES / "cdi"
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
NODES: Final = {path.stem: load_topology(path) for path in sorted(TOPOLOGIES.glob("*.toml"))}
NAMES: Final = [name for name, node in NODES.items() if node.gpus and not node.script]
# Golden file -> topology, capabilities, strategy: each topology, and one of them with each capability and strategy.
CASES: Final = {
    **{f"{t}.compute+utility.txt": (t, "compute+utility", Loader.FOLDERS) for t in NAMES},
    **{f"four-gpus.{c}.txt": ("four-gpus", c, Loader.FOLDERS) for c in CAPABILITIES},
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
@pytest.mark.usefixtures("on_x86_64")
def test_the_shipped_topologies_are_described_as_before(name: str) -> None:
    topology, capabilities, loader = CASES[name]
    inventory = load_topology(TOPOLOGIES / f"{topology}.toml")
    document = cdi.specification(
        [unit for unit in inventory.units if not why_not(unit)],
        capabilities=CAPABILITIES[capabilities],
        inventory=inventory,
        tree=tree(capabilities),
        loader=loader,
    )
    compare(FOLDER / name, "\n".join(lines(document)) + "\n")


def test_every_golden_file_has_its_case() -> None:
    assert {path.name for path in FOLDER.iterdir()} == CASES.keys()
