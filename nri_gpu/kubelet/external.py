"""What others' device plugins and schedulers gave to a container, where policy has us inject it. Pure.

NVIDIA_VISIBLE_DEVICES never grants: images set it, and so may whoever makes a pod. The kubelet's own word does, by
PodResources; the variable has to agree with it, since both come of one Allocate.

    PodResources lists devices for the container    variable names them, or is not set    -> these
                                                    it names others, or all               -> refused
                                                    void, none                            -> nothing, as it says
    PodResources lists none for it                  whatever                              -> nothing
    PodResources has not told yet, or knows no pod  names devices                         -> refused for now
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.allocation.external import GPU_NODE, nvidia_names
from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.reservations import Missing, Named, holders, promised_device, reconciled
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId
from nri_gpu.domain.decision import Decision, Inject
from nri_gpu.domain.gpu import GpuUuid, MigPart
from nri_gpu.domain.kubelet import GROUP, REPLICA, AllocatedDevice, KubeletAllocation, PodDevices, gpu_groups
from nri_gpu.domain.node import Inventory
from nri_gpu.nri.convert import PREFIX
from nri_gpu.policy.kubelet import KubeletSettings, MigStrategy
from nri_gpu.request.environment import MOUNTED_NAMES, VARIABLE, named_devices

SHOWN_MAX: Final = 3  # names in a sentence
NOT_TOLD: Final = (
    "it names GPUs as a device plugin does, and the kubelet has not told yet whether it gave this container any "
    "(PodResources): it will be tried again; see the log of `nri-gpu run` if it stays so"
)
# A kubelet that was just restarted does not know its pods yet, so that is no answer either.
NO_POD: Final = (
    "it names GPUs as a device plugin does, and the kubelet knows of no such pod (PodResources): a pod of its own will "
    "be tried again; one that was made past it has to leave that variable out"
)
TWO_HANDS: Final = (
    "the kubelet gave this container GPUs of nri-gpu's own resource and of another device plugin's: ask for one of the "
    "two in resources.limits"
)


class Told(Struct, frozen=True):
    """What the kubelet told so far. pod: of the container's pod; None for not yet.

    reserved: GPUs that pods in reservation namespaces hold -> the GPU groups of those pods.
    """

    pod: PodDevices | None = None
    reserved: Mapping[GpuUuid, frozenset[str]] = {}


def given_beside(
    container: Container, told: Told, inventory: Inventory, settings: KubeletSettings
) -> KubeletAllocation | None:
    """What it was given by others, to be injected by us; None where that is nothing we could tell or should touch."""
    if not settings.beside or served_by_others(container):
        return None
    names = named_devices(container.env.get(VARIABLE, ""))
    if _is_fraction(container.pod, names, settings):
        return _fraction(container, names, told, inventory)
    return _of_plugin(container, names, told, inventory, settings) if settings.inject_for.patterns else None


def checked(given: KubeletAllocation, container: Container, told: Told, settings: KubeletSettings) -> KubeletAllocation:
    """What our own device plugin's tokens say, held against the kubelet's word where that is known."""
    said = told.pod.container(container.name) if told.pod else None
    if given.fault or said is None:
        return _reserving(given, container.pod, settings)
    if theirs(said.devices, settings):
        return KubeletAllocation(fault=TWO_HANDS)
    for resource in dict.fromkeys(each.resource for each in given.devices):
        here = frozenset(each.id for each in given.devices if each.resource == resource)
        if here != (there := said.of(resource)):
            return KubeletAllocation(
                fault=f"the kubelet says that it gave this container {_shown(there) or 'none'} of {resource}, and not "
                f"{_shown(here)}, which is signed on it: it was copied from another container; delete the pod to have "
                "the kubelet allocate anew"
            )
    return _reserving(given, container.pod, settings)


def served_by_others(container: Container) -> bool:
    """Whether somebody else injects here, or has: GPU nodes, CDI devices or hooks of NVIDIA's are on it."""
    nodes = not container.privileged and any(GPU_NODE.fullmatch(each.path) for each in container.devices)
    return nodes or bool(nvidia_names(container)) or bool(container.nvidia_hooks)


def theirs(devices: Iterable[AllocatedDevice], settings: KubeletSettings) -> tuple[AllocatedDevice, ...]:
    """Those of resources that are injected for others."""
    return tuple(each for each in devices if settings.inject_for.first(each.resource) is not None)


def reserves(namespace: str, settings: KubeletSettings) -> bool:
    """Whether pods there hold GPUs for others to share."""
    return bool(settings.reservations.patterns) and settings.reservations.first(namespace) is not None


def _of_plugin(
    container: Container, names: tuple[str, ...], told: Told, inventory: Inventory, settings: KubeletSettings
) -> KubeletAllocation | None:
    if told.pod is None or not told.pod.containers:
        return _waits(NOT_TOLD if told.pod is None else NO_POD) if names else None
    named, odd = _units(names, container, inventory)
    if odd and not inventory.gpus:
        return _waits(f"what it names cannot be told yet: {inventory.fault or 'no GPU is known on this node'}")
    said = told.pod.container(container.name)
    if said is None:  # a plain init container, of whose devices the kubelet makes its pod's later ones
        devices = tuple(each for each in theirs(told.pod.devices, settings) if each.uuid in named)
    else:
        devices = theirs(said.devices, settings)
    if not devices:
        return KubeletAllocation(key=VARIABLE) if names else None
    if VARIABLE in container.env and not names and "all" not in container.env[VARIABLE].split(","):
        return KubeletAllocation(key=VARIABLE)  # void, none
    if VARIABLE in container.env and (odd or named != {each.uuid for each in devices}):
        return KubeletAllocation(
            fault=f"it says {_cut(container.env[VARIABLE])}, and the kubelet gave this container "
            f"{_shown(each.id for each in devices)}: take the variable out of the pod's own environment",
            key=VARIABLE,
        )
    replicas = {REPLICA in each.id for each in devices}
    if len(replicas) > 1:
        return KubeletAllocation(
            fault="the kubelet gave it shared GPUs and others at once: ask for one kind", key=VARIABLE
        )
    return _reserving(KubeletAllocation(devices, replicas.pop(), key=VARIABLE), container.pod, settings)


def _is_fraction(pod: Pod, names: tuple[str, ...], settings: KubeletSettings) -> bool:
    if not names or not settings.reservations.patterns or reserves(pod.namespace, settings):
        return False
    return bool(gpu_groups(pod.labels))


def _fraction(container: Container, names: tuple[str, ...], told: Told, inventory: Inventory) -> KubeletAllocation:
    groups = gpu_groups(container.pod.labels)
    named, odd = _units(names, container, inventory)
    lacking = [*odd, *sorted(uuid for uuid in named if told.reserved.get(uuid, frozenset()).isdisjoint(groups))]
    if lacking:
        return _waits(
            f"it names {_shown(lacking)}, which no pod in the namespaces of kubelet.reservations holds for this pod's "
            f"GPU group ({GROUP}): it will be tried again, since the kubelet may not have told yet"
        )
    by = f"fraction-{container.pod.uid}"  # a resource of its own: what the reservation holds stays the reservation's
    return KubeletAllocation(tuple(AllocatedDevice(by, uuid) for uuid in sorted(named)), shared=True, key=VARIABLE)


def _units(
    names: tuple[str, ...], container: Container, inventory: Inventory
) -> tuple[frozenset[GpuUuid], tuple[str, ...]]:
    """GPUs and MIG devices of these names, UUIDs or indices; and names of none that is known."""
    if names == (MOUNTED_NAMES,):
        below = f"{MOUNTED_NAMES}/"
        names = tuple(each.removeprefix(below) for each in container.mounts if each.startswith(below))
        names = tuple(each for each in names if not each.startswith("imex/"))
    known: dict[str, GpuUuid] = {unit.uuid: unit.uuid for unit in inventory.units}
    known |= {str(gpu.index): gpu.uuid for gpu in inventory.gpus}
    known |= {part.place: part.uuid for part in inventory.units if isinstance(part, MigPart)}
    return (
        frozenset(known[name] for name in names if name in known),
        tuple(sorted(name for name in names if name not in known)),
    )


def _reserving(given: KubeletAllocation, pod: Pod, settings: KubeletSettings) -> KubeletAllocation:
    """A pod that reserves a GPU holds it for others to share."""
    if given.fault or given.shared or not reserves(pod.namespace, settings):
        return given
    return KubeletAllocation(given.devices, shared=True, key=given.key)


def _waits(sentence: str) -> KubeletAllocation:
    return KubeletAllocation(fault=sentence, key=VARIABLE, waits=True)


def _shown(names: Iterable[str]) -> str:
    some = sorted(names)
    return ", ".join(map(_cut, some[:SHOWN_MAX])) + (
        f" and {len(some) - SHOWN_MAX} more" if len(some) > SHOWN_MAX else ""
    )


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


PODS_KEPT: Final = 1024  # sandboxes; kubelets run at most some hundreds
COMPLAINTS_KEPT: Final = 256
JUST_STARTED: Final = (
    "nri-gpu has just started and the kubelet has not told yet which GPUs it gave to pods (PodResources): it will be "
    "tried again in a moment"
)
NOT_ASKED: Final = "PodResources is not asked: kubelet.podresources is empty, or nri-gpu was not started anew since"


class KubeletPods:
    """What was told of which sandbox. ask: have the kubelet asked about one, soon.

    settled: the kubelet's first list is here, or cannot be had: before that nobody knows what it gave before us.
    """

    def __init__(self, ask: Callable[[Pod], None], *, settled: bool = True) -> None:
        self.settled = settled
        self._ask = ask
        self._pods: dict[PodId, Pod] = {}
        self._names: dict[tuple[str, str], PodId] = {}
        self._told: dict[PodId, PodDevices] = {}
        self.changed = 0  # counts what could make an answer different

    def came(self, pod: Pod) -> None:
        """A sandbox: another one of that name is over, whatever was told of it."""
        if pod.id in self._pods:
            return
        self.gone(self._names.get((pod.namespace, pod.name), pod.id))
        while len(self._pods) >= PODS_KEPT:
            self.gone(next(iter(self._pods)))
        self._pods[pod.id] = pod
        self._names[pod.namespace, pod.name] = pod.id
        self._ask(pod)

    def gone(self, pod_id: PodId) -> None:
        """It is over."""
        pod = self._pods.pop(pod_id, None)
        if self._told.pop(pod_id, None) is not None:
            self.changed += 1
        if pod is not None and self._names.get((pod.namespace, pod.name)) == pod_id:
            del self._names[pod.namespace, pod.name]

    def of(self, pod: Pod) -> PodDevices | None:
        """What was told of this very pod; None where nothing was, and then it is asked."""
        known = self._pods.get(pod.id)
        if known is None or known.uid != pod.uid:
            self.gone(pod.id)
            self.came(pod)
            return None
        given = self._told.get(pod.id)
        if given is None or not given.containers:
            self._ask(pod)
        return given

    def named(self, given: PodDevices) -> Pod | None:
        """The sandbox that runs under that name."""
        return self._pods.get(self._names.get((given.namespace, given.name), PodId("")))

    def pods(self) -> tuple[Pod, ...]:
        """Sandboxes that are there."""
        return tuple(self._pods.values())

    def answered(self, pod: Pod, given: PodDevices) -> None:
        """What the kubelet says of one."""
        now = self._pods.get(pod.id)
        if now is None or now.uid != pod.uid or self._told.get(pod.id) == given:
            return
        self._told[pod.id] = given
        self.changed += 1

    def listed(self, pods: tuple[Pod, ...], given: tuple[PodDevices, ...]) -> None:
        """What it says of all. pods: those that were there when it was asked."""
        found: dict[tuple[str, str], PodDevices | None] = {}
        for each in given:  # two of one name are the old pod and the new, and nobody can tell which is which
            found[each.namespace, each.name] = None if (each.namespace, each.name) in found else each
        for pod in pods:
            said = found.get((pod.namespace, pod.name), PodDevices(pod.namespace, pod.name))
            if said is not None:
                self.answered(pod, said)

    def told(self) -> Iterator[tuple[Pod, PodDevices]]:
        """All that is known."""
        return ((self._pods[id_], given) for id_, given in self._told.items())


class ExternalAllocations:
    """What the plugin asks of the book. Without one nothing is known, and nothing is asked."""

    def __init__(self) -> None:
        self.pods: KubeletPods | None = None
        self._missing = Missing()
        self._held: set[ContainerId] = set()
        self._reserved: tuple[int, KubeletSettings, Mapping[GpuUuid, frozenset[str]]] | None = None
        self._needles: tuple[int, KubeletSettings, tuple[bytes, ...]] | None = None
        self._complained: dict[tuple[str, str, str], None] = {}

    def concerns(self, payload: bytes, settings: KubeletSettings) -> bool:
        """Whether the container of a request may have been given something that its bytes do not show."""
        if self.pods is None or not settings.inject_for.patterns:
            return False
        kept = self._needles
        if kept is None or kept[0] != self.pods.changed or kept[1] is not settings:
            uids = tuple(pod.uid.encode() for pod, given in self.pods.told() if theirs(given.devices, settings))
            kept = self._needles = (self.pods.changed, settings, uids)
        return any(uid in payload for uid in kept[2])

    def read(self, container: Container, inventory: Inventory, settings: KubeletSettings) -> Container:
        """The container with what others gave it, or with what is wrong with our own token; else the very same."""
        if self.pods is None and not settings.beside:
            return container
        told = self._told(container, settings)
        if container.kubelet is not None:
            given: KubeletAllocation | None = checked(container.kubelet, container, told, settings)
        else:
            given = given_beside(container, told, inventory, settings)
            if given is not None and given.waits and self.pods is None:
                given = KubeletAllocation(fault=NOT_ASKED, key=given.key, waits=True)
            if given is None and container.pod.annotations and self.pods is not None and not self.pods.settled:
                given = KubeletAllocation(fault=JUST_STARTED, key=PREFIX, waits=True)
        return container if given is container.kubelet else replace(container, kubelet=given)

    def decided(self, container: Container, decision: Decision, settings: KubeletSettings) -> None:
        """Remember who holds GPUs that others' device plugins gave."""
        given = container.kubelet
        if given is not None and isinstance(decision, Inject) and theirs(given.devices, settings):
            self._held.add(container.id)

    def complain(self, container: Container) -> None:
        """Once for each container of a pod: somebody should look at a grant that does not hold."""
        given = container.kubelet
        if given is None or not given.fault or given.waits:
            return
        about = (container.pod.uid, container.name, given.fault)
        if about in self._complained:
            return
        while len(self._complained) >= COMPLAINTS_KEPT:
            del self._complained[next(iter(self._complained))]
        self._complained[about] = None
        bound = logger.bind(namespace=container.pod.namespace, pod_name=container.pod.name, fault=given.fault)
        bound.bind(container_name=container.name).warning("what the kubelet gave does not hold")

    def taken(self, ledger: Ledger, settings: KubeletSettings) -> frozenset[GpuUuid]:
        """GPUs that others' device plugins gave, which ours therefore cannot."""
        if not settings.inject_for.patterns:
            return frozenset()
        self._held &= ledger.entries.keys()
        found: set[GpuUuid] = set()
        for id_, entry in ledger.entries.items():
            device = promised_device(id_)
            if entry.holds and (id_ in self._held if device is None else bool(theirs((device,), settings))):
                found.update(entry.grant.uuids)
        return frozenset(found)

    def reconcile(
        self,
        ledger: Ledger,
        given: tuple[PodDevices, ...],
        settings: KubeletSettings,
        now: float,
        adopt: Callable[[ContainerId, KubeletAllocation], None],
    ) -> Ledger:
        """The ledger held against all that the kubelet lists. adopt: told whose GPUs came by the kubelet."""
        named = tuple(self._named(given, settings))
        for each in named:
            for id_ in holders(ledger, each):
                adopt(id_, KubeletAllocation((each.device,), each.shared))
                if theirs((each.device,), settings):
                    self._held.add(id_)
        about = [id_ for id_ in ledger.entries if (d := promised_device(id_)) and self._is_counted(d, settings)]
        ledger, self._missing = reconciled(ledger, named, about, self._missing, now)
        return ledger

    def synchronized(
        self,
        containers: Iterable[Container],
        settings: KubeletSettings,
        adopt: Callable[[ContainerId, KubeletAllocation], None],
    ) -> None:
        """What the runtime lists: pods to ask about, and those who share what a scheduler reserved."""
        for container in containers:
            if self.pods is not None and container.pod.name != "?":  # of one whose pod the runtime did not list
                self.pods.came(container.pod)
            if settings.reservations.patterns and gpu_groups(container.pod.labels):
                adopt(container.id, KubeletAllocation(shared=True))

    def _named(self, given: tuple[PodDevices, ...], settings: KubeletSettings) -> Iterator[Named]:
        for pod in given:
            sandbox = self.pods.named(pod) if self.pods else None
            for container in pod.containers:
                for device in container.devices:
                    if self._is_counted(device, settings):
                        shared = REPLICA in device.id or reserves(pod.namespace, settings)
                        yield Named(device, pod.namespace, pod.name, container.name, shared, sandbox)

    def _is_counted(self, device: AllocatedDevice, settings: KubeletSettings) -> bool:
        """Whether a resource is of GPUs here: others' that we inject for, or our own."""
        if theirs((device,), settings):
            return True
        if not settings.enabled:
            return False
        resource = device.resource.removesuffix(".shared") if settings.rename else device.resource
        if resource == settings.resource:
            return True
        mixed = f"{settings.resource.partition('/')[0]}/mig-"
        return settings.mig_strategy is MigStrategy.MIXED and resource.startswith(mixed)

    def _told(self, container: Container, settings: KubeletSettings) -> Told:
        if self.pods is None:
            return Told()
        return Told(self.pods.of(container.pod), self._reserved_gpus(self.pods, settings))

    def _reserved_gpus(self, book: KubeletPods, settings: KubeletSettings) -> Mapping[GpuUuid, frozenset[str]]:
        if not settings.reservations.patterns:
            return {}
        kept = self._reserved
        if kept is not None and kept[0] == book.changed and kept[1] is settings:
            return kept[2]
        found: dict[GpuUuid, frozenset[str]] = {}
        for pod, given in book.told():
            if reserves(pod.namespace, settings):
                for device in given.devices:
                    if self._is_counted(device, settings):
                        found[device.uuid] = found.get(device.uuid, frozenset()) | gpu_groups(pod.labels)
        self._reserved = (book.changed, settings, found)
        return found
