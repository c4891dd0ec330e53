"""Whatever the NVML process reports is an inventory that could be one, or an InventoryError: nothing else happens."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nri_gpu.domain.errors import InventoryError
from nri_gpu.inventory.nvml_report import read_report
from nri_gpu.inventory.record import topology_text
from nri_gpu.inventory.topology_file import parse_topology

PART = {
    "index": 0,
    "uuid": "MIG-a0000000-0000-4000-8000-000000000000",
    "gpu_instance_id": 1,
    "compute_instance_id": 0,
    "profile": "1g.10gb",
    "memory_bytes": 10,
    "unavailable": "",
    "processes": 1,
    "engines": dict.fromkeys(
        ("multiprocessors", "copy_engines", "decoders", "encoders", "jpeg_engines", "ofa_engines"), 7
    ),
}


FABRIC = {
    "state": "completed",
    "status": 0,
    "cluster": "01234567-89ab-cdef-0123-456789abcdef",
    "clique": 2**32 - 1,
    "health_mask": None,
}


def gpu(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "minor_number": index,
        "uuid": f"GPU-{index}0000000-0000-4000-8000-000000000000",
        "pci_bus_id": f"0000:0{index}:00.0",
        "model": "NVIDIA A100",
        "memory_bytes": 80,
        "arch": [8, 0],
        "numa_node": None,
        "mig_enabled": not index,
        "brand": "nvidia",
        "unavailable": "",
        "mig": [] if index else [PART],
        "drm": [{"name": "card0", "major": 226, "minor": 0}] if index else [],
        "processes": None,
        "signs": [] if index else ["lost"],
        "architecture": "" if index else "ampere",
        "cpus": "" if index else "0-3,8",
        "compute_mode": None if index else "default",
        "persistence": None if index else True,
        "ecc": None if index else {"current": True, "pending": False},
        "addressing": "" if index else "hmm",
        "pcie_root": "" if index else "pci0000:c9",
        "fabric": None if index else FABRIC,
    }


FAULT = {
    "index": 2,
    "reason": "gone",
    "code": 15,
    "sign": "lost",
    "uuid": "GPU-20000000-0000-4000-8000-000000000000",
    "pci_bus_id": "",
}
WHOLE: dict[str, Any] = {
    "driver_version": "580.95.05",
    "cuda_version": "13.0",
    "gpus": [gpu(0), gpu(1)],
    "faults": [FAULT],
    "modules": {"nvidia": "580.95.05", "nvidia_drm": ""},
    "links": [{"a": 0, "b": 1, "pcie": "PIX", "nvlink": 4}],
}
PLACES: list[tuple[Any, ...]] = [
    (),
    *((key,) for key in WHOLE),
    *(("gpus", 0, key) for key in gpu(0)),
    *(("gpus", 0, "mig", 0, key) for key in PART),
    *(("gpus", 0, "fabric", key) for key in FABRIC),
    ("gpus", 0, "ecc", "pending"),
    ("modules", "nvidia"),
    ("modules", "ext4"),
    ("gpus", 1, "drm", 0),
    ("gpus", 1, "drm", 0, "name"),
    ("gpus", 1, "drm", 0, "major"),
    *(("links", 0, key) for key in WHOLE["links"][0]),
    *(("faults", 0, key) for key in WHOLE["faults"][0]),
]
garbage = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../..", "GPU-", "1g"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def planted(place: tuple[Any, ...], value: object) -> object:
    if not place:
        return value
    report = copy.deepcopy(WHOLE)
    below: Any = report
    for step in place[:-1]:
        below = below[step]
    below[place[-1]] = value
    return report


def test_the_whole_one_is_read() -> None:
    assert [unit.uuid for unit in read_report(WHOLE, 1.0).inventory.units] == [
        gpu(0)["uuid"],
        PART["uuid"],
        gpu(1)["uuid"],
    ]


@settings(max_examples=150)
@given(st.sampled_from(PLACES), garbage)
def test_garbage_at_any_place_is_refused_or_harmless(place: tuple[Any, ...], value: object) -> None:
    report = json.loads(json.dumps(planted(place, value)))  # as it comes: with NaN and Infinity, and no tuples
    try:
        inventory = read_report(report, 1.0).inventory
    except InventoryError as error:
        assert len(str(error)) < 700
        return
    # What passes can be told of a node, whoever tells it.
    again = parse_topology(topology_text(inventory), "report", 1.0) if not value_is_odd(place) else None
    assert again is None or [each.uuid for each in again.units] == [each.uuid for each in inventory.units]


def value_is_odd(place: tuple[Any, ...]) -> bool:
    """What a topology file must not say and a driver may: numbers and words that are shown, and lead nowhere."""
    odd = ("brand", "memory_bytes", "gpu_instance_id", "compute_instance_id", 0, 1)
    return bool(place) and (place[-1] in odd or place[-2:] == ("mig", "index") or place[2:] == ("mig", 0, "index"))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("gpus", 0, "minor_number"), 255),  # nvidiactl's
        (("gpus", 0, "minor_number"), -1),
        (("gpus", 0, "memory_bytes"), float("inf")),
        (("gpus", 0, "uuid"), "GPU-../../etc"),
        (("gpus", 1, "index"), 2),
        (("gpus", 1, "drm", 0, "name"), "../nvidiactl"),
        (("links", 0, "a"), 1),
        (("links", 0, "b"), 7),
        (("faults", 0, "uuid"), "GPU-\x1b[31m"),
        (("faults", 0, "sign"), "sad"),
        (("faults", 0, "code"), 1 << 70),
        (("driver_version",), "../../etc"),
        (("driver_version",), "580.95.05\nnri-gpu: all is well"),
        (("cuda_version",), "9" * 400),
        (("modules",), {"nvidia": "580 95"}),
        (("modules",), {"../x": "1"}),
        (("gpus", 0, "cpus"), "0-3;reboot"),
        (("gpus", 0, "cpus"), "0," * 4000 + "0"),
        (("gpus", 0, "compute_mode"), "off"),
        (("gpus", 0, "ecc"), {"current": 1, "pending": 0}),
        (("gpus", 0, "fabric", "cluster"), "x"),
        (("gpus", 0, "fabric", "clique"), 2**32),
        (("gpus", 0, "brand"), "x" * 401),
        (("gpus", 0, "mig", 0, "unavailable"), "x" * 401),
        (("faults", 0, "reason"), "x" * 401),
        (("gpus", 0, "mig", 0, "compute_instance_minor"), 4),  # the kernel's to tell
        (("gpus", 0, "health"), {"state": "bad"}),
    ],
)
def test_what_would_do_harm(place: tuple[Any, ...], value: object) -> None:
    with pytest.raises(InventoryError, match="cannot be read"):
        read_report(planted(place, value), 1.0)


@pytest.mark.parametrize(
    ("place", "value", "left"),
    [
        (("gpus", 1, "uuid"), gpu(0)["uuid"], []),
        (("gpus", 1, "uuid"), str(PART["uuid"]).replace("MIG", "GPU"), [0, 1]),
        (("gpus", 1, "minor_number"), gpu(0)["minor_number"], []),
        (("faults", 0, "uuid"), gpu(0)["uuid"], [1]),
        (("faults", 0, "pci_bus_id"), gpu(1)["pci_bus_id"], [0]),
    ],
)
def test_whoever_shares_a_name_is_withheld_alone(place: tuple[Any, ...], value: object, left: list[int]) -> None:
    inventory = read_report(planted(place, value), 1.0).inventory
    assert [gpu.index for gpu in inventory.gpus] == left
    assert {fault.index for fault in inventory.faults} == {0, 1, 2} - {*left}


@pytest.mark.parametrize(("name", "value"), [("uuid", FAULT["uuid"]), ("pci_bus_id", "0000:0f:00.0")])
@pytest.mark.parametrize("healthy", [True, False])
def test_faults_that_share_a_name_cost_no_other_gpu(name: str, value: str, *, healthy: bool) -> None:
    """Two GPUs that fail are told apart no better than two that do not; a third one may have the name, too."""
    twins = [{**FAULT, "uuid": "", name: value, "index": index} for index in (2, 3)]
    third = {**gpu(4), name: value} if healthy else gpu(4)
    found = read_report({**WHOLE, "gpus": [gpu(0), gpu(1), third], "faults": twins}, 1.0).inventory
    assert [each.index for each in found.gpus] == ([0, 1] if healthy else [0, 1, 4])
    assert [getattr(each, name) for each in found.faults] == [""] * (2 + healthy)
