"""The answer to `status`: who holds which GPU, since when, and why a GPU is unavailable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from nri_gpu.allocation.ledger import Entry, GrantPhase, Ledger, Releasing, Reservation, Usage
from nri_gpu.allocation.messages import opener, why_not
from nri_gpu.allocation.reservations import reservation_id
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.gpu import GpuUuid, MigPart, Unit, health_of, whole
from nri_gpu.domain.health import NO_HISTORY, Happened, History, Transition, TransitionKind
from nri_gpu.domain.kubelet import ResourceStatus
from nri_gpu.domain.node import GpuFault, KernelGpu, Node

STATUS_SCHEMA: Final = "nri-gpu/status/v1"
_APPEARING: Final = frozenset(
    {TransitionKind.AVAILABLE, TransitionKind.GPU, TransitionKind.MIG}
)  # one may be new, and of no use


class RuntimeConnection(Struct, frozen=True, kw_only=True):
    """The connection to the runtime. since: seconds since the epoch. why: the reason when it is not ready."""

    ready: bool
    since: float
    runtime: str = ""
    version: str = ""
    nri_version: str = ""
    why: str = ""


class View(Struct, frozen=True, kw_only=True):
    """The daemon at one moment.

    wall, monotonic: that moment in seconds, on both clocks. policy_fault: empty where the policy can be used.
    inventory_confirmed: false while the inventory is an earlier daemon's, from its snapshot. history: the node's
    transitions since the daemon began. kubelet: the state of each resource; None where no device plugin is wanted.
    kubelet_open: why a container with GPUs from the kubelet may start although we never saw it, but for the guard;
    empty when it cannot. list_fault: why the runtime could not list its containers to us again; empty when it could.
    """

    node: Node
    ledger: Ledger
    connection: RuntimeConnection
    wall: float
    monotonic: float
    inventory_age_s: float | None
    inventory_fault: str
    policy_source: str
    policy_fault: str
    inventory_confirmed: bool = True
    history: History = NO_HISTORY
    kubelet: tuple[ResourceStatus, ...] | None = None
    kubelet_open: str = ""
    list_fault: str = ""

    def wall_of(self, monotonic: float) -> float | None:
        """A moment of the monotonic clock in seconds since the epoch; None for an infinite one."""
        return self.wall - (self.monotonic - monotonic) if abs(monotonic) != float("inf") else None


def status_json(view: View) -> dict[str, Any]:
    """Schema `nri-gpu/status/v1`; fields are only ever added. Times are seconds since the epoch, null if unknown."""
    node, connection = view.node, view.connection
    usage, known = view.ledger.usage(), {unit.uuid for unit in node.inventory.units}
    return {
        "schema": STATUS_SCHEMA,
        "runtime": {
            "ready": connection.ready,
            "since_s": connection.since,
            "name": connection.runtime,
            "version": connection.version,
            "nri_version": connection.nri_version,
            "fault": connection.why,
            "list_fault": view.list_fault,
        },
        "node": {
            "driver_version": node.inventory.driver_version,
            "driver_generation": node.generation,
            "driver_fault": node.driver_fault,
            "inventory_number": node.number,
            "inventory_age_s": view.inventory_age_s,
            "inventory_confirmed": view.inventory_confirmed,
            "inventory_fault": node.inventory.fault or view.inventory_fault,
            "inventory_fault_since_s": _fault_since_s(view),
            "simulated": node.inventory.simulated,
        },
        "policy": {"source": view.policy_source, "fault": view.policy_fault},
        "kubelet": {
            "enabled": view.kubelet is not None,
            "resources": [_standing_json(each) for each in view.kubelet or ()],
            "guard_alone": view.kubelet_open,
        },
        "gpus": [_unit_json(unit, usage.get(unit.uuid), view) for unit in node.inventory.units],
        "faults": [_fault_json(fault, view.history) for fault in node.inventory.faults],
        "unlisted": [unlisted_json(gpu) for gpu in node.inventory.unlisted],
        "gone": _holders_json(view, lambda uuids: not known.issuperset(uuids)),
        "transitions": transitions_json(view.history),
    }


def transitions_json(history: History) -> dict[str, Any]:
    """The node's transitions since the daemon began: counted by kind, and the last of each kind."""
    return {
        "since_s": history.began_s,
        "total": history.total,
        "counts": {kind.value: count for kind, count in history.counts.items()},
        "last": [_happened_json(each) for each in history.last],
    }


def _happened_json(happened: Happened) -> dict[str, Any]:
    return {"number": happened.number, "at_s": happened.at_s, **transition_json(happened.transition)}


def transition_json(transition: Transition) -> dict[str, Any]:
    """One thing that changed. gpu_uuid: empty for the node; of a MIG device its own. index: null for the node."""
    return {
        "kind": transition.kind.value,
        "gpu_uuid": transition.uuid,
        "index": transition.index,
        "worse": transition.worse,
        "what": transition.what,
    }


def _fault_json(fault: GpuFault, history: History) -> dict[str, Any]:
    """A GPU that cannot be described. uuid, pci_bus_id: empty where unknown."""
    return {
        "index": fault.index,
        "uuid": fault.uuid,
        "pci_bus_id": fault.pci_bus_id,
        "reason": fault.reason,
        "since_s": history.since(frozenset({TransitionKind.DESCRIPTION}), index=fault.index),
    }


def _fault_since_s(view: View) -> float | None:
    fault = view.node.inventory.fault or view.inventory_fault
    return view.history.since(frozenset({TransitionKind.ANSWER})) if fault else None


def _standing_json(standing: ResourceStatus) -> dict[str, Any]:
    return {
        "resource": standing.resource,
        "registered": standing.since is not None,
        "since_s": standing.since,
        "fault": standing.fault,
    }


def place_json(unit: Unit) -> dict[str, Any]:
    """Which of the node's GPUs and MIG devices it is."""
    if isinstance(unit, MigPart):
        return {"place": unit.place, "kind": "mig"}
    return {"place": str(unit.index), "kind": "gpu"}


def _unit_json(unit: Unit, usage: Usage | None, view: View) -> dict[str, Any]:
    """opened_by: containers that were granted other GPUs, and whose device numbers are this GPU's now.

    withheld: why it could be granted to nobody, whoever holds it.
    """
    others = tuple(usage.external.values()) if usage else ()
    return {
        **place_json(unit),
        "uuid": unit.uuid,
        "model": unit.device.profile if isinstance(unit, MigPart) else unit.model,
        "mode": usage.mode.value if usage and usage.mode else "",
        "unavailable": _unavailable(unit, usage),
        "withheld": why_not(unit),
        "unavailable_since_s": _since_s(unit, view.history),
        "health": health_json(unit),
        "holders": _holders_json(view, lambda uuids: unit.uuid in uuids),
        "foreign": [each.pod for each in others if not each.container],
        "opened_by": [{"pod": each.pod, "container": each.container} for each in others if each.container],
        "left_by": _releasing_json(usage.releasing, view) if usage and usage.releasing else None,
    }


def _since_s(unit: Unit, history: History) -> float | None:
    """Since when the node itself keeps it from being granted; holders have times of their own."""
    if not why_not(unit):
        return None
    health = health_of(unit)
    if not health.grantable:
        return health.since
    return history.since(_APPEARING, unit.uuid)


def _releasing_json(releasing: Releasing, view: View) -> dict[str, Any]:
    return {
        "pod": releasing.pod,
        "pod_uid": releasing.pod_uid,
        "since_s": view.wall_of(releasing.since),
        "offered_s": view.wall_of(releasing.since + releasing.grace_s),
        "processes": releasing.processes,
    }


def unlisted_json(gpu: KernelGpu) -> dict[str, Any]:
    """A GPU that only the kernel lists."""
    return {
        "pci_bus_id": gpu.pci_bus_id,
        "uuid": gpu.uuid,
        "model": gpu.model,
        "minor_number": gpu.minor_number,
        "reason": gpu.reason,
    }


def health_json(unit: Unit) -> dict[str, Any]:
    """A GPU's health, or a MIG device's, which is never better. since_s: null where it never changed."""
    gpu, health = whole(unit), health_of(unit)
    return {
        "state": health.state.value,
        "since_s": health.since or None,
        "why": health.why,
        "changes": health.changes,
        "signs": [sign.value for sign in gpu.signs],
    }


def _unavailable(unit: Unit, usage: Usage | None) -> str:
    """Why a container of another pod could not have it exclusively; empty when it could."""
    if reason := why_not(unit):
        return reason
    if usage is None:
        return ""
    if not (usage.pods or usage.external):
        return f"just released by {usage.releasing}" if usage.releasing else ""
    pods = ", ".join(sorted(usage.pods.values()))
    if usage.mode is Mode.EXCLUSIVE:
        return f"held exclusively by {pods}"
    if pods:
        return f"held in {usage.mode} mode by {pods}"
    return f"held by {', '.join(map(opener, usage.external.values()))}"


def _holders_json(view: View, wanted: Callable[[tuple[GpuUuid, ...]], bool]) -> list[dict[str, Any]]:
    """Grants and reservations whose GPUs are wanted."""
    entries = (entry for entry in view.ledger.entries.values() if entry.holds and wanted(entry.grant.uuids))
    reserved = (each for device, each in view.ledger.reservations.items() if wanted((device.uuid,)))
    return [*(_holder_json(entry, view) for entry in entries), *(_reservation_json(each, view) for each in reserved)]


def _reservation_json(reservation: Reservation, view: View) -> dict[str, Any]:
    """The fields of a holder: the kubelet allocated the device, and no container has it now."""
    return {
        "namespace": reservation.namespace,
        "pod": reservation.pod_name,
        "pod_uid": reservation.pod_uid,
        "container": reservation.container_name,
        "container_id": reservation_id(reservation.device),
        "mode": reservation.mode.value,
        "phase": GrantPhase.CREATED.value,
        "since_s": view.wall_of(reservation.since),
        "running": False,
        "reserved": True,
        "gpu_uuids": [reservation.device.uuid],
        "driver_generation": "-",
        "restart": "",
    }


def _holder_json(entry: Entry, view: View) -> dict[str, Any]:
    grant = entry.grant
    return {
        "namespace": grant.namespace,
        "pod": grant.pod_name,
        "pod_uid": grant.pod_uid,
        "container": grant.container_name,
        "container_id": grant.container_id,
        "mode": grant.mode.value if grant.mode else "none",
        "phase": entry.phase.value,
        "since_s": view.wall_of(entry.since),
        "running": entry.phase is GrantPhase.RUNNING,
        "reserved": False,
        "gpu_uuids": list(grant.uuids),
        "driver_generation": grant.generation,
        "restart": _restart(entry, view.node),
    }


def _restart(entry: Entry, node: Node) -> str:
    """Why a container has to be restarted; empty where it need not."""
    seat = entry.grant.seat
    if entry.phase is not GrantPhase.RUNNING or seat is None or seat.folder == node.mps.folder(entry.grant.uuids[0]):
        return ""
    return "its MPS daemon has ended, and with it what its programs had on the GPU: restart it"
