"""The answer to `status`: who holds which GPU, since when, and why a GPU is unavailable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct, to_builtins

from nri_gpu.allocation.ledger import Entry, GrantPhase, Ledger, Releasing, Reservation, Usage
from nri_gpu.allocation.messages import opener, why_not
from nri_gpu.daemon.ledger_file import holder_line
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.gpu import GpuUuid, MigPart, Unit, health_of, whole
from nri_gpu.domain.health import NO_HISTORY, History, Transition, TransitionKind
from nri_gpu.domain.kubelet import ResourceStatus
from nri_gpu.domain.node import GpuFault, Node

STATUS_SCHEMA: Final = "nri-gpu/status/v1"
_APPEARING: Final = frozenset({TransitionKind.AVAILABLE, TransitionKind.GPU, TransitionKind.MIG})  # new, and unusable
_DESCRIBED: Final = frozenset({TransitionKind.DESCRIPTION})
_ANSWERED: Final = frozenset({TransitionKind.ANSWER})


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
    inventory_fault = node.inventory.fault or view.inventory_fault
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
            "inventory_fault": inventory_fault,
            "inventory_fault_since_s": view.history.since(_ANSWERED) if inventory_fault else None,
            "simulated": node.inventory.simulated,
        },
        "policy": {"source": view.policy_source, "fault": view.policy_fault},
        "kubelet": {
            "enabled": view.kubelet is not None,
            "resources": [
                {
                    "resource": each.resource,
                    "registered": each.since is not None,
                    "since_s": each.since,
                    "fault": each.fault,
                }
                for each in view.kubelet or ()
            ],
            "guard_alone": view.kubelet_open,
        },
        "gpus": [_unit_json(unit, usage.get(unit.uuid), view) for unit in node.inventory.units],
        "faults": [
            {**fault_json(each), "since_s": view.history.since(_DESCRIBED, index=each.index)}
            for each in node.inventory.faults
        ],
        "unlisted": [to_builtins(gpu) for gpu in node.inventory.unlisted],
        "gone": _holders_json(view, lambda uuids: not known.issuperset(uuids)),
        "transitions": transitions_json(view.history),
    }


def transitions_json(history: History) -> dict[str, Any]:
    """The node's transitions since the daemon began: counted by kind, and the last of each kind."""
    return {
        "since_s": history.began_s,
        "total": history.total,
        "counts": {kind.value: count for kind, count in history.counts.items()},
        "last": [
            {"number": each.number, "at_s": each.at_s, **transition_json(each.transition)} for each in history.last
        ],
    }


def transition_json(transition: Transition) -> dict[str, Any]:
    """One thing that changed. gpu_uuid: empty for the node; of a MIG device its own. index: null for the node."""
    return {
        "kind": transition.kind.value,
        "gpu_uuid": transition.uuid,
        "index": transition.index,
        "worse": transition.worse,
        "what": transition.what,
    }


def fault_json(fault: GpuFault) -> dict[str, Any]:
    """A GPU that cannot be described. uuid, pci_bus_id: empty where unknown."""
    return {"index": fault.index, "uuid": fault.uuid, "pci_bus_id": fault.pci_bus_id, "reason": fault.reason}


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
    """Grants and reservations whose GPUs are wanted; the kubelet allocated what is reserved, and nobody has it now."""
    holders: list[Entry | Reservation] = [
        entry for entry in view.ledger.entries.values() if entry.holds and wanted(entry.grant.uuids)
    ]
    holders += [each for device, each in view.ledger.reservations.items() if wanted((device.uuid,))]
    return [_holder_json(holder, view) for holder in holders]


def _holder_json(holder: Entry | Reservation, view: View) -> dict[str, Any]:
    entry = holder if isinstance(holder, Entry) else None
    return {
        **to_builtins(holder_line(holder)),
        "since_s": view.wall_of(holder.since),
        "running": entry is not None and entry.phase is GrantPhase.RUNNING,
        "reserved": entry is None,
        "restart": _restart(entry, view.node) if entry else "",
    }


def _restart(entry: Entry, node: Node) -> str:
    """Why a container has to be restarted; empty where it need not."""
    seat = entry.grant.seat
    if entry.phase is not GrantPhase.RUNNING or seat is None or seat.folder == node.mps.folder(entry.grant.uuids[0]):
        return ""
    return "its MPS daemon has ended, and with it what its programs had on the GPU: restart it"
