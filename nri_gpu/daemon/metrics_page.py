"""The text that Prometheus reads, made from a view of the daemon when it asks; no other module imports its library.

It comes in pages: the loop that writes them answers the runtime between two pages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Final

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from nri_gpu import __version__
from nri_gpu.daemon.answers import AllocationStatus
from nri_gpu.daemon.view import View
from nri_gpu.decision.eligible import node_fault
from nri_gpu.decision.overlaps import conflicts, overlaps
from nri_gpu.decision.refusals import IN_MIG_MODE, why_not
from nri_gpu.domain.decision import Code
from nri_gpu.domain.finding_kind import FindingKind
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, MigPart, Unit, described, health_of
from nri_gpu.domain.health import NO_NOTES, HealthNotes, HealthState, Sign
from nri_gpu.domain.text import printable
from nri_gpu.health.xid_log import by_action
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.plugin.counts import BOUNDS_S, REFUSALS, Failure, Outcome
from nri_gpu.stray.judge import Kind
from nri_gpu.usage.idle import HolderUse
from nri_gpu.usage.usage_controller import SampledUnit

__all__ = ["CONTENT_TYPE", "GRANTS_MAX", "PAGE_S", "pages"]

GRANTS_MAX: Final = 10_000  # series of nri_gpu_grant_info; more than 500 pods with 16 GPUs each
PAGE_S: Final = 0.001
DEFAULTS: Final = "built-in"  # the digest of a node without a policy file
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


GAUGE: Final = GaugeMetricFamily
COUNTER: Final = CounterMetricFamily  # its name is without `_total`, which the library adds
Sample = tuple[Iterable[str], float]  # the values of the labels, and the metric's


class Family(Struct, frozen=True):
    """A metric. value: of the daemon at a moment, one, or one for each set of labels; none where it is not known."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    about: str
    value: Callable[[View], float | Iterable[Sample]]
    labels: tuple[str, ...] = ()

    def of(self, view: View) -> Metric:
        value = self.value(view)
        return self.filled([((), value)] if isinstance(value, (int, float)) else value)

    def filled(self, samples: Iterable[Sample]) -> Metric:
        family = self.kind(self.name, self.about, labels=self.labels)
        for labels, each in samples:
            family.add_metric(tuple(labels), each)
        return family


def pages(view: View) -> Iterator[bytes]:
    """Yield the text, in pages that take about PAGE_S each to make. An observer has no metrics of grants."""
    for family in FAMILIES:
        if view.observer is None or family.name in _OF_A_NODE:
            yield generate_latest(OneFamily(family.of(view)))
    if view.observer:
        for family in OBSERVED:
            yield from _bounded_pages(family, view)
    else:
        yield generate_latest(OneFamily(_create_container(view)))
        yield from _grant_pages(view.ledger)
    if view.settings.metrics.usage:
        for family in USAGE:
            yield from _bounded_pages(family, view)


def _create_container(view: View) -> HistogramMetricFamily:
    bounds, create = (*map(str, BOUNDS_S), "+Inf"), view.counts.create
    return HistogramMetricFamily(
        "nri_gpu_create_container_seconds",
        "Time from the request CreateContainer to its answer.",
        buckets=list(zip(bounds, accumulate(create.buckets), strict=True)),
        sum_value=create.total_ns / 1e9,
    )


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


def _bounded_pages(family: Family, view: View) -> Iterator[bytes]:
    """Yield a metric of GPUs, holders or allocations, with at most as many series as grants may have."""
    samples = family.value(view)
    assert not isinstance(samples, (int, float))
    seen: set[tuple[str, ...]] = set()  # containers of one pod may have one name, as grants have it
    page, until = [_lines(family, [])], time.perf_counter() + PAGE_S
    for labels, value in samples:
        if (key := tuple(labels)) not in seen and len(seen) < GRANTS_MAX:
            seen.add(key)
            _help, _type, line = _lines(family, [(key, value)]).split(b"\n", 2)
            page.append(line)
        if time.perf_counter() > until:
            yield b"".join(page)
            page, until = [], time.perf_counter() + PAGE_S
    yield b"".join(page)


def _lines(family: Family, samples: Iterable[Sample]) -> bytes:
    return generate_latest(OneFamily(family.filled(samples)))


def _grant_info() -> GaugeMetricFamily:
    return GaugeMetricFamily(GRANT_INFO, "1 for each GPU and each container that holds it.", labels=GRANT_LABELS)


@lru_cache(maxsize=GRANTS_MAX)  # most grants are there at the next scrape, too, and a line takes 20 microseconds
def _grant_line(labels: tuple[str, ...]) -> bytes:
    family = _grant_info()
    family.add_metric(labels, 1)
    _help, _type, line = generate_latest(OneFamily(family)).split(b"\n", 2)
    return line


def _labels(unit: Unit) -> tuple[str, str, str]:
    return unit.uuid, unit.place, unit.device.profile if isinstance(unit, MigPart) else unit.model


def _withheld(unit: Unit) -> str:
    """Return why nobody gets the unit. A GPU in MIG mode is not withheld: its MIG devices are granted."""
    return "" if (why := why_not(unit)) == IN_MIG_MODE else why


def _available(view: View) -> Iterator[Sample]:
    for unit in view.node.inventory.units:
        withheld = _withheld(unit)
        if withheld or isinstance(unit, MigPart) or not unit.mig_enabled:
            yield _labels(unit), not withheld


def _cordoned(view: View) -> Iterator[Sample]:
    for unit in view.node.inventory.units:
        cordon = described(unit).cordon
        yield (unit.uuid, unit.place), cordon is not None and not cordon.unknown


def _suspect(view: View) -> Iterator[Sample]:
    return ((_labels(unit), health_of(unit).state is HealthState.SUSPECT) for unit in view.node.inventory.units)


def _xids(view: View) -> Iterator[Sample]:
    for gpu in view.node.inventory.gpus:
        yield from (((gpu.uuid, action), count) for action, count in by_action(view.xids, gpu.uuid).items())


def _noted(view: View, value: Callable[[HealthNotes], float]) -> Iterator[Sample]:
    gpus = view.node.inventory.gpus
    return (((gpu.uuid, gpu.place), value(view.notes.get(gpu.uuid, NO_NOTES))) for gpu in gpus)


def _stray(view: View) -> Iterator[Sample]:
    found = Counter(use.kind for use in view.stray.findings)
    return (((kind,), found[kind]) for kind in Kind if view.stray.looked_s)


def _unkilled(view: View) -> Iterator[Sample]:
    return (((each.program, each.gpu_uuid, str(each.pid)), each.since_s) for each in view.unkilled)


def _connected(view: View) -> bool:
    return view.connection.ready and view.connection.joined


def _of_units(value: Callable[[View, SampledUnit], float | None]) -> Callable[[View], Iterator[Sample]]:
    """Return a metric of GPUs and MIG devices, with a sample of each that a value is known of."""

    def samples(view: View) -> Iterator[Sample]:
        for unit in view.node.inventory.units:
            sampled = view.usages.units.get(unit.uuid)
            known = value(view, sampled) if sampled else None
            if known is not None:
                yield _labels(unit), known

    return samples


def _of_holders(value: Callable[[View, HolderUse], float | None]) -> Callable[[View], Iterator[Sample]]:
    """Return a metric of holders, each on each of its GPUs, with a sample of each that a value is known of."""

    def samples(view: View) -> Iterator[Sample]:
        for (container_id, uuid), use in view.usages.holders.items():
            entry, known = view.ledger.entries.get(container_id), value(view, use)
            if entry and known is not None:
                yield (uuid, entry.grant.namespace, entry.grant.pod_name, entry.grant.container_name), known

    return samples


def _idle_s(view: View, use: HolderUse) -> float | None:
    """Return for how long a holder is idle, 0 for one that is not, or None where nobody can tell."""
    if use.idle:
        return view.monotonic - use.idle.since
    return None if use.look.used is None else 0


def _allocated(view: View) -> Iterator[Sample]:
    return ((_allocation_labels(each), 1) for each in view.observer.allocations) if view.observer else iter(())


def _allocation_labels(each: AllocationStatus) -> tuple[str, ...]:
    """Return names that runtimes and device plugins chose, as a terminal may show them."""
    return tuple(map(printable, (each.gpu_uuid or each.device, each.namespace, each.pod, each.container, each.by)))


def _unopened_s(view: View) -> Iterator[Sample]:
    """Yield for how long each allocation was not seen open; none of those where nobody can tell."""
    for each in view.observer.allocations if view.observer else ():
        last_s = each.last_opened_s or each.since_s
        if each.opened is not None and last_s is not None:
            yield _allocation_labels(each)[:-1], 0 if each.opened else max(0.0, view.wall - last_s)


def _observer_findings(view: View) -> Iterator[Sample]:
    found = Counter(each.kind for each in view.observer.findings) if view.observer else Counter[str]()
    return (((kind,), found[kind]) for kind in FindingKind)


def _policy(view: View) -> Iterable[Sample]:
    return [] if view.policy.fault else [((view.policy.digest or DEFAULTS,), 1)]


def _known(value: float | None) -> Iterable[Sample]:
    return [] if value is None else [((), value)]


FAMILIES: Final = (
    Family(GAUGE, "nri_gpu_build_info", "1 for the version that runs.", lambda _: [((__version__,), 1)], ("version",)),
    Family(GAUGE, "nri_gpu_connected", "1 while the container runtime is connected.", _connected),
    Family(COUNTER, "nri_gpu_reconnects", "Connections to the runtime that ended.", lambda v: v.counts.reconnects),
    Family(
        COUNTER,
        "nri_gpu_requests_failed",
        "Requests answered with an error, by reason.",
        lambda v: [((each,), v.counts.failures[each]) for each in Failure],
        ("reason",),
    ),
    Family(
        GAUGE,
        "nri_gpu_ungranted_containers",
        "Running containers that asked for GPUs and were created without nri-gpu.",
        lambda v: v.ungranted,
    ),
    Family(
        GAUGE,
        "nri_gpu_guard_connected",
        "1 while the guard is connected to the runtime.",
        lambda v: _known(v.guard_connected),
    ),
    Family(
        COUNTER,
        "nri_gpu_decisions",
        "Containers decided, by outcome and code.",
        lambda v: [((outcome, code or ""), v.counts.decisions[outcome, code]) for outcome, code in DECISIONS],
        ("outcome", "code"),
    ),
    Family(
        COUNTER,
        "nri_gpu_held_seconds",
        "GPU-seconds that grants held, each divided by those who held it then, since the daemon began.",
        lambda v: v.held.items(),
        ("namespace", "model", "mode"),
    ),
    Family(
        GAUGE,
        "nri_gpu_node_ready",
        "1 while GPUs could be granted, as far as the driver goes.",
        lambda v: node_fault(DEFAULT_CAPABILITIES, v.node) is None,
    ),
    Family(GAUGE, "nri_gpu_policy_fault", "1 while no usable policy is there.", lambda v: bool(v.policy.fault)),
    Family(
        GAUGE,
        "nri_gpu_policy_rejected",
        "1 while the policy file has a fault and the policy before it stays in force.",
        lambda v: bool(v.policy.rejected),
    ),
    Family(GAUGE, "nri_gpu_policy_info", "1 for the policy text in force, by its SHA-256.", _policy, ("digest",)),
    Family(
        GAUGE,
        "nri_gpu_inventory_fault",
        "1 while NVML's last answer was none: the driver is not loaded, or hangs.",
        lambda v: bool(v.inventory_fault),
    ),
    Family(
        GAUGE,
        "nri_gpu_inventory_age_seconds",
        "Time since NVML last described the GPUs.",
        lambda v: _known(v.inventory_age_s),
    ),
    Family(
        GAUGE,
        "nri_gpu_inventory_stale_after_seconds",
        "The policy's inventory.stale_after_s.",
        lambda v: v.settings.inventory.stale_after_s,
    ),
    Family(
        COUNTER,
        "nri_gpu_child_restarts",
        "Starts of a child process after its first.",
        lambda v: [((child,), v.restarts.get(child, 0)) for child in CHILDREN],
        ("child",),
    ),
    Family(
        COUNTER,
        "nri_gpu_health_transitions",
        "Times that a GPU came into a state.",
        lambda v: [((state,), v.health_transitions.get(state, 0)) for state in HealthState],
        ("state",),
    ),
    Family(
        GAUGE,
        "nri_gpu_gpu_available",
        "1 unless the GPU is withheld from all. One in MIG mode, whose MIG devices are granted, only where it is.",
        _available,
        ("uuid", "index", "model"),
    ),
    Family(
        GAUGE,
        "nri_gpu_gpu_cordoned",
        "1 while root has taken the GPU or MIG device out of use.",
        _cordoned,
        ("uuid", "index"),
    ),
    Family(
        GAUGE,
        "nri_gpu_gpu_suspect",
        "1 while the GPU is granted although something speaks against it.",
        _suspect,
        ("uuid", "index", "model"),
    ),
    Family(
        GAUGE,
        "nri_gpu_fabric_not_ready_gpus",
        "GPUs whose NVLink fabric is not ready.",
        lambda v: sum(Sign.FABRIC_NOT_READY in gpu.signs for gpu in v.node.inventory.gpus),
    ),
    Family(
        COUNTER,
        "nri_gpu_xids",
        "XIDs, by GPU and the action that NVIDIA's catalogue has for it.",
        _xids,
        ("uuid", "action"),
    ),
    Family(
        GAUGE,
        "nri_gpu_gpu_reset_due",
        "1 while the GPU is withheld until it was reset.",
        lambda v: _noted(v, lambda notes: bool(notes.reset)),
        ("uuid", "index"),
    ),
    Family(
        GAUGE,
        "nri_gpu_gpu_failing_namespaces",
        "Namespaces under whose containers applications failed on the GPU within a day; 0 below 3.",
        lambda v: _noted(v, lambda notes: len(notes.namespaces)),
        ("uuid", "index"),
    ),
    Family(
        GAUGE,
        "nri_gpu_undescribed_gpus",
        "GPUs that NVML does not describe, such as lost ones.",
        lambda v: len(v.node.inventory.faults) + sum(gpu.missing for gpu in v.node.inventory.unlisted),
    ),
    Family(
        GAUGE,
        "nri_gpu_set_aside_gpus",
        "GPUs that are kept from NVML on purpose, such as those of virtual machines.",
        lambda v: sum(gpu.set_aside for gpu in v.node.inventory.unlisted),
    ),
    Family(
        GAUGE,
        "nri_gpu_grants",
        "Containers that hold GPUs.",
        lambda v: sum(entry.holds and bool(entry.grant.held) for entry in v.ledger.entries.values()),
    ),
    Family(GAUGE, "nri_gpu_prepared_claims", "ResourceClaims that are prepared here.", lambda v: len(v.ledger.claims)),
    Family(
        GAUGE, "nri_gpu_lost_containers", "Containers that are over and have processes.", lambda v: len(v.ledger.lost)
    ),
    Family(
        GAUGE,
        "nri_gpu_unkilled_process_since_timestamp_seconds",
        "When a process of the daemon was killed that hangs in the kernel and has not ended.",
        _unkilled,
        ("program", "uuid", "pid"),
    ),
    Family(
        GAUGE,
        "nri_gpu_overlapping_grants",
        "GPUs that two pods can use, one of which has it exclusively.",
        lambda v: len(overlaps(v.ledger)),
    ),
    Family(
        GAUGE,
        "nri_gpu_external_conflicts",
        "Containers to which another component gave GPUs that other pods have exclusively.",
        lambda v: len(conflicts(v.ledger)),
    ),
    Family(
        GAUGE,
        "nri_gpu_monitors",
        "Containers that open GPUs and hold none of these.",
        lambda v: sum(bool(each.watched) for each in v.ledger.external.values()),
    ),
    Family(GAUGE, "nri_gpu_stray_uses", "Who uses GPUs that nobody granted, by kind.", _stray, ("kind",)),
)

# Of those above, the ones that an observer has, too.
_OF_A_NODE: Final = frozenset(
    f"nri_gpu_{name}"
    for name in (
        *("build_info", "policy_info", "policy_rejected", "inventory_fault", "inventory_age_seconds", "child_restarts"),
        *("inventory_stale_after_seconds", "fabric_not_ready_gpus", "xids", "undescribed_gpus", "set_aside_gpus"),
        *("monitors", "stray_uses"),
    )
)
OBSERVED: Final = (
    Family(
        GAUGE,
        "nri_gpu_allocation_info",
        "1 for each GPU or MIG device and each container that it was given to, by whatever gave it.",
        _allocated,
        ("uuid", "namespace", "pod", "container", "by"),
    ),
    Family(
        GAUGE,
        "nri_gpu_allocation_unopened_seconds",
        "Time in which no process of a container was seen to have open what it was given.",
        _unopened_s,
        ("uuid", "namespace", "pod", "container"),
    ),
    Family(GAUGE, "nri_gpu_observer_findings", "Findings of an observer, by kind.", _observer_findings, ("kind",)),
)
UNIT_LABELS: Final = ("uuid", "index", "model")
HOLDER_LABELS: Final = ("uuid", "namespace", "pod", "container")
USAGE: Final = (
    Family(
        GAUGE,
        "nri_gpu_gpu_sample_age_seconds",
        "Time since what a GPU does was last sampled.",
        _of_units(lambda view, sampled: view.monotonic - sampled.at),
        UNIT_LABELS,
    ),
    Family(
        GAUGE,
        "nri_gpu_gpu_memory_used_bytes",
        "Memory of a GPU or MIG device that is in use.",
        _of_units(lambda _, sampled: sampled.unit.memory_used_bytes),
        UNIT_LABELS,
    ),
    Family(
        GAUGE,
        "nri_gpu_gpu_memory_total_bytes",
        "Memory of a GPU or MIG device.",
        _of_units(lambda _, sampled: sampled.unit.memory_total_bytes),
        UNIT_LABELS,
    ),
    Family(
        GAUGE,
        "nri_gpu_gpu_utilization_percent",
        "Share of time in which a kernel ran on the GPU.",
        _of_units(lambda _, sampled: sampled.unit.utilization_percent),
        UNIT_LABELS,
    ),
    Family(
        GAUGE,
        "nri_gpu_holder_memory_used_bytes",
        "Memory of a holder's processes on a GPU.",
        _of_holders(lambda _, use: use.look.memory_bytes if use.look.own else None),
        HOLDER_LABELS,
    ),
    Family(
        GAUGE,
        "nri_gpu_holder_utilization_percent",
        "Share of time in which kernels of a holder's processes ran on a GPU.",
        _of_holders(lambda _, use: use.look.utilization_percent),
        HOLDER_LABELS,
    ),
    Family(
        GAUGE,
        "nri_gpu_holder_idle_seconds",
        "Time in which no sample saw a holder use its GPU.",
        _of_holders(_idle_s),
        HOLDER_LABELS,
    ),
)
