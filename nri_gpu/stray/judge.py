"""The uses of GPUs that nobody granted: what processes have open, held against the ledger. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from enum import StrEnum
from typing import Final, Protocol

from msgspec import Struct

from nri_gpu.domain.bounds import MODESET_MINOR, NVIDIACTL_MINOR
from nri_gpu.domain.container import ContainerId, DeviceNumber
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory, Majors
from nri_gpu.domain.text import listed, shown
from nri_gpu.injection.device_nodes import MODESET, NVIDIACTL, UVM, UVM_TOOLS
from nri_gpu.injection.device_numbers import unit_numbers
from nri_gpu.ledger.ledger import Entry, Ledger, Live
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.policy.forms import Globs
from nri_gpu.stray.uses import Use

# The last part of a container's cgroup: by cgroupfs its id, in CRI-O and Podman behind a word; by systemd a scope
# (`cri-containerd-ID.scope`, `crio-ID.scope`, `docker-ID.scope`), or with colons where the kubelet has systemd's names
# and runc does not (`kubepods-podUID.slice:cri-containerd:ID`). `crio-conmon-ID.scope` is the host's, a monitor.
_CONTAINER: Final = re.compile(r"(?P<word>[\w.:-]*[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?")
_MONITOR: Final = "conmon"
_OF_A_USER: Final = re.compile(r"user@[0-9]+\.service")  # systemd lets that user make cgroups below it, by any name
_TEXT_MAX: Final = 120  # characters of a path in a sentence

PodName = tuple[str, str]  # namespace and name
Owners = Mapping[DeviceNumber, GpuUuid]


class Kind(StrEnum):
    """The kinds of users."""

    UNGRANTED = "ungranted-container"
    OTHER_GPU = "other-gpu"
    PRIVILEGED = "privileged-pod"
    UNKNOWN = "unknown-container"  # of another runtime, such as Docker
    HOST = "host-process"


class StrayProcess(Struct, frozen=True):
    """A process of a finding. started, program: as of `Use`."""

    pid: int
    started: int
    program: str


class StrayUse(Struct, frozen=True, kw_only=True):
    """A container, or a process of the host, that uses what nobody granted to it.

    kind: of `Kind`. message: who, what, and what to do. gpu_uuids, nodes: what nobody granted; a node such as nvidiactl
    is of no GPU. namespace, pod, container, container_id: empty where unknown. cgroup: of the first process. stoppable:
    it is an unprivileged container of this runtime, and uses a GPU. since_s: when it was first seen, seconds since the
    epoch.
    """

    kind: str
    message: str
    processes: tuple[StrayProcess, ...]
    gpu_uuids: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    namespace: str = ""
    pod: str = ""
    container: str = ""
    container_id: str = ""
    cgroup: str = ""
    stoppable: bool = False
    since_s: float | None = None


class Known(Struct, frozen=True, kw_only=True):
    """The daemon's knowledge of containers. allocated: GPUs and MIG devices that the kubelet gave to pods."""

    inventory: Inventory
    entries: Mapping[ContainerId, Entry] = {}
    live: Mapping[ContainerId, Live] = {}
    containers: Mapping[ContainerId, ListedContainer] = {}
    allocated: Mapping[PodName, frozenset[GpuUuid]] = {}

    @classmethod
    def of(
        cls,
        inventory: Inventory,
        before: tuple[Ledger, Mapping[ContainerId, ListedContainer]],
        after: tuple[Ledger, Mapping[ContainerId, ListedContainer]],
    ) -> Known:
        """Return what was known before a look or after it: containers come and go meanwhile."""
        return cls(
            inventory=inventory,
            entries={**before[0].entries, **after[0].entries},
            live={**before[0].live, **after[0].live},
            containers={**before[1], **after[1]},
        )

    def knows(self, container_id: ContainerId) -> bool:
        return any(container_id in each for each in (self.entries, self.live, self.containers))


def judge(uses: Iterable[Use], known: Known, exceptions: Globs) -> tuple[StrayUse, ...]:
    """Return what nobody granted, of these uses: containers first. exceptions: of the policy."""
    contained: dict[ContainerId, list[Use]] = {}
    owners = dict(unit_numbers(known.inventory))
    host: list[StrayUse] = []
    for use in uses:
        if container_id := container_of(use.cgroups, known):
            contained.setdefault(container_id, []).append(use)
        elif not any(map(exceptions.match, (use.program, *use.cgroups))):
            host.append(_finding(Kind.HOST, [use], frozenset(use.numbers), known.inventory.majors, owners))
    found = (_of_container(container_id, each, known, owners) for container_id, each in contained.items())
    return (*(each for each in found if each and not _excepted(each, contained, exceptions)), *host)


class Knows(Protocol):
    """The knowledge of which containers there are."""

    def knows(self, container_id: ContainerId) -> bool: ...


def container_of(cgroups: Iterable[str], known: Knows) -> ContainerId | None:
    """Return the container that a process with these cgroups is in, or None for a process of the host.

    If several are nested in one another, it is the outermost that is known: a container may name cgroups below its own.
    So may a user of the host, whose own containers are not known.
    """
    ids = list(_container_ids(cgroups, known))
    return next(filter(known.knows, ids), ids[0] if ids else None)


def _container_ids(cgroups: Iterable[str], known: Knows) -> Iterator[ContainerId]:
    for path in cgroups:
        of_a_user = False
        for part in path.split("/"):
            of_a_user = of_a_user or bool(_OF_A_USER.fullmatch(part))
            if (match := _CONTAINER.fullmatch(part)) and _MONITOR not in (match["word"] or ""):
                id_ = ContainerId(match["id"])
                if not (of_a_user and known.knows(id_)):
                    yield id_


def _excepted(found: StrayUse, uses: Mapping[ContainerId, list[Use]], exceptions: Globs) -> bool:
    if found.pod:
        return exceptions.match(f"{found.namespace}/{found.pod}")
    return any(map(exceptions.match, uses[ContainerId(found.container_id)][0].cgroups))


def _of_container(container_id: ContainerId, uses: list[Use], known: Known, owners: Owners) -> StrayUse | None:
    listed, entry = known.containers.get(container_id), known.entries.get(container_id)
    namespace, pod, name = _names(listed, entry)
    allocated = known.allocated.get((namespace, pod), frozenset())
    numbers = frozenset(number for use in uses for number in use.numbers)
    if has := known.live.get(container_id):  # what the runtime let it open; status shows who holds what by that
        numbers -= has.numbers
    if granted := entry is not None or bool(allocated):
        covered = _with_whole({*allocated, *(entry.grant.uuids if entry else ())}, known.inventory)
        numbers = frozenset(number for number in numbers if number in owners and owners[number] not in covered)
    if not numbers:
        return None
    pod_id = listed.pod_id if listed else None
    privileged = any(each.privileged for each in known.containers.values() if each.pod_id == pod_id)
    return _finding(
        _kind(listed is not None, granted, privileged=privileged),
        uses,
        numbers,
        known.inventory.majors,
        owners,
        namespace=namespace,
        pod=pod,
        container=name,
        container_id=container_id,
        stoppable=bool(listed and pod) and not privileged and not owners.keys().isdisjoint(numbers),
    )


def _names(listed: ListedContainer | None, entry: Entry | None) -> tuple[str, str, str]:
    if listed and listed.pod != "?":
        return listed.namespace, listed.pod, listed.name
    return (entry.grant.namespace, entry.grant.pod_name, entry.grant.container_name) if entry else ("", "", "")


def _kind(listed: bool, granted: bool, *, privileged: bool) -> Kind:
    if privileged:
        return Kind.PRIVILEGED
    if granted:
        return Kind.OTHER_GPU
    return Kind.UNGRANTED if listed else Kind.UNKNOWN


def _finding(
    kind: Kind,
    uses: list[Use],
    numbers: Set[DeviceNumber],
    majors: Majors,
    owners: Owners,
    *,
    namespace: str = "",
    pod: str = "",
    container: str = "",
    container_id: str = "",
    stoppable: bool = False,
) -> StrayUse:
    holding = [use for use in uses if not numbers.isdisjoint(use.numbers)]
    nodes = [usual_node(number, majors) for number in sorted(numbers)]
    cgroup = max(holding[0].cgroups, key=len, default="/")
    who = f"{namespace}/{pod}, container {container}" if pod else f"container {container_id} (cgroup {_text(cgroup)})"
    running = listed(f"pid {use.pid} {_text(use.program)}" for use in holding)
    who = f"host process {running}" if kind is Kind.HOST else f"{who} ({running})"
    return StrayUse(
        kind=kind,
        message=f"{who} has {listed(nodes)} open: {_REMEDIES[kind]}",
        processes=tuple(StrayProcess(use.pid, use.started, use.program) for use in holding),
        gpu_uuids=tuple(uuid for number, uuid in owners.items() if number in numbers),
        nodes=tuple(nodes),
        namespace=namespace,
        pod=pod,
        container=container,
        container_id=container_id,
        cgroup=cgroup,
        stoppable=stoppable,
    )


_EXCEPT: Final = "or list {} in stray.exceptions if it may"
_REMEDIES: Final[Mapping[Kind, str]] = {
    Kind.UNGRANTED: (
        "it was granted no GPU, so something else on this node gave it access (`nri-gpu check` names what it finds): "
        f"delete the pod and have it request a GPU, {_EXCEPT.format('the pod')}"
    ),
    Kind.OTHER_GPU: (
        "it was granted other GPUs, so something has widened its device rules (`nri-gpu verify` shows how): delete the "
        f"pod, {_EXCEPT.format('it')}"
    ),
    Kind.PRIVILEGED: (
        "a privileged pod can use every GPU without a grant: make it unprivileged and have it request a GPU, "
        f"{_EXCEPT.format('the pod')}"
    ),
    Kind.UNKNOWN: (
        "it was started by a different container runtime, which nri-gpu does not see: stop it there, "
        f"{_EXCEPT.format('its cgroup')}"
    ),
    Kind.HOST: f"it runs outside containers, where grants do not apply: end it, {_EXCEPT.format('its program')}",
}


def _with_whole(uuids: Iterable[GpuUuid], inventory: Inventory) -> frozenset[GpuUuid]:
    """Add the GPUs of which these are MIG devices: a MIG device is used through its GPU's node."""
    held = frozenset(uuids)
    return held | {gpu.uuid for gpu in inventory.gpus if any(part.uuid in held for part in gpu.mig)}


def usual_node(number: DeviceNumber, majors: Majors) -> str:
    """Return the node's usual path: where a process has made it may be anywhere."""
    major, minor = number
    if major == majors.nvidia:
        return {NVIDIACTL_MINOR: NVIDIACTL, MODESET_MINOR: MODESET}.get(minor, f"/dev/nvidia{minor}")
    if major == majors.nvidia_caps:
        return f"/dev/nvidia-caps/nvidia-cap{minor}"
    return UVM_TOOLS if minor else UVM


def _text(foreign: str) -> str:
    return shown(foreign, _TEXT_MAX)
