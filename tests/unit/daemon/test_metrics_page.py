"""What Prometheus reads: each metric's value, series for holders alone, and no page that keeps the runtime waiting."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from nri_gpu.daemon import metrics_page
from nri_gpu.daemon.answers import (
    AllocationStatus,
    ObservedFinding,
    ObserverStatus,
    PolicyStatus,
    StrayStatus,
)
from nri_gpu.daemon.metrics_page import GRANTS_MAX, pages
from nri_gpu.daemon.view import View
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.decision import Code
from nri_gpu.domain.finding_kind import FindingKind
from nri_gpu.domain.gpu import GpuUuid, PciBusId
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import HealthNotes, HealthState
from nri_gpu.domain.node import GpuFault, Inventory, KernelGpu
from nri_gpu.domain.sample import UnitSample
from nri_gpu.health.xids import ActionClass
from nri_gpu.ledger.ledger import GrantPhase
from nri_gpu.plugin.counts import BOUNDS_S, Failure, Outcome
from nri_gpu.policy.metrics_settings import MetricsSettings
from nri_gpu.policy.model import Policy
from nri_gpu.stray.judge import Kind, StrayUse
from nri_gpu.system.child import Unkilled
from nri_gpu.usage.idle import HolderLook, HolderUse, IdleSince
from nri_gpu.usage.usage_controller import SampledUnit, Usages
from tests.support import builders as make
from tests.support.daemon import UUIDS
from tests.support.metrics import VIEW, Scraped, entry, ledger, scraped, view
from tests.support.plugin import node
from tools.messages import alert_rules

DOCS: Final = Path(__file__).parents[3] / "docs" / "metrics.md"
GRANT: Final = "nri_gpu_grant_info"
HOLDERS: Final = 10_000


def text(of: View) -> str:
    return b"".join(pages(of)).decode()


IDLE: Final = HolderUse(
    HolderLook(at=0.0, processes=frozenset({(1, 1)}), memory_bytes=5, used=False, utilization_percent=0),
    IdleSince(since=-63.0, samples=2, no_process=False),
)
BUSY: Final = HolderUse(HolderLook(at=0.0, processes=frozenset({(2, 1)}), memory_bytes=2, used=True))
USED: Final[dict[str, Any]] = {
    "settings": Policy(metrics=MetricsSettings(usage=True)),
    "ledger": ledger(entry(at, UUIDS[:1]) for at in (1, 2, 3)),
    "usages": Usages(
        units={
            GpuUuid(UUIDS[0]): SampledUnit(
                -3.0,
                UnitSample(uuid=GpuUuid(UUIDS[0]), memory_used_bytes=7, memory_total_bytes=9, utilization_percent=93),
            )
        },
        holders={
            (ContainerId(f"container-{at}"), GpuUuid(UUIDS[0])): use
            for at, use in enumerate((IDLE, BUSY, HolderUse(HolderLook(at=0.0))), 1)
        },
    ),
}


OPEN, UNUSED, UNSEEN = (
    AllocationStatus(
        gpu_uuid=UUIDS[0], namespace="ml", pod=pod, container="main", by="CDI", opened=opened, since_s=-70.0
    )
    for pod, opened in (("open", True), ("unused", False), ("unseen", None))
)
OBSERVER: Final = ObserverStatus(
    allocations=(
        OPEN,
        UNUSED,
        UNUSED,
        replace(UNUSED, pod="ended", last_opened_s=-30.0),
        UNSEEN,
        AllocationStatus(gpu_uuid="", device="MIG-1", container="web"),
    ),
    findings=(ObservedFinding(kind=FindingKind.TWICE, message="a"), ObservedFinding(kind="of a newer one", message="")),
)


def scrape(**changed: object) -> Scraped:
    return scraped(text(view(**changed)))


def test_a_healthy_node() -> None:
    said = scrape()
    assert said.value("nri_gpu_connected") == said.value("nri_gpu_node_ready") == 1
    assert (
        said.value("nri_gpu_policy_fault")
        == said.value("nri_gpu_policy_rejected")
        == said.value("nri_gpu_undescribed_gpus")
        == 0
    )
    assert [each["uuid"] for each in said.series("nri_gpu_gpu_available")] == UUIDS
    assert said.series(GRANT) == []


STUCK: Final = Unkilled("nvidia-smi", UUIDS[0], 4711, 7.0)
UNLOADED: Final = replace(node(), module_version="", inventory=replace(node().inventory, simulated=False))
FAULTS = {
    "away": ({"connection": replace(VIEW.connection, ready=False)}, "nri_gpu_connected", 0),
    "a simulation without a runtime": ({"connection": replace(VIEW.connection, joined=False)}, "nri_gpu_connected", 0),
    "guard": ({"guard_connected": False}, "nri_gpu_guard_connected", 0),
    "ungranted": ({"ungranted": 3}, "nri_gpu_ungranted_containers", 3),
    "old": ({"inventory_age_s": 301.5}, "nri_gpu_inventory_age_seconds", 301.5),
    "NVML": ({"inventory_fault": "it hangs"}, "nri_gpu_inventory_fault", 1),
    "a rejected policy": ({"policy": PolicyStatus("policy.toml", "", "line 3")}, "nri_gpu_policy_rejected", 1),
    "policy": ({"policy": PolicyStatus("policy.toml", "bad")}, "nri_gpu_policy_fault", 1),
    "no driver": ({"node": replace(node(), inventory=Inventory(taken_at=0, fault="gone"))}, "nri_gpu_node_ready", 0),
    "unloaded": ({"node": UNLOADED}, "nri_gpu_node_ready", 0),
    "no files": ({"node": replace(node(), driver=None, driver_fault="being searched for")}, "nri_gpu_node_ready", 0),
}


@pytest.mark.parametrize(("changed", "name", "value"), FAULTS.values(), ids=FAULTS)
def test_each_fault_shows(changed: dict[str, object], name: str, value: float) -> None:
    assert scrape(**changed).value(name) == value


DIGEST: Final = "3f" * 32


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        (PolicyStatus("policy.toml", "", digest=DIGEST), [DIGEST]),
        (PolicyStatus("policy.toml", "", "line 3", DIGEST), [DIGEST]),
        (PolicyStatus("the built-in defaults", ""), ["built-in"]),
        (PolicyStatus("policy.toml", "line 3"), []),
    ],
    ids=["in force", "in force beside a rejected file", "every default", "none"],
)
def test_the_policy_text_in_force_is_a_label(policy: PolicyStatus, shown: list[str]) -> None:
    for observer in (None, OBSERVER):
        series = scrape(policy=policy, observer=observer).series("nri_gpu_policy_info")
        assert [each["digest"] for each in series] == shown


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"guard_connected": None}, "nri_gpu_guard_connected"),
        ({"inventory_age_s": None}, "nri_gpu_inventory_age_seconds"),
        ({"stray": StrayStatus(enabled=True)}, "nri_gpu_stray_uses"),
    ],
)
def test_what_is_not_known_has_no_sample(changed: dict[str, object], name: str) -> None:
    assert scrape(**changed).series(name) == []


def test_what_is_known_of_each_gpus_health() -> None:
    uuid = make.uuid(0)
    gpus = (make.gpu(0), make.gpu(1))
    now = view(
        node=replace(node(), inventory=make.inventory(gpus)),
        xids={(uuid, ActionClass.RESTART): 7},
        notes={uuid: HealthNotes(reset="a reset is due", namespaces=("a", "b", "c"))},
    )
    said = scraped(text(now))
    assert said.value("nri_gpu_xids_total", uuid=uuid, action="restart-application") == 7
    assert said.value("nri_gpu_xids_total", uuid=uuid, action="reset") == 0
    for name, values in (("reset_due", (1, 0)), ("failing_namespaces", (3, 0))):
        found = [said.value(f"nri_gpu_gpu_{name}", uuid=gpu.uuid, index=gpu.place) for gpu in gpus]
        assert found == [*values], name


def test_names_that_strangers_chose_are_no_commands_to_a_terminal() -> None:
    given = replace(UNUSED, gpu_uuid="", device="a\x1b[2J", namespace="b\u202e", pod="c\x07", container="d\x00")
    said = text(view(observer=ObserverStatus(allocations=(given,))))
    assert said.replace("\n", "").isprintable()
    assert scraped(said).series("nri_gpu_allocation_info") == [
        {"uuid": "a?[2J", "namespace": "b?", "pod": "c?", "container": "d?", "by": given.by}
    ]


def test_an_observer_shows_allocations_and_nothing_of_grants() -> None:
    said = scrape(observer=OBSERVER)
    rows = said.series("nri_gpu_allocation_info")
    assert [(each["uuid"], each["pod"], each["by"]) for each in rows] == [
        *((UUIDS[0], pod, "CDI") for pod in ("open", "unused", "ended", "unseen")),
        ("MIG-1", "", ""),
    ]
    idle = "nri_gpu_allocation_unopened_seconds"
    assert {each["pod"]: said.value(idle, **each) for each in said.series(idle)} == {
        "open": 0,
        "unused": 70,
        "ended": 30,
    }
    found = "nri_gpu_observer_findings"
    assert {each["kind"]: said.value(found, **each) for each in said.series(found)} == {
        kind: kind is FindingKind.TWICE for kind in FindingKind
    }
    assert (
        said.types.keys() & {GRANT, "nri_gpu_connected", "nri_gpu_node_ready", "nri_gpu_create_container_seconds"}
        == set()
    )
    assert said.value("nri_gpu_inventory_fault") == 0
    assert scrape().types.keys() & {idle, found, "nri_gpu_allocation_info"} == set()


def test_the_alerts_that_can_fire_of_an_observer_are_those_of_the_docs() -> None:
    listed = DOCS.read_text().partition("These alerts can fire there:")[2].partition(". ")[0]
    names = {name for name, _ in scrape(observer=OBSERVER).samples}
    can = [each["alert"] for each in alert_rules() if set(re.findall(r"\bnri_gpu_\w+", each["expr"])) <= names]
    assert re.findall(r"`(\w+)`", listed) == can


def test_a_process_that_cannot_be_killed() -> None:
    (labels,) = scrape(unkilled=(STUCK,)).series("nri_gpu_unkilled_process_since_timestamp_seconds")
    assert labels == {"program": "nvidia-smi", "uuid": UUIDS[0], "pid": "4711"}


def test_what_was_counted() -> None:
    stray = StrayStatus(True, 1.0, "", (StrayUse(kind=Kind.UNGRANTED, message="", processes=()),))
    now = view(restarts={"nvml": 2}, health_transitions={HealthState.BAD: 4}, stray=stray)
    now.counts.refused(Code.GPU_BUSY)
    now.counts.refused(Code.NOT_GRANTED, Outcome.START_REFUSED)
    now.counts.failures[Failure.LATE] += 1
    now.counts.reconnects += 5
    for elapsed_ms in (0.4, 0.5, 3, 2500):
        now.counts.create.add(int(elapsed_ms * 1e6))
    said = scraped(text(now))
    assert said.value("nri_gpu_decisions_total", outcome="refused", code="gpu-busy") == 1
    assert said.value("nri_gpu_decisions_total", outcome="start-refused", code="not-granted") == 1
    assert said.value("nri_gpu_decisions_total", outcome="granted", code="") == 0
    assert said.value("nri_gpu_requests_failed_total", reason="late") == 1
    assert said.value("nri_gpu_reconnects_total") == 5
    assert said.value("nri_gpu_child_restarts_total", child="nvml") == 2
    assert said.value("nri_gpu_health_transitions_total", state="bad") == 4
    assert [said.value("nri_gpu_stray_uses", kind=kind) for kind in Kind] == [kind is Kind.UNGRANTED for kind in Kind]
    classes = [said.value("nri_gpu_create_container_seconds_bucket", le=str(bound)) for bound in BOUNDS_S]
    assert classes == [2, 2, 2, *[3] * (len(BOUNDS_S) - 3)]
    assert said.value("nri_gpu_create_container_seconds_count") == 4
    assert said.value("nri_gpu_create_container_seconds_sum") == pytest.approx(2.5039)


def test_a_withheld_gpu_and_one_that_is_lost() -> None:
    inventory = node().inventory
    bad = replace(inventory.gpus[1], unavailable="XID 79")
    mig = replace(inventory.gpus[2], mig_enabled=True)  # its parts can be granted
    faulty = replace(inventory, gpus=(inventory.gpus[0], bad, mig), faults=(GpuFault(3, "GPU is lost", uuid=UUIDS[3]),))
    said = scrape(node=replace(node(), inventory=faulty))
    model = inventory.gpus[0].model
    states = [said.value("nri_gpu_gpu_available", uuid=UUIDS[at], index=str(at), model=model) for at in range(2)]
    assert states == [1, 0]
    assert [each["index"] for each in said.series("nri_gpu_gpu_available")] == ["0", "1"]
    assert said.value("nri_gpu_undescribed_gpus") == 1
    away = [KernelGpu(pci_bus_id=PciBusId(f"0000:7{bus}:00.0"), reason="away", given=bus > 0) for bus in range(2)]
    said = scrape(node=replace(node(), inventory=replace(faulty, unlisted=tuple(away))))
    assert said.value("nri_gpu_undescribed_gpus") == 2, "one that this machine was not given is no fault"
    away = [KernelGpu(pci_bus_id=PciBusId("0000:70:00.0"), reason="bound to vfio-pci", set_aside=True)]
    said = scrape(node=replace(node(), inventory=replace(faulty, unlisted=tuple(away))))
    assert [said.value(f"nri_gpu_{kind}_gpus") for kind in ("undescribed", "set_aside")] == [1, 1]


def test_each_holder_of_a_shared_gpu_and_each_gpu_of_a_holder() -> None:
    entries = [entry(1, UUIDS[:1]), entry(2, UUIDS[:1]), entry(3, UUIDS[1:3], Mode.EXCLUSIVE)]
    lapsed = replace(entry(4, UUIDS[3:]), phase=GrantPhase.LAPSED)
    said = scrape(ledger=ledger([*entries, lapsed, entry(5, ())]))
    found = [(each["uuid"], each["pod"], each["mode"]) for each in said.series(GRANT)]
    assert found == [
        (UUIDS[0], "train-1", "shared"),
        (UUIDS[0], "train-2", "shared"),
        (UUIDS[1], "train-3", "exclusive"),
        (UUIDS[2], "train-3", "exclusive"),
    ]
    assert said.series(GRANT)[0] | {"pod": ""} == {
        "uuid": UUIDS[0],
        "namespace": "ml",
        "pod": "",
        "container": "main",
        "mode": "shared",
    }
    assert said.value("nri_gpu_grants") == 3
    assert said.value("nri_gpu_prepared_claims") == 0


def test_a_container_and_its_successor_are_one_series() -> None:
    said = scrape(ledger=ledger([entry(1, UUIDS[:1], pod="web"), entry(2, UUIDS[:1], pod="web")]))
    assert len(said.series(GRANT)) == 1


def test_a_name_that_is_no_label_as_it_stands() -> None:
    assert scrape(ledger=ledger([entry(1, UUIDS[:1], pod='a"b\\c\nd')])).series(GRANT)[0]["pod"] == 'a"b\\c\nd'


def test_ten_thousand_holders_are_the_most_and_only_those_of_now() -> None:
    """The pods of yesterday leave no series, and all other families are as large as with no pod at all."""
    few = scrape(ledger=ledger(entry(at, UUIDS[:1]) for at in range(3)))
    many = scrape(ledger=ledger(entry(at, UUIDS[:2]) for at in range(HOLDERS)))
    assert len(many.series(GRANT)) == GRANTS_MAX
    assert many.value("nri_gpu_grants_left_out") == 2 * HOLDERS - GRANTS_MAX
    assert len(few.samples) - 3 == len(many.samples) - GRANTS_MAX < 200
    assert few.samples.keys() == scrape(ledger=ledger(entry(at, UUIDS[:1]) for at in range(3))).samples.keys()


def test_a_page_is_short_and_a_scrape_takes_less_than_100_ms() -> None:
    now = view(ledger=ledger(entry(at, UUIDS[at % 4 :][:1]) for at in range(HOLDERS)))
    assert any(longest_page_s(now) < 0.005 for _ in range(10))
    assert any(sum(page_times(now)) < 0.1 for _ in range(5))


def longest_page_s(now: View) -> float:
    """When no line is known yet; two longer ones may be the machine's."""
    metrics_page._grant_line.cache_clear()
    return sorted(page_times(now))[-3]


def page_times(now: View) -> list[float]:
    """Seconds that each page took."""
    found, began = [], time.thread_time()
    for _ in pages(now):
        found.append(time.thread_time() - began)
        began = time.thread_time()
    return found


def test_what_gpus_and_holders_do_is_told_where_it_is_known() -> None:
    said = scrape(**USED)
    gpu = {"uuid": UUIDS[0], "index": "0", "model": scrape().series("nri_gpu_gpu_available")[0]["model"]}
    assert said.value("nri_gpu_gpu_memory_used_bytes", **gpu) == 7
    assert said.value("nri_gpu_gpu_utilization_percent", **gpu) == 93
    assert said.value("nri_gpu_gpu_sample_age_seconds", **gpu) == 3
    holder = {"uuid": UUIDS[0], "namespace": "ml", "pod": "train-1", "container": "main"}
    assert said.value("nri_gpu_holder_memory_used_bytes", **holder) == 5
    assert said.value("nri_gpu_holder_idle_seconds", **holder) == 63
    assert len(said.series("nri_gpu_holder_idle_seconds")) == 2, "nobody can tell of the third"
    assert said.value("nri_gpu_holder_idle_seconds", **{**holder, "pod": "train-2"}) == 0
    assert len(said.series("nri_gpu_gpu_memory_total_bytes")) == 1, "of a GPU without a sample nothing is known"


def test_what_gpus_do_is_off_by_default() -> None:
    assert scrape(ledger=USED["ledger"], usages=USED["usages"]).types.keys() == scrape().types.keys()


def test_the_metrics_of_holders_have_bounds_and_short_pages() -> None:
    holders = {ContainerId(f"container-{at}"): entry(at, UUIDS[:2]) for at in range(HOLDERS)}
    uses = {(id_, GpuUuid(uuid)): IDLE for id_ in holders for uuid in UUIDS[:2]}
    now = view(ledger=ledger(holders.values()), settings=USED["settings"], usages=Usages(holders=uses))
    assert len(scraped(b"".join(pages(now)).decode()).series("nri_gpu_holder_memory_used_bytes")) == GRANTS_MAX
    assert any(sorted(page_times(now))[-3] < 0.005 for _ in range(10))


def test_the_table_in_the_docs_is_true() -> None:
    rows = re.findall(r"^\| `(nri_gpu_\w+)` \| (\w+) \|([^|]*)\|", DOCS.read_text(), re.MULTILINE)
    daemon = scrape(**USED, unkilled=(STUCK,), held={("ml", "", "shared"): 2.5})
    observer = scrape(observer=OBSERVER)
    said = Scraped({**observer.types, **daemon.types}, {**observer.samples, **daemon.samples})
    # The library reads a counter's name without `_total`.
    families = {(f"{name}_total" if kind == "counter" else name, kind) for name, kind in said.types.items()}
    assert {(name, kind) for name, kind, _ in rows} == families
    for name, kind, labels in rows:
        series = said.series(f"{name}_count" if kind == "histogram" else name)
        assert set(series[0]) == set(re.findall(r"`(\w+)`", labels)), name
