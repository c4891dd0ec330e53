"""The text that Prometheus reads, made from a view of the daemon when it asks; no other module imports its library.

It comes in pages: the loop that writes them answers the runtime between two pages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from nri_gpu import __version__
from nri_gpu.daemon.view import View
from nri_gpu.decision.eligible import node_fault
from nri_gpu.decision.overlaps import overlaps
from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.decision import Code
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, MigPart, Unit, health_of
from nri_gpu.domain.health import NO_NOTES, HealthState, Sign
from nri_gpu.health.xid_log import by_action
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.plugin.counts import BOUNDS_S, REFUSALS, Failure, Outcome
from nri_gpu.stray.judge import Kind

__all__ = ["CONTENT_TYPE", "GRANTS_MAX", "PAGE_S", "pages"]

GRANTS_MAX: Final = 10_000  # series of nri_gpu_grant_info; more than 500 pods with 16 GPUs each
PAGE_S: Final = 0.001
GRANT_INFO: Final = "nri_gpu_grant_info"
GRANT_LABELS: Final = ("uuid", "namespace", "pod", "container", "mode")
CHILDREN: Final = ("nvml", "events")
# Every outcome with every code it may have: each series is there from the start, so that its first increase counts.
DECISIONS: Final = (
    *((outcome, None) for outcome in Outcome if outcome not in REFUSALS),
    *((outcome, code) for outcome in REFUSALS for code in Code),
)


class OneFamily(Struct, frozen=True):
    """A collector of one family."""

    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family


def pages(view: View) -> Iterator[bytes]:
    """Yield the text, in pages that take about PAGE_S each to make."""
    for family in _families(view):
        yield generate_latest(OneFamily(family))
    yield from _grant_pages(view.ledger)


def _grant_pages(ledger: Ledger) -> Iterator[bytes]:
    """Yield one series for each GPU and each container that holds it, also if several containers share it.

    Containers of one pod may have one name: the one that is ending, and its successor. They are one series.
    """
    seen: set[tuple[str, ...]] = set()
    page, until, left_out = [generate_latest(OneFamily(_grant_info()))], time.perf_counter() + PAGE_S, 0
    for entry in ledger.entries.values():
        grant = entry.grant
        for uuid in grant.held if entry.holds else ():
            labels = (uuid, grant.namespace, grant.pod_name, grant.container_name, grant.mode or "")
            if labels in seen:
                continue
            if len(seen) >= GRANTS_MAX:
                left_out += 1
                continue
            seen.add(labels)
            page.append(_grant_line(labels))
        if time.perf_counter() > until:
            yield b"".join(page)
            page, until = [], time.perf_counter() + PAGE_S
    name, about = "nri_gpu_grants_left_out", f"Series that {GRANT_INFO} has no room for."
    yield b"".join([*page, generate_latest(OneFamily(GaugeMetricFamily(name, about, value=left_out)))])


def _grant_info() -> GaugeMetricFamily:
    return GaugeMetricFamily(GRANT_INFO, "1 for each GPU and each container that holds it.", labels=GRANT_LABELS)


@lru_cache(maxsize=GRANTS_MAX)  # most grants are there at the next scrape, too, and a line takes 20 microseconds
def _grant_line(labels: tuple[str, ...]) -> bytes:
    family = _grant_info()
    family.add_metric(labels, 1)
    _help, _type, line = generate_latest(OneFamily(family)).split(b"\n", 2)
    return line


def _families(view: View) -> Iterator[Metric]:
    """Yield all families but the grants of GPUs, each made when it is asked for."""
    yield _gauge("nri_gpu_build_info", "1 for the version that runs.", [((__version__,), 1)], "version")
    yield from _runtime(view)
    yield from _decisions(view)
    yield from _node(view)
    yield from _gpus(view)


def _runtime(view: View) -> Iterator[Metric]:
    counts = view.counts
    yield _gauge("nri_gpu_connected", "1 while the container runtime is connected.", view.connection.ready)
    yield _counter("nri_gpu_reconnects", "Connections to the runtime that ended.", counts.reconnects)
    failures = [((each,), counts.failures[each]) for each in Failure]
    yield _counter("nri_gpu_requests_failed", "Requests answered with an error, by reason.", failures, "reason")
    yield _gauge(
        "nri_gpu_ungranted_containers",
        "Running containers that asked for GPUs and were created without nri-gpu.",
        view.ungranted,
    )
    guard = [] if view.guard_connected is None else [((), view.guard_connected)]
    yield _gauge("nri_gpu_guard_connected", "1 while the guard is connected to the runtime.", guard)


def _decisions(view: View) -> Iterator[Metric]:
    counts = view.counts
    decided = [((outcome, code or ""), counts.decisions[outcome, code]) for outcome, code in DECISIONS]
    yield _counter("nri_gpu_decisions", "Containers decided, by outcome and code.", decided, "outcome", "code")
    bounds = (*map(str, BOUNDS_S), "+Inf")
    yield HistogramMetricFamily(
        "nri_gpu_create_container_seconds",
        "Time from the request CreateContainer to its answer.",
        buckets=list(zip(bounds, accumulate(counts.create.buckets), strict=True)),
        sum_value=counts.create.total_ns / 1e9,
    )


def _node(view: View) -> Iterator[Metric]:
    ready = node_fault(DEFAULT_CAPABILITIES, view.node) is None
    yield _gauge("nri_gpu_node_ready", "1 while GPUs could be granted, as far as the driver goes.", ready)
    yield _gauge("nri_gpu_policy_fault", "1 while no usable policy is there.", bool(view.policy.fault))
    yield _gauge(
        "nri_gpu_policy_rejected",
        "1 while the policy file has a fault and the policy before it stays in force.",
        bool(view.policy.rejected),
    )
    yield _gauge(
        "nri_gpu_inventory_fault",
        "1 while NVML's last answer was none: the driver is not loaded, or hangs.",
        bool(view.inventory_fault),
    )
    age = [] if view.inventory_age_s is None else [((), view.inventory_age_s)]
    yield _gauge("nri_gpu_inventory_age_seconds", "Time since NVML last described the GPUs.", age)
    yield _gauge(
        "nri_gpu_inventory_stale_after_seconds",
        "The policy's inventory.stale_after_s.",
        view.settings.inventory.stale_after_s,
    )
    restarts = [((child,), view.restarts.get(child, 0)) for child in CHILDREN]
    yield _counter("nri_gpu_child_restarts", "Starts of a child process after its first.", restarts, "child")


def _gpus(view: View) -> Iterator[Metric]:
    moved = [((state,), view.health_transitions.get(state, 0)) for state in HealthState]
    yield _counter("nri_gpu_health_transitions", "Times that a GPU came into a state.", moved, "state")
    inventory = view.node.inventory
    units = [
        ((unit.uuid, unit.place, _model(unit)), not _withheld(unit))
        for unit in inventory.units
        if _withheld(unit) or isinstance(unit, MigPart) or not unit.mig_enabled
    ]
    yield _gauge(
        "nri_gpu_gpu_available",
        "1 unless the GPU is withheld from all. One in MIG mode, whose MIG devices are granted, only where it is.",
        units,
        "uuid",
        "index",
        "model",
    )
    suspect = [
        ((unit.uuid, unit.place, _model(unit)), health_of(unit).state is HealthState.SUSPECT)
        for unit in inventory.units
    ]
    help_text = "1 while the GPU is granted although something speaks against it."
    yield _gauge("nri_gpu_gpu_suspect", help_text, suspect, "uuid", "index", "model")
    fabric = sum(Sign.FABRIC_NOT_READY in gpu.signs for gpu in inventory.gpus)
    yield _gauge("nri_gpu_fabric_not_ready_gpus", "GPUs whose NVLink fabric is not ready.", fabric)
    yield from _health(view)
    undescribed = len(inventory.faults) + sum(gpu.given for gpu in inventory.unlisted)
    yield _gauge("nri_gpu_undescribed_gpus", "GPUs that NVML does not describe, such as lost ones.", undescribed)
    holding = sum(entry.holds and bool(entry.grant.held) for entry in view.ledger.entries.values())
    yield _gauge("nri_gpu_grants", "Containers that hold GPUs.", holding)
    yield _gauge("nri_gpu_prepared_claims", "ResourceClaims that are prepared here.", len(view.ledger.claims))
    yield _gauge("nri_gpu_lost_containers", "Containers that are over and have processes.", len(view.ledger.lost))
    overlapping = len(overlaps(view.ledger))
    yield _gauge("nri_gpu_overlapping_grants", "GPUs granted to two pods, to one exclusively.", overlapping)
    monitors = sum(bool(each.watched) for each in view.ledger.external.values())
    yield _gauge("nri_gpu_monitors", "Containers that open GPUs and hold none of these.", monitors)
    found = Counter(use.kind for use in view.stray.findings)
    stray = [((kind,), found[kind]) for kind in Kind] if view.stray.looked_s else []
    yield _gauge("nri_gpu_stray_uses", "Who uses GPUs that nobody granted, by kind.", stray, "kind")


def _health(view: View) -> Iterator[Metric]:
    gpus = view.node.inventory.gpus
    xids = [((gpu.uuid, action), count) for gpu in gpus for action, count in by_action(view.xids, gpu.uuid).items()]
    yield _counter(
        "nri_gpu_xids", "XIDs, by GPU and the action that NVIDIA's catalogue has for it.", xids, "uuid", "action"
    )
    notes = [(gpu, view.notes.get(gpu.uuid, NO_NOTES)) for gpu in gpus]
    due = [((gpu.uuid, gpu.place), bool(note.reset)) for gpu, note in notes]
    yield _gauge("nri_gpu_gpu_reset_due", "1 while the GPU is withheld until it was reset.", due, "uuid", "index")
    failed = [((gpu.uuid, gpu.place), len(note.namespaces)) for gpu, note in notes]
    yield _gauge(
        "nri_gpu_gpu_failing_namespaces",
        "Namespaces under whose containers applications failed on the GPU within a day; 0 below 3.",
        failed,
        "uuid",
        "index",
    )


def _model(unit: Unit) -> str:
    return unit.device.profile if isinstance(unit, MigPart) else unit.model


def _withheld(unit: Unit) -> str:
    """Return why nobody gets the unit. A GPU in MIG mode is not withheld: its MIG devices are granted."""
    return why_not(unit) if isinstance(unit, MigPart) else unit.unavailable


Samples = Sequence[tuple[Iterable[str], float]]


def _gauge(name: str, help_text: str, samples: float | Samples, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, help_text, labels=labels), samples)


def _counter(name: str, help_text: str, samples: float | Samples, *labels: str) -> Metric:
    """Return a counter. Its name is without `_total`, which the library adds."""
    return _filled(CounterMetricFamily(name, help_text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: float | Samples) -> Metric:
    for values, value in [((), samples)] if isinstance(samples, (int, float)) else samples:
        family.add_metric(tuple(values), value)
    return family
