"""The daemon's answers on its control socket, as both sides know them; they are sent as JSON.

Fields are only ever added: a field that older daemons do not send has a default. A word of a newer daemon can be shown,
so states, signs and kinds are texts here. Times are seconds since the epoch, None if unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from nri_gpu.domain.allocation import ResourceStatus
from nri_gpu.domain.decision import Refused
from nri_gpu.domain.gpu import Unit, health_of, whole
from nri_gpu.domain.health import NO_NOTES, HealthNotes, HealthState, History
from nri_gpu.domain.node import Inventory, KernelGpu
from nri_gpu.dra.questions import DriverReport
from nri_gpu.records.ledger_file import HolderLine
from nri_gpu.stray.judge import StrayUse
from nri_gpu.system.node_name import NamedNode

# Both are known to the verb of another version.
FOR_ROOT: Final = "only root may do this"
CHANGES_NOTHING: Final = "an observer answers, which changes nothing: only a daemon, `nri-gpu run`, can do this"


class SynchronizeStatus(Struct, frozen=True, kw_only=True):
    """The runtime's last list of its pods and containers (objects). size_bytes: of its messages (parts).

    whole: false where it was cut off. duration_s: to our answer, or to the end of the connection.
    """

    at_s: float
    duration_s: float
    parts: int
    size_bytes: int
    objects: int
    whole: bool


class RuntimeConnection(Struct, frozen=True, kw_only=True):
    """The connection to the runtime. fault: why it is not ready. list_fault: why it could not list its containers.

    answered_s: when we last answered one of its requests. cri_fault: why its CRI cannot be asked. joined: false for a
    simulation that joins no runtime, which is ready without it. second: what proves that another nri-gpu serves the
    same runtime; empty where nothing does.
    """

    ready: bool
    since_s: float
    name: str = ""
    version: str = ""
    nri_version: str = ""
    fault: str = ""
    list_fault: str = ""
    cri_fault: str = ""
    joined: bool = True
    second: str = ""
    answered_s: float | None = None
    synchronize: SynchronizeStatus | None = None


class NodeStatus(Struct, frozen=True, kw_only=True):
    """The node. inventory_age_s: seconds since NVML confirmed it. inventory_confirmed: not by an earlier daemon.

    name: in Kubernetes, else the host's; empty from an older daemon. refresh_s: seconds between two queries of NVML.
    observed: an observer answers, which grants nothing.
    """

    observed: bool = False
    name: str = ""
    driver_version: str
    driver_generation: str
    driver_fault: str
    inventory_number: int
    inventory_age_s: float | None
    inventory_confirmed: bool
    inventory_fault: str
    inventory_fault_since_s: float | None = None
    simulated: bool = False
    refresh_s: int | None = None


class PolicyStatus(Struct, frozen=True):
    """The policy in force. fault: empty where it can be used.

    rejected: the fault of the file as it is now, where the policy before it stays in force; empty where there is none.
    digest: SHA-256 of the text in force, as `sha256sum` prints it; empty without a text, as for the built-in defaults.
    """

    source: str
    fault: str
    rejected: str = ""
    digest: str = ""


class KubeletStatus(Struct, frozen=True):
    """The device plugin. guard_alone: why a container that we never saw may start with its GPUs, but for the guard."""

    enabled: bool = False
    resources: tuple[ResourceStatus, ...] = ()
    guard_alone: str = ""


class DraStatus(Struct, frozen=True, kw_only=True):
    """Dynamic Resource Allocation. asked_s: when the driver process last asked; report: what it then said of itself.

    silent_s: seconds since then, on a clock that nobody sets; None: it never asked. fault: why the daemon does not
    answer it.
    """

    enabled: bool = False
    driver: str = ""
    asked_s: float | None = None
    silent_s: float | None = None
    report: DriverReport = DriverReport()
    fault: str = ""


class ClaimedDeviceStatus(Struct, frozen=True, kw_only=True):
    """A device of a claim. device: its name in ResourceSlices. admin: for monitoring; it holds nothing."""

    request: str
    device: str
    gpu_uuid: str
    mode: str
    admin: bool = False


class ClaimStatus(Struct, frozen=True, kw_only=True):
    """A ResourceClaim that is prepared here. pods: names of those that may have it.

    groups: names of the PodGroups that it is reserved for, whose pods are told apart as they come.
    """

    uid: str
    namespace: str
    name: str
    pods: tuple[str, ...]
    devices: tuple[ClaimedDeviceStatus, ...]
    groups: tuple[str, ...] = ()


class StrayStatus(Struct, frozen=True):
    """The stray-use audit's findings. looked_s: when it last looked. fault: why something may be missing."""

    enabled: bool = False
    looked_s: float | None = None
    fault: str = ""
    findings: tuple[StrayUse, ...] = ()


class HealthStatus(Struct, frozen=True):
    """A GPU's health, or a MIG device's, which is never better. since_s: None where it never changed."""

    state: str = HealthState.HEALTHY
    since_s: float | None = None
    why: str = ""
    changes: int = 0
    signs: tuple[str, ...] = ()

    @classmethod
    def of(cls, unit: Unit) -> HealthStatus:
        health = health_of(unit)
        return cls(health.state, health.since or None, health.why, health.changes, whole(unit).signs)


class IdleStatus(Struct, frozen=True, kw_only=True):
    """A holder that does not use its GPU, as far as samples see. samples: how many saw no use since then, without one.

    no_process: it has no process on the GPU, which is certain; else its processes were not seen to do anything.
    """

    no_process: bool
    since_s: float
    samples: int


class HolderUsage(Struct, frozen=True, kw_only=True):
    """A holder on one GPU, as the last sample saw it. processes: how many it has there. idle: None: no, or unknown.

    utilization_percent: of its processes together, where the driver tells that of each.
    """

    memory_bytes: int | None = None
    utilization_percent: int | None = None
    processes: int | None = None
    idle: IdleStatus | None = None


class GpuUsage(Struct, frozen=True, kw_only=True):
    """A GPU or MIG device, as the last sample saw it. A number that the driver does not tell is None."""

    sampled_s: float
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None


class RecordStatus(Struct, frozen=True):
    """The record of who had which GPU. folder: of usage.jsonl; empty where nothing is kept. why_none: a clause."""

    folder: str = ""
    why_none: str = ""


class SamplingStatus(Struct, frozen=True, kw_only=True):
    """The samples of what GPUs do. enabled: by the policy. fault: why there is none, or no newer one.

    each_second: a process samples them, and holds NVML open.
    """

    enabled: bool = False
    each_second: bool = False
    fault: str = ""


class HolderStatus(HolderLine, frozen=True, kw_only=True):
    """A grant or a reservation. restart: why its container has to be restarted; empty where it need not.

    cgroup: of a container that runs, or is lost; empty where it is not seen.
    """

    since_s: float | None
    running: bool
    reserved: bool = False
    restart: str = ""
    cgroup: str | None = None
    usage: HolderUsage | None = None

    @property
    def unseen(self) -> bool:
        """Return whether nobody can tell when the container's last process ends."""
        return self.running and self.cgroup == ""


class LostStatus(Struct, frozen=True, kw_only=True):
    """A container that is over for the runtime and has processes, some of which `pids` are. cgroup: empty: not seen.

    sought: the runtime does not list it, and its cgroup is being looked for.
    """

    container_id: str
    pod: str
    container: str
    gpu_uuids: tuple[str, ...]
    since_s: float | None
    cgroup: str
    pids: tuple[int, ...]
    sought: bool = False

    @property
    def shown_pids(self) -> str:
        return ", ".join(map(str, self.pids)) or "not to be seen from here"


class UnkilledStatus(Struct, frozen=True, kw_only=True):
    """A process of ours that was killed and hangs in the kernel. gpu_uuid: empty where it serves no single GPU.

    since_s: when it was killed.
    """

    program: str
    gpu_uuid: str
    pid: int
    since_s: float

    @property
    def clause(self) -> str:
        """Return `nvidia-smi of GPU-... (pid 7) hangs in the kernel, and cannot be killed`."""
        gpu = f" of {self.gpu_uuid}" if self.gpu_uuid else ""
        return f"{self.program}{gpu} (pid {self.pid}) hangs in the kernel, and cannot be killed"


class OpenedBy(Struct, frozen=True):
    """A container that was granted other GPUs, and whose device numbers are this GPU's now."""

    pod: str
    container: str


class ExternalStatus(Struct, frozen=True, kw_only=True):
    """A container that opens GPUs and MIG devices which nri-gpu did not grant it.

    gpu_uuids: those that it keeps from others. watched: those that it keeps from nobody, since it is a monitor.
    prepared: the device of NVIDIA's DRA driver by which it will open them, while no container does; else empty.
    by: who gave them to it, where an observer knows; else empty.
    """

    pod: str
    container: str
    container_id: str
    gpu_uuids: tuple[str, ...]
    watched: tuple[str, ...]
    prepared: str = ""
    by: str = ""


class ReleasingStatus(Struct, frozen=True):
    """The pod that has just released a GPU. offered_s: when the GPU is granted again at the latest."""

    pod: str
    pod_uid: str
    since_s: float | None
    offered_s: float | None
    processes: int | None


class CordonStatus(Struct, frozen=True, kw_only=True):
    """A GPU that root took out of use. by: who. why: root's text. until_reset: whether a reset ends it, too."""

    at_s: float
    by: str
    why: str
    until_reset: bool = False


class UnitStatus(Struct, frozen=True, kw_only=True):
    """A GPU or a MIG device, as `kind` says.

    place: NVML's index, `1`, of a MIG device `1:0`. unavailable: why a container of another pod could not have it
    exclusively. withheld: why it could be granted to nobody, whoever holds it. foreign: pods of other components.
    monitors: pods that open it and do not hold it. notes: of a GPU, beside its health. pci_bus_id: of the whole GPU.
    device_node: the one that is its alone, `/dev/nvidia0`; empty where unknown. pool: in the policy; empty: in none.
    offered_to: how policy lets new pods have it, `annotation`, `kubelet`, `dra`; None where the daemon is older.
    cordoned: of a GPU; None while it is in use.
    """

    place: str
    kind: str
    uuid: str
    model: str
    mode: str
    unavailable: str
    withheld: str = ""
    unavailable_since_s: float | None = None
    health: HealthStatus = HealthStatus()
    notes: HealthNotes = NO_NOTES
    holders: tuple[HolderStatus, ...]
    foreign: tuple[str, ...]
    opened_by: tuple[OpenedBy, ...] = ()
    monitors: tuple[str, ...] = ()
    left_by: ReleasingStatus | None = None
    usage: GpuUsage | None = None
    pci_bus_id: str = ""
    device_node: str = ""
    pool: str = ""
    offered_to: tuple[str, ...] | None = None
    cordoned: CordonStatus | None = None


class FaultStatus(Struct, frozen=True):
    """A GPU that cannot be described. uuid, pci_bus_id: empty where unknown. since_s: left out where no daemon says."""

    index: int
    uuid: str
    pci_bus_id: str
    reason: str
    since_s: float | UnsetType | None = UNSET


class OverlapStatus(Struct, frozen=True):
    """A GPU that containers of several pods can use, one of which has it exclusively.

    granted: whether several were granted it; else another component gave it to the rest.
    """

    gpu_uuid: str
    pods: tuple[str, ...]
    granted: bool = True


class ConflictStatus(Struct, frozen=True, kw_only=True):
    """A container with GPUs of another component that other pods have exclusively.

    gpu_uuids: these GPUs. holders: those pods, and claims of which no container has the GPU now.
    """

    pod: str
    container: str
    container_id: str
    gpu_uuids: tuple[str, ...]
    holders: tuple[str, ...]


class ObservedFinding(Struct, frozen=True, kw_only=True):
    """A finding of an observer. kind: of `FindingKind`. message: who, what, and what to do.

    namespace, pod, container: empty where it is of no single container. since_s: when it was first found.
    """

    kind: str
    message: str
    gpu_uuids: tuple[str, ...] = ()
    namespace: str = ""
    pod: str = ""
    container: str = ""
    since_s: float | None = None


class AllocationStatus(Struct, frozen=True, kw_only=True):
    """A GPU or MIG device that was given to a container, as an observer knows it.

    gpu_uuid: or empty for a device of no GPU known here, which is then named by `device`. by: who gave it. asked: what
    its NVIDIA_VISIBLE_DEVICES says, which gives nothing. shared: how many replicas are given, of which it has one; 0
    where it is whole. opened: whether one of its processes has it open now; None where that was not seen. began_s: when
    the container was made. since_s: when the observer first saw it there. last_opened_s: when a process was last seen
    to have it open. unseen: why a part is not known.
    """

    gpu_uuid: str
    device: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    container_id: str = ""
    runtime: str = ""
    by: str = ""
    claim: str = ""
    asked: str = ""
    shared: int = 0
    opened: bool | None = None
    began_s: float | None = None
    since_s: float | None = None
    last_opened_s: float | None = None
    unseen: str = ""


class ObserverStatus(Struct, frozen=True, kw_only=True):
    """The observer's own state. looked_s: when it last looked at containers and processes; kubelet_s: at the kubelet.

    unseen: what it cannot see, a sentence each. quiet: patterns of pods and programs whose use of GPUs is no finding.
    """

    looked_s: float | None = None
    kubelet_s: float | None = None
    kubelet: bool = False
    unseen: tuple[str, ...] = ()
    allocations: tuple[AllocationStatus, ...] = ()
    findings: tuple[ObservedFinding, ...] = ()
    quiet: tuple[str, ...] = ()


class DaemonStatus(Struct, frozen=True, kw_only=True, tag_field="schema", tag="nri-gpu/status/v1"):
    """The answer to `status`. gone: holders of GPUs that are gone. transitions: since the daemon began.

    options: of the daemon's command line, by their key in the policy, and `topology`, the simulated node's file.
    refusals: the last, in their order. lost: containers that are over for the runtime and have processes.
    external: containers that open GPUs which nri-gpu did not grant them. unkilled: processes of the daemon.
    cordon_fault: why it cannot tell which GPUs root took out of use, so that nothing new is granted; or empty.
    observer: where an observer answers in place of a daemon.
    """

    runtime: RuntimeConnection
    node: NodeStatus
    policy: PolicyStatus
    kubelet: KubeletStatus = KubeletStatus()
    gpus: tuple[UnitStatus, ...]
    faults: tuple[FaultStatus, ...] = ()
    unlisted: tuple[KernelGpu, ...]
    gone: tuple[HolderStatus, ...]
    transitions: History | None = None
    options: Mapping[str, str | bool | int | float] = {}
    stray: StrayStatus = StrayStatus()
    refusals: tuple[Refused, ...] = ()
    dra: DraStatus = DraStatus()
    claims: tuple[ClaimStatus, ...] = ()
    lost: tuple[LostStatus, ...] = ()
    overlaps: tuple[OverlapStatus, ...] = ()
    external: tuple[ExternalStatus, ...] = ()
    conflicts: tuple[ConflictStatus, ...] = ()
    unkilled: tuple[UnkilledStatus, ...] = ()
    sampling: SamplingStatus = SamplingStatus()
    record: RecordStatus = RecordStatus()
    cordon_fault: str = ""
    observer: ObserverStatus | None = None


class ProcessStatus(Struct, frozen=True, kw_only=True):
    """A process on a GPU. uid: None where it cannot be seen. comm: the kernel's name for it, of its own choice.

    container_id: empty for a process of the host. namespace, pod, container: empty where the runtime lists none.
    """

    gpu_uuid: str
    pid: int
    uid: int | None
    comm: str
    memory_bytes: int | None
    container_id: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""


class ProcessesAnswer(Struct, frozen=True, tag_field="schema", tag="nri-gpu/processes/v1"):
    """The answer to `processes`, as the last samples saw them. fault: why some may be missing; empty: none is."""

    node: NamedNode
    processes: tuple[ProcessStatus, ...]
    fault: str = ""


class RepairedAnswer(Struct, frozen=True, tag_field="schema", tag="nri-gpu/repaired/v1"):
    """The answer to `repaired`. gpu_uuid: empty where there is no such GPU. due: what was; empty where nothing was.

    awaited: whether root had taken it out of use until this reset, and it is in use again.
    """

    gpu_uuid: str
    due: str
    hold_down_s: int
    awaited: bool = False


class CordonAnswer(Struct, frozen=True, kw_only=True, tag_field="schema", tag="nri-gpu/cordon/v1"):
    """The answer to `cordon` and `uncordon`. gpu_uuid: empty where there is no such GPU. fault: why nothing changed.

    withheld: why the GPU is granted to nobody although root took it back into use. holders: what has it and keeps it.
    """

    gpu_uuid: str
    fault: str = ""
    withheld: str = ""
    holders: tuple[str, ...] = ()


class InventoryAnswer(Struct, frozen=True, tag_field="schema", tag="nri-gpu/inventory/v1"):
    """The answer to `inventory`, for `nri-gpu verify` of the same version."""

    inventory: Inventory
