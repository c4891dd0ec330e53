from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.cli.render import Times
from nri_gpu.cli.status_page import faults
from nri_gpu.daemon.answers import KubeletStatus, PolicyStatus
from nri_gpu.daemon.view import status_of
from nri_gpu.domain.allocation import AllocatedDevice, ResourceStatus
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import Health, HealthState, History, Transition, TransitionKind
from nri_gpu.domain.node import GpuFault, Node
from nri_gpu.domain.sample import UnitSample
from nri_gpu.ledger.holders import Releasing
from nri_gpu.ledger.ledger import GrantPhase, Ledger
from nri_gpu.ledger.reservations import reservation_of
from nri_gpu.policy.read import parse_policy
from nri_gpu.usage.idle import HolderLook, HolderUse, IdleSince
from nri_gpu.usage.usage_controller import SampledUnit, Usages
from tests.support import builders as make
from tests.support.ledgers import prepared
from tests.support.views import CLOCK, NOW, OTHER, TRAIN, status_json, view


def said(ledger: Ledger) -> dict[str, Any]:
    found: dict[str, Any] = status_json(view(ledger))
    return found


def gpu(index: int, ledger: Ledger | None = None, node: Node | None = None) -> dict[str, Any]:
    """What is said of one GPU."""
    found: dict[str, Any] = status_json(view(ledger, node))["gpus"][index]
    return found


CONNECTED = view().connection
GRANTING = {
    "all is well": ({}, True),
    "not connected": ({"connection": replace(CONNECTED, ready=False)}, False),
    "no list": ({"connection": replace(CONNECTED, list_fault="too large")}, False),
    "NVML has never answered": ({"node": make.node(fault="no driver")}, False),
    "NVML answers no more": ({"inventory_fault": "it hangs"}, False),
    "no driver files": ({"node": replace(make.node(), driver_fault="not staged")}, False),
    "no policy": ({"policy": PolicyStatus("policy.toml", "line 3")}, False),
    "a rejected file": ({"policy": PolicyStatus("policy.toml", "", "line 3")}, True),
}


@pytest.mark.parametrize(("fields", "grants"), GRANTING.values(), ids=GRANTING)
def test_it_grants_where_status_names_no_fault(fields: Any, grants: bool) -> None:  # noqa: ANN401 - of a View
    """The probe that reads the liveness file, and `status --probe`, say the same."""
    seen = view(**fields)
    assert seen.grants == grants == (not faults(status_of(seen), Times(NOW)))


def test_every_gpu_is_there_and_free() -> None:
    said = status_json(view())
    assert [each["place"] for each in said["gpus"]] == ["0", "1", "2", "3"]
    assert not any(each["unavailable"] or each["holders"] for each in said["gpus"])


def test_each_gpu_has_its_pool_and_the_ways_to_it() -> None:
    policy = parse_policy(
        {"pool": [{"name": "c", "device": ["1"]}], "kubelet": {"enabled": True, "pool": "c"}}, "p.toml"
    )
    found = status_json(view(settings=policy))["gpus"]
    assert [(each["pool"], each["offered_to"]) for each in found[:2]] == [("", ["annotation"]), ("c", ["kubelet"])]


def test_a_holder_with_its_mode_and_since_when() -> None:
    ledger = make.ledger(make.entry(1, to=TRAIN, since=CLOCK - 90))
    held = gpu(1, ledger)
    assert (held["mode"], held["unavailable"]) == ("exclusive", "held exclusively by ml/train")
    (holder,) = held["holders"]
    expected = {"pod": "train", "container": "main", "since_s": NOW - 90, "running": True}
    assert holder.items() >= expected.items()
    assert gpu(0, ledger)["holders"] == []


RELEASING = Releasing(TRAIN.pod.uid, "ml/train", CLOCK - 2, 60.0, 2)
SHARED = make.ledger(*(make.entry(1, to=each, mode=Mode.SHARED) for each in (TRAIN, OTHER)))
UNAVAILABLE = {
    "shared by two": (SHARED, "held in shared mode by ml/other, ml/train"),
    "a foreign holder": (
        make.ledger(others=[make.foreign(1)]),
        "held by ml/plugin (not through nri-gpu), whose container main opens 1 GPU",
    ),
    "its number was another GPU's": (
        make.ledger(others=[replace(make.foreign(1), container="main")]),
        "held by ml/plugin (container main still opens its device number)",
    ),
    "a device that NVIDIA's DRA driver prepared": (
        make.ledger(others=[replace(make.foreign(1), device="gpu-6")]),
        "held by ml/plugin (by a claim of gpu.nvidia.com, gpu-6)",
    ),
    "a claim that no container uses": (
        prepared(Ledger(), make.prepared_claim(1, name="idle")),
        "held exclusively by claim ml/idle",
    ),
    "a claim that a container uses": (
        prepared(make.ledger(make.entry(1, to=TRAIN)), make.prepared_claim(1)),
        "held exclusively by ml/train",
    ),
    "monitored": (make.ledger(make.entry(1, to=TRAIN, mode=None)), ""),
    "just released": (
        make.ledger().with_releasing({make.uuid(1): RELEASING}),
        "just released by ml/train: 2 processes still hold it",
    ),
    "released and held again": (
        make.ledger(make.entry(1, to=TRAIN)).with_releasing({make.uuid(1): RELEASING}),
        "held exclusively by ml/train",
    ),
}


@pytest.mark.parametrize(("ledger", "sentence"), UNAVAILABLE.values(), ids=UNAVAILABLE)
def test_why_a_gpu_is_unavailable(ledger: Ledger, sentence: str) -> None:
    found = gpu(1, ledger)
    assert found["unavailable"] == sentence
    others = list(ledger.external.values())
    assert found["foreign"] == [each.pod for each in others if not each.container]
    assert found["opened_by"] == [{"pod": each.pod, "container": "main"} for each in others if each.container]
    assert len(found["holders"]) == len(ledger.entries)


def test_a_monitor_is_shown_and_holds_nothing() -> None:
    """But what the kubelet allocated to it; and what it holds again beside a grant is an overlap."""
    exporter = replace(make.foreign(0, 1), watched=frozenset({make.uuid(1)}), regained=frozenset({make.uuid(0)}))
    ledger = make.ledger(make.entry(0, to=TRAIN), others=[exporter])
    watched, held = gpu(1, ledger), gpu(0, ledger)
    assert (watched["monitors"], watched["foreign"], watched["unavailable"]) == (["ml/plugin"], [], "")
    assert (held["monitors"], held["foreign"]) == ([], ["ml/plugin"])
    assert said(ledger)["external"] == [
        {
            "pod": "ml/plugin",
            "container": "main",
            "container_id": "plugin.main",
            "gpu_uuids": [make.uuid(0)],
            "watched": [make.uuid(1)],
            "prepared": "",
            "by": "",
        }
    ]
    (overlap,) = said(ledger)["overlaps"]
    assert (overlap["gpu_uuid"], len(overlap["pods"]), overlap["granted"]) == (make.uuid(0), 2, False)
    assert said(ledger)["conflicts"] == [
        {
            "pod": "ml/plugin",
            "container": "main",
            "container_id": "plugin.main",
            "gpu_uuids": [make.uuid(0)],
            "holders": ["ml/train"],
        }
    ]


def test_an_overlap_of_grants_is_no_conflict() -> None:
    seen = said(make.ledger(make.entry(0, to=TRAIN), make.entry(0, to=OTHER)))
    assert [each["granted"] for each in seen["overlaps"]] == [True]
    assert seen["conflicts"] == []


def test_who_monitors_a_gpu_is_shown_and_holds_none() -> None:
    watched = gpu(1, make.ledger(make.entry(1, to=TRAIN, mode=None)))
    assert [(each["pod"], each["mode"]) for each in watched["holders"]] == [("train", "admin")]
    assert watched["mode"] == ""


def test_what_is_waited_for() -> None:
    left_by = {"pod": "ml/train", "pod_uid": TRAIN.pod.uid, "since_s": NOW - 2, "offered_s": NOW + 58, "processes": 2}
    assert gpu(1, make.ledger().with_releasing({make.uuid(1): RELEASING}))["left_by"] == left_by


def test_each_resource_at_the_kubelet() -> None:
    assert status_json(view())["kubelet"] == {"enabled": False, "resources": [], "guard_alone": ""}
    only = status_json(view(kubelet=KubeletStatus(True, (), "why")))["kubelet"]
    assert only == {"enabled": True, "resources": [], "guard_alone": "why"}
    resources = (
        ResourceStatus("nvidia.com/gpu", True, NOW - 200, ""),
        ResourceStatus("nvidia.com/mig-1g.5gb", False, None, "no kubelet listens"),
    )
    assert status_json(view(kubelet=KubeletStatus(True, resources)))["kubelet"]["resources"] == [
        {"resource": "nvidia.com/gpu", "registered": True, "since_s": NOW - 200, "fault": ""},
        {"resource": "nvidia.com/mig-1g.5gb", "registered": False, "since_s": None, "fault": "no kubelet listens"},
    ]


def test_a_lapsed_grant_holds_nothing() -> None:
    assert gpu(1, make.ledger(make.entry(1, phase=GrantPhase.LAPSED)))["holders"] == []


def test_since_a_time_that_never_was_is_null() -> None:
    (holder,) = gpu(1, make.ledger(make.entry(1, phase=GrantPhase.CREATED, since=math.inf)))["holders"]
    assert (holder["since_s"], holder["running"]) == (None, False)


def test_mig_devices_come_below_their_gpu() -> None:
    said = status_json(view(node=make.node([make.mig_gpu(0), make.gpu(1)])))
    places = [(each["kind"], each["place"]) for each in said["gpus"]]
    assert places == [("gpu", "0"), ("mig", "0:0"), ("mig", "0:1"), ("gpu", "1")]


def test_a_holder_of_a_gpu_that_is_gone_is_not_forgotten() -> None:
    said = status_json(view(make.ledger(make.entry(3, to=TRAIN)), make.node([make.gpu(0)])))
    assert [each["pod"] for each in said["gone"]] == ["train"]


def test_a_fault_of_the_inventory_itself_comes_first() -> None:
    node = make.node()
    node = replace(node, inventory=replace(node.inventory, fault="no driver"))
    assert status_json(view(node=node, inventory_fault="other"))["node"]["inventory_fault"] == "no driver"


def history(*transitions: Transition) -> History:
    return History(began_s=NOW - 9).having(transitions, NOW - 5)


def test_what_happened_to_the_node_is_counted_and_told() -> None:
    what = Transition(kind=TransitionKind.GPU, what="GPU 1 is gone", uuid=make.uuid(1), index=1, worse=True)
    said = status_json(view(history=history(what)))["transitions"]
    last = {"number": 1, "at_s": NOW - 5, "kind": "gpu", "gpu_uuid": make.uuid(1), "index": 1, "worse": True}
    last["what"] = "GPU 1 is gone"
    assert said == {"since_s": NOW - 9, "total": 1, "counts": {"gpu": 1}, "last": [last]}


def test_since_when_something_is_wrong() -> None:
    node = make.node([make.gpu(0, unavailable="no permission"), make.gpu(1)])
    inventory = replace(node.inventory, faults=(GpuFault(3, "gone"),))
    kinds = history(
        Transition(kind=TransitionKind.AVAILABLE, what="", uuid=make.uuid(0), index=4),
        Transition(kind=TransitionKind.DESCRIPTION, what="", index=3),
        Transition(kind=TransitionKind.ANSWER, what=""),
    )
    said = status_json(view(node=replace(node, inventory=inventory), history=kinds, inventory_fault="NVML hangs"))
    assert [each["unavailable_since_s"] for each in said["gpus"]] == [NOW - 5, None]
    (fault,) = said["faults"]
    assert (fault["index"], fault["reason"], fault["since_s"]) == (3, "gone", NOW - 5)
    assert said["node"]["inventory_fault_since_s"] == NOW - 5
    assert status_json(view(history=kinds))["node"]["inventory_fault_since_s"] is None


def test_a_bad_gpu_is_unavailable_since_it_is_bad() -> None:
    bad = make.gpu(0, unavailable="bad", health=Health(HealthState.BAD, NOW - 70, "XID 79", 1))
    assert gpu(0, node=make.node([bad]))["unavailable_since_s"] == NOW - 70


def test_a_gpu_that_an_earlier_device_plugin_gave_has_one_holder() -> None:
    """PodResources lists it for the pod, and a container of the pod opens it."""
    other = make.foreign(0)
    device = AllocatedDevice("nvidia.com/gpu", make.uuid(0))
    to = make.container(of=make.pod("plugin", id=other.pod_id))
    ledger = make.ledger(others=[other]).with_reservation(
        reservation_of(device, make.grant(0, to=to), Mode.EXCLUSIVE, 0.0, None)
    )
    found, *_ = status_of(view(ledger)).gpus
    assert (found.holders, found.foreign, found.mode) == ((), ("ml/plugin",), "exclusive")
    assert found.unavailable == "held exclusively by ml/plugin"
    found, *_ = status_of(view(replace(ledger, external={}))).gpus
    assert [each.reserved for each in found.holders] == [True]


# --- what GPUs and holders do -----------------------------------------------------------------------------------------

USED = UnitSample(uuid=make.uuid(0), memory_used_bytes=5, memory_total_bytes=9, power_mw=71_200)
LOOK = HolderLook(at=CLOCK, processes=frozenset({(7, 1)}), memory_bytes=4, utilization_percent=3)


def used(use: HolderUse) -> dict[str, Any]:
    """What is said of GPU 0, whose holder does so."""
    usages = Usages(units={make.uuid(0): SampledUnit(CLOCK - 3, USED)}, holders={(TRAIN.id, make.uuid(0)): use})
    found: dict[str, Any] = status_json(view(make.ledger(make.entry(0, 1, to=TRAIN)), usages=usages))
    return found


def test_the_last_sample_of_a_gpu() -> None:
    usage = used(HolderUse(LOOK))["gpus"][0]["usage"]
    assert usage.pop("sampled_s") == NOW - 3
    assert {name: value for name, value in usage.items() if value is not None} == {
        "memory_used_bytes": 5,
        "memory_total_bytes": 9,
        "power_w": 71.2,
    }


def test_a_holder_on_each_of_its_gpus() -> None:
    said = used(HolderUse(LOOK, IdleSince(since=CLOCK - 60, samples=2, no_process=False)))
    first, second = (gpu["holders"][0]["usage"] for gpu in said["gpus"][:2])
    idle = {"no_process": False, "since_s": NOW - 60, "samples": 2}
    assert first == {"memory_bytes": 4, "utilization_percent": 3, "processes": 1, "idle": idle}
    assert second is None, "of the other nothing is known"


def test_a_holder_whose_processes_are_hidden() -> None:
    """All that is on the GPU tells that it is idle, and is not shown as the holder's."""
    look = HolderLook(at=CLOCK, own=False, processes=LOOK.processes, memory_bytes=9, used=False)
    usage = used(HolderUse(look, IdleSince(since=CLOCK, samples=1, no_process=False)))["gpus"][0]["holders"][0]["usage"]
    assert (usage["memory_bytes"], usage["processes"], usage["utilization_percent"]) == (None, None, None)
    assert usage["idle"]
