"""What a sample of NVML may say: what cannot be true is unknown."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nri_gpu.domain.sample import MEMORY_MAX, PID_MAX, ProcessSample, UnitSample, read_targets, read_units
from tests.support import builders as make

UUID = make.uuid(0)
TOLD: Mapping[str, object] = {
    "uuid": UUID,
    "memory_used_bytes": 5,
    "memory_total_bytes": 10,
    "utilization_percent": 100,
    "memory_rate_percent": 0,
    "temperature_c": 31,
    "power_mw": 71_200,
    "power_limit_mw": 700_000,
    "sm_clock_mhz": 345,
    "memory_clock_mhz": 2619,
    "processes": [{"pid": 7, "memory_bytes": 5, "used": True}],
}


def test_what_can_be_true_is_taken() -> None:
    (unit,) = read_units([TOLD])
    assert unit.processes == (ProcessSample(7, 5, used=True),)
    assert {name: getattr(unit, name) for name in TOLD if name != "processes"} == {
        name: value for name, value in TOLD.items() if name != "processes"
    }


@pytest.mark.parametrize(
    ("field", "lie"),
    [
        ("memory_used_bytes", 11),
        ("memory_used_bytes", -1),
        ("memory_total_bytes", 0),
        ("memory_total_bytes", MEMORY_MAX + 1),
        ("utilization_percent", 101),
        ("memory_rate_percent", 2**32 - 1),
        ("temperature_c", 2**31),
        ("power_mw", 2**32 - 1),
        ("power_limit_mw", 0),
        ("sm_clock_mhz", 2**32 - 1),
        ("memory_clock_mhz", -1),
    ],
)
def test_what_lies_is_unknown_and_costs_nothing_else(field: str, lie: int) -> None:
    (unit,) = read_units([{**TOLD, field: lie}])
    assert getattr(unit, field) is None
    assert unit.temperature_c == (None if field == "temperature_c" else 31)


def test_a_process_that_lies() -> None:
    told = [
        {"pid": 7, "memory_bytes": 11},  # more than the GPU has
        {"pid": 0, "memory_bytes": 1},
        {"pid": PID_MAX + 1, "memory_bytes": 1},
    ]
    (unit,) = read_units([{**TOLD, "processes": told}])
    assert unit.processes == (ProcessSample(7, None),)


@pytest.mark.parametrize("report", [None, {}, [{}], [{**TOLD, "power_mw": "much"}], [{**TOLD, "processes": [{}]}]])
def test_what_is_no_sample(report: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_units(report)


def test_what_nvml_does_not_tell_is_unknown() -> None:
    assert read_units([{"uuid": UUID}]) == (UnitSample(uuid=UUID),)


@pytest.mark.parametrize(("rates", "most"), [((3, 5), 5), ((0, 0), 0), ((3, None), None), ((None, None), None)])
def test_the_rate_of_a_gpu(rates: tuple[int | None, int | None], most: int | None) -> None:
    unit = UnitSample(uuid=UUID, utilization_percent=rates[0], memory_rate_percent=rates[1])
    assert unit.rate_percent == most


def test_targets_are_those_of_an_inventory() -> None:
    gpu = make.mig_gpu(1)
    (target,) = read_targets([gpu])
    assert (target.index, target.pci_bus_id, target.uuid) == (1, gpu.pci_bus_id, gpu.uuid)
    assert [each.uuid for each in target.mig] == [each.uuid for each in gpu.mig]
