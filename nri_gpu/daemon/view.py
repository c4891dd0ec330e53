"""The daemon at one moment, and what `status` reports of it: holders of each GPU, and why a GPU is unavailable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict

from nri_gpu.daemon import answers
from nri_gpu.decision.offered import Way, offered_to
from nri_gpu.decision.overlaps import Conflict, conflicts, granted_twice, overlaps
from nri_gpu.decision.refusals import opener, why_not
from nri_gpu.domain.container import ContainerId, FirstProcess
from nri_gpu.domain.decision import Refused
from nri_gpu.domain.gpu import GpuUuid, MigPart, Unit, health_of, whole
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import NO_HISTORY, NO_NOTES, HealthNotes, HealthState, History, TransitionKind
from nri_gpu.domain.node import Node
from nri_gpu.domain.resource_claim import PreparedClaim
from nri_gpu.health.xids import ActionClass
from nri_gpu.ledger.holders import ExternalAllocation, Releasing, Reservation, Usage
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.plugin.counts import Counts
from nri_gpu.plugin.holds_follower import Account
from nri_gpu.plugin.process_looks import Lost
from nri_gpu.policy.model import Policy
from nri_gpu.records.ledger_file import holder_line
from nri_gpu.system.child import Unkilled
from nri_gpu.system.node_name import this_node
from nri_gpu.usage.idle import HolderUse, IdleSince
from nri_gpu.usage.usage_controller import NO_USAGES, SampledUnit, SampledUse, Usages

_APPEARING: Final = frozenset({TransitionKind.AVAILABLE, TransitionKind.GPU, TransitionKind.MIG})  # new, and unusable
_DESCRIBED: Final = frozenset({TransitionKind.DESCRIPTION})
_ANSWERED: Final = frozenset({TransitionKind.ANSWER})


class View(Struct, frozen=True, kw_only=True):
    """The daemon at one moment, for `status`, metrics and probes."""

    node: Node
    ledger: Ledger
    connection: answers.RuntimeConnection
    wall: float  # the moment, in seconds since the epoch
    monotonic: float  # the same moment on the monotonic clock, in seconds
    inventory_age_s: float | None  # since NVML described the GPUs; None before its first answer
    inventory_fault: str  # why NVML did not answer last, or empty
    policy: answers.PolicyStatus
    settings: Policy  # in force
    counts: Counts
    node_name: str = ""
    inventory_confirmed: bool = True  # by NVML, in the life of this daemon
    history: History = NO_HISTORY  # the node's transitions since the daemon began
    kubelet: answers.KubeletStatus = answers.KubeletStatus()
    options: Mapping[str, str | bool] = {}  # of the command line, by their key in the policy
    stray: answers.StrayStatus = answers.StrayStatus()
    refusals: tuple[Refused, ...] = ()
    dra: answers.DraStatus = answers.DraStatus()
    lost: tuple[Lost, ...] = ()
    unkilled: tuple[Unkilled, ...] = ()  # processes of the daemon that hang in the kernel
    notes: Mapping[str, HealthNotes] = {}  # by the UUID of a whole GPU
    usages: Usages = NO_USAGES  # what GPUs and their holders do
    held: Mapping[Account, float] = {}  # seconds that grants held GPUs
    record: answers.RecordStatus = answers.RecordStatus()
    ungranted: int = 0  # running containers that asked for GPUs and were created without us
    guard_connected: bool | None = None  # None where no guard can be seen from here, as in a pod
    restarts: Mapping[str, int] = {}  # child -> starts after its first
    health_transitions: Mapping[HealthState, int] = {}  # how often a GPU came into each state
    cordons: Mapping[GpuUuid, answers.CordonStatus] = {}  # GPUs that root took out of use
    cordon_fault: str = ""  # why nobody can tell which, or empty
    observer: answers.ObserverStatus | None = None  # in an observer
    xids: Mapping[tuple[str, ActionClass], int] = {}  # how often which came, by GPU and class of the catalogue's action

    @property
    def grants(self) -> bool:
        """Return whether containers can be granted GPUs now: whether `status` would name no fault that prevents it."""
        faults = (self.connection.list_fault, self.node.inventory.fault, self.inventory_fault, self.node.driver_fault)
        return self.connection.ready and not any((*faults, self.policy.fault, self.cordon_fault))

    def wall_of(self, monotonic: float) -> float | None:
        """Return a moment of the monotonic clock in seconds since the epoch, or None for an infinite one."""
        return self.wall - (self.monotonic - monotonic) if abs(monotonic) != float("inf") else None


def status_of(view: View) -> answers.DaemonStatus:
    node, inventory = view.node, view.node.inventory
    inventory_fault = inventory.fault or view.inventory_fault
    twice = granted_twice(view.ledger)
    usage, known = view.ledger.usage(), {unit.uuid for unit in inventory.units}
    ways = offered_to(inventory, view.settings)
    return answers.DaemonStatus(
        runtime=view.connection,
        node=answers.NodeStatus(
            observed=view.observer is not None,
            name=view.node_name,
            driver_version=inventory.driver_version,
            driver_generation=node.generation,
            driver_fault=node.driver_fault,
            inventory_number=node.number,
            inventory_age_s=view.inventory_age_s,
            inventory_confirmed=view.inventory_confirmed,
            inventory_fault=inventory_fault,
            inventory_fault_since_s=view.history.since(_ANSWERED) if inventory_fault else None,
            simulated=inventory.simulated,
            refresh_s=view.settings.inventory.refresh_s,
        ),
        policy=view.policy,
        kubelet=view.kubelet,
        gpus=tuple(_unit(unit, usage.get(unit.uuid), ways[unit.uuid], view) for unit in inventory.units),
        faults=tuple(
            answers.FaultStatus(
                each.index, each.uuid, each.pci_bus_id, each.reason, view.history.since(_DESCRIBED, "", each.index)
            )
            for each in inventory.faults
        ),
        unlisted=inventory.unlisted,
        gone=_holders(view, lambda uuids: not known.issuperset(uuids)),
        transitions=view.history,
        options=view.options,
        stray=view.stray,
        refusals=view.refusals,
        dra=view.dra,
        claims=tuple(map(_claim, view.ledger.claims.values())),
        lost=tuple(_lost(each, view) for each in view.lost),
        unkilled=tuple(
            answers.UnkilledStatus(program=each.program, gpu_uuid=each.gpu_uuid, pid=each.pid, since_s=each.since_s)
            for each in view.unkilled
        ),
        overlaps=tuple(
            answers.OverlapStatus(uuid, pods, uuid in twice) for uuid, pods in overlaps(view.ledger).items()
        ),
        external=tuple(map(_external, view.ledger.external.values())),
        conflicts=tuple(map(_conflict, conflicts(view.ledger).values())),
        sampling=sampling_of(view.usages),
        record=view.record,
        cordon_fault=view.cordon_fault,
        observer=view.observer,
    )


def sampling_of(usages: Usages) -> answers.SamplingStatus:
    return answers.SamplingStatus(enabled=usages.enabled, each_second=usages.each_second, fault=usages.fault)


def processes_of(
    uses: Iterable[SampledUse], usages: Usages, containers: Mapping[ContainerId, ListedContainer]
) -> answers.ProcessesAnswer:
    """Return the processes on GPUs, each with the pod that it is in. usages: of the same samples."""
    return answers.ProcessesAnswer(
        this_node(),
        tuple(_process(each, containers.get(each.container_id) if each.container_id else None) for each in uses),
        usages.fault,
    )


def _process(use: SampledUse, container: ListedContainer | None) -> answers.ProcessStatus:
    return answers.ProcessStatus(
        gpu_uuid=use.gpu_uuid,
        pid=use.process.pid,
        uid=use.process.uid,
        comm=use.process.comm,
        memory_bytes=use.memory_bytes,
        container_id=use.container_id or "",
        namespace=container.namespace if container else "",
        pod=container.pod if container else "",
        container=container.name if container else "",
    )


def _external(container: ExternalAllocation) -> answers.ExternalStatus:
    return answers.ExternalStatus(
        pod=container.pod,
        container=container.name,
        container_id=container.container_id,
        gpu_uuids=tuple(sorted(container.held)),
        watched=tuple(sorted(container.watched)),
        prepared=container.device,
        by=container.by,
    )


def _conflict(conflict: Conflict) -> answers.ConflictStatus:
    return answers.ConflictStatus(
        pod=conflict.other.pod,
        container=conflict.other.name,
        container_id=conflict.other.container_id,
        gpu_uuids=conflict.uuids,
        holders=conflict.holders,
    )


def _lost(container: Lost, view: View) -> answers.LostStatus:
    return answers.LostStatus(
        container_id=container.container_id,
        pod=container.pod,
        container=container.container,
        gpu_uuids=container.uuids,
        since_s=view.wall_of(container.since),
        cgroup=container.cgroup,
        pids=container.pids,
        sought=container.sought,
    )


def _claim(claim: PreparedClaim) -> answers.ClaimStatus:
    return answers.ClaimStatus(
        uid=claim.uid,
        namespace=claim.namespace,
        name=claim.name,
        pods=tuple(sorted(claim.pods.values())),
        groups=tuple(sorted(claim.groups.values())),
        devices=tuple(
            answers.ClaimedDeviceStatus(
                request=each.request, device=each.device, gpu_uuid=each.uuid, mode=each.mode, admin=each.admin
            )
            for each in claim.devices
        ),
    )


def _unit(unit: Unit, usage: Usage | None, ways: tuple[Way, ...], view: View) -> answers.UnitStatus:
    others, pool = tuple(usage.external.values()) if usage else (), view.settings.pool.of(unit)
    return answers.UnitStatus(
        place=unit.place,
        kind="mig" if isinstance(unit, MigPart) else "gpu",
        uuid=unit.uuid,
        model=unit.device.profile if isinstance(unit, MigPart) else unit.model,
        mode=usage.mode.value if usage and usage.mode else "",
        unavailable=_unavailable(unit, usage),
        withheld=why_not(unit),
        unavailable_since_s=_since_s(unit, view.history),
        health=answers.HealthStatus.of(unit),
        notes=view.notes.get(unit.uuid, NO_NOTES),
        holders=_holders(view, lambda uuids: unit.uuid in uuids, unit.uuid),
        foreign=tuple(each.pod for each in others if not each.container),
        opened_by=tuple(answers.OpenedBy(each.pod, each.container) for each in others if each.container),
        monitors=tuple(each.pod for each in view.ledger.external.values() if unit.uuid in each.watched),
        left_by=_left_by(usage.releasing, view) if usage and usage.releasing else None,
        usage=_gpu_usage(view.usages.units.get(unit.uuid), view),
        pci_bus_id=whole(unit).pci_bus_id,
        device_node=_device_node(unit),
        pool=pool.name if pool else "",
        offered_to=None if view.observer else ways,
        cordoned=view.cordons.get(unit.uuid),
    )


def _device_node(unit: Unit) -> str:
    """Return the path of the device node that is the unit's alone, or empty if it is not known."""
    if not isinstance(unit, MigPart):
        return f"/dev/nvidia{unit.minor_number}"
    minor = unit.device.compute_instance_minor
    return "" if minor is None else f"/dev/nvidia-caps/nvidia-cap{minor}"


def _gpu_usage(sampled: SampledUnit | None, view: View) -> answers.GpuUsage | None:
    if sampled is None:
        return None
    unit = sampled.unit
    return answers.GpuUsage(
        sampled_s=view.wall - (view.monotonic - sampled.at),
        memory_used_bytes=unit.memory_used_bytes,
        memory_total_bytes=unit.memory_total_bytes,
        utilization_percent=unit.utilization_percent,
        temperature_c=unit.temperature_c,
        power_w=unit.power_mw and unit.power_mw / 1000,
        power_limit_w=unit.power_limit_mw and unit.power_limit_mw / 1000,
        sm_clock_mhz=unit.sm_clock_mhz,
        memory_clock_mhz=unit.memory_clock_mhz,
    )


def _holder_usage(use: HolderUse | None, view: View) -> answers.HolderUsage | None:
    if use is None:
        return None
    look = use.look
    return answers.HolderUsage(
        memory_bytes=look.memory_bytes if look.own else None,
        utilization_percent=look.utilization_percent,
        processes=len(look.processes) if look.own and look.processes is not None else None,
        idle=_idle(use.idle, view) if use.idle else None,
    )


def _idle(idle: IdleSince, view: View) -> answers.IdleStatus:
    since_s = view.wall - (view.monotonic - idle.since)
    return answers.IdleStatus(no_process=idle.no_process, since_s=since_s, samples=idle.samples)


def _since_s(unit: Unit, history: History) -> float | None:
    """Return when health, driver or MIG mode made the unit ungrantable; its holders have times of their own."""
    if not why_not(unit):
        return None
    health = health_of(unit)
    return history.since(_APPEARING, unit.uuid) if health.grantable else health.since


def _left_by(pod: Releasing, view: View) -> answers.ReleasingStatus:
    offered_s = view.wall_of(pod.since + pod.grace_s)
    return answers.ReleasingStatus(pod.pod, pod.pod_uid, view.wall_of(pod.since), offered_s, pod.processes)


def _unavailable(unit: Unit, usage: Usage | None) -> str:
    """Return why a container of another pod could not have the unit exclusively, or empty if it could."""
    if reason := why_not(unit):
        return reason
    if usage is None:
        return ""
    if not (usage.pods or usage.external or usage.claims):
        return f"just released by {usage.releasing}" if usage.releasing else ""
    pods = ", ".join(sorted((*usage.pods.values(), *usage.idle_claims)))
    if usage.mode is Mode.EXCLUSIVE:
        return f"held exclusively by {pods}"
    if pods:
        return f"held in {usage.mode} mode by {pods}"
    return f"held by {', '.join(map(opener, usage.external.values()))}"


def _holders(
    view: View, wanted: Callable[[tuple[GpuUuid, ...]], bool], on: GpuUuid | None = None
) -> tuple[answers.HolderStatus, ...]:
    """Return grants and reservations of wanted GPUs; the kubelet allocated what is reserved, and nobody has it now.

    on: the GPU whose use by them is shown.

    What an earlier device plugin gave to a container of the pod stands among external allocations alone.
    """
    opened = {(each.pod_id, uuid) for each in view.ledger.external.values() for uuid in each.held}
    holders: list[Entry | Reservation] = [
        entry for entry in view.ledger.entries.values() if entry.holds and wanted(entry.grant.uuids)
    ]
    holders += [
        each
        for device, each in view.ledger.reservations.items()
        if wanted((device.uuid,)) and (each.pod_id, device.uuid) not in opened
    ]
    return tuple(_holder(holder, view, on) for holder in holders)


def _holder(holder: Entry | Reservation, view: View, on: GpuUuid | None) -> answers.HolderStatus:
    entry = holder if isinstance(holder, Entry) else None
    return answers.HolderStatus(
        **asdict(holder_line(holder)),
        since_s=view.wall_of(holder.since),
        running=entry is not None and entry.phase is GrantPhase.RUNNING,
        reserved=entry is None,
        restart=_restart(entry, view.node) if entry else "",
        cgroup=_cgroup(view.ledger.processes.get(entry.grant.container_id)) if entry and entry.ran else None,
        usage=_holder_usage(view.usages.holders.get((entry.grant.container_id, on)), view) if entry and on else None,
    )


def _cgroup(process: FirstProcess | None) -> str:
    return process.cgroup.path if process and process.cgroup else ""


def _restart(entry: Entry, node: Node) -> str:
    """Return why a container has to be restarted, or empty if it need not."""
    seat = entry.grant.seat
    if entry.phase is not GrantPhase.RUNNING or seat is None or seat.folder == node.mps.folder(entry.grant.uuids[0]):
        return ""
    return "its MPS daemon has ended, and with it what its programs had on the GPU: restart it"
