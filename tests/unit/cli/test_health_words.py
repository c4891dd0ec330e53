"""How health is shown: of GPUs, of MIG devices by themselves, and of those that are missed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.cli.client import with_health
from nri_gpu.cli.render import health_lines, state_of
from nri_gpu.cli.status import to_text
from nri_gpu.daemon.report import status_json
from nri_gpu.domain.health import Sign
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.health.node_health import NodeHealth
from nri_gpu.health.states import Meaning
from tests.support import builders as make
from tests.support.health import PARTS, RULES, UUIDS, at, look, with_parts, xid
from tests.unit.daemon.test_report import view

NODE = with_parts(look((), (Sign.THERMAL,)), 1, 0, 1)
STRICT = replace(RULES, other_xids=Meaning.BAD)


def ill(*, gpu: int | None = None, part: int | None = None, seconds: float = 5) -> Inventory:
    """After an XID of one of them, and a look so much later."""
    fleet = NodeHealth().after_inventory(NODE, STRICT, at(0))[0]
    event = xid(79, gpu) if gpu is not None else xid(94, 1)
    if part is not None:
        event = replace(event, gpu_instance=part + 1, compute_instance=0)
    fleet = fleet.after_event(event, STRICT, at(0))[0]
    return fleet.after_inventory(NODE, STRICT, at(seconds))[0].applied_to(NODE, STRICT)


def said(inventory: Inventory) -> dict[str, Any]:
    """What the daemon answers."""
    return status_json(view(node=replace(make.node(), inventory=inventory)))


def lines(inventory: Inventory) -> list[str]:
    return list(health_lines(said(inventory)["gpus"]))


def test_what_is_well_and_shows_nothing_is_not_worth_a_line() -> None:
    assert lines(NODE) == ["GPU 1 shows thermal"]


def test_a_mig_device_that_is_bad_by_itself() -> None:
    assert lines(ill(part=0)) == [
        "GPU 1 shows thermal",
        "MIG device 1:0 is bad since 2023-11-14 22:13:20 UTC, because of: XID 94, contained ECC error; "
        "its state changed 1 times",
    ]
    assert lines(ill(part=0, seconds=50))[-1].startswith("MIG device 1:0 is recovering since ")


def test_what_a_mig_device_has_of_its_gpu_is_said_of_the_gpu() -> None:
    (line,) = lines(ill(gpu=1))
    assert line.startswith("GPU 1 is bad since 2023-11-14 22:13:20 UTC, because of: XID 79")


def test_in_the_table_of_gpus() -> None:
    gpu, first, second = ill(part=0).units[1:]
    assert state_of(gpu) == "it is in MIG mode"
    assert state_of(first).startswith("bad since ")
    assert state_of(second) == "ok, thermal"


@pytest.mark.parametrize(
    "inventory", [ill(gpu=1), ill(part=0), ill(part=1), NODE], ids=["gpu", "part", "other", "well"]
)
def test_the_daemons_word_is_taken_for_who_did_not_listen(
    inventory: Inventory,
) -> None:
    units = with_health(NODE, said(inventory)).units
    assert [state_of(unit) for unit in units] == [state_of(unit) for unit in inventory.units]


def test_a_daemon_of_before_leaves_it_as_it_is() -> None:
    assert with_health(NODE, {"gpus": [{"uuid": UUIDS[0]}]}) is NODE


def test_who_is_missed_is_said_with_since_when_and_why() -> None:
    fleet = NodeHealth().after_inventory(NODE, RULES, at(0))[0]
    shown = look(())
    fleet = fleet.after_inventory(shown, RULES, at(9), frozenset({PARTS[0]}))[0]
    status = said(fleet.applied_to(shown, RULES))
    why = "bad since 2023-11-14 22:13:29 UTC: GPU is lost: NVML does not list it any more"
    (missed,) = status["faults"]
    assert missed == {"index": 1, "uuid": UUIDS[1], "pci_bus_id": "0000:11:00.0", "reason": why, "since_s": None}
    assert f"GPU 1 cannot be described: {why}" in to_text(status, 0.0)


def test_a_fault_without_a_name_is_said_too() -> None:
    status = said(look((), faults=(GpuFault(1, "nvmlDeviceGetUUID: GPU is lost (15)"),)))
    assert "GPU 1 cannot be described: nvmlDeviceGetUUID: GPU is lost (15)" in to_text(status, 0.0)
