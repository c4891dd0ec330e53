"""The devices that our device plugin advertises to the kubelet, and the answers to the kubelet's requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.decision.cordoned import is_kept
from nri_gpu.decision.eligible import node_fault
from nri_gpu.decision.offered import KubeletOffer, kubelet_offer
from nri_gpu.decision.overlaps import overlaps
from nri_gpu.decision.refusals import why_not
from nri_gpu.decision.topology import Surroundings, choose, topology_of
from nri_gpu.domain.allocation import REPLICA, AllocatedDevice
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.gpu import GpuUuid, MigPart, Unit, closure, described, nvml_order, whole
from nri_gpu.domain.gpu_request import Strategy
from nri_gpu.domain.node import Node
from nri_gpu.domain.text import shown
from nri_gpu.kubelet.allocations import KubeletTokens, held_by_others
from nri_gpu.kubelet.required_device import RequiredDevice, token_key, write_token
from nri_gpu.ledger.reservations import reservation_id
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.policy.select import stale_fault
from nri_gpu.system.state import NodeState

NOT_CONNECTED: Final = "nri-gpu is not connected to the container runtime, so pods would start without their GPUs"
OFFERED_TWICE: Final = (
    "nri-gpu started with dra.enabled and kubelet.enabled and without a usable policy that gives each its own pool, so "
    "the scheduler would count GPUs twice: restart nri-gpu"
)
NO_KEY: Final = "the key that signs answers to the kubelet cannot be read or made"
TAKEN: Final = "held by a container that got it by annotation, from another component or by another device ID"
STUCK: Final = (
    "held by processes whose container has ended for the runtime, or used by two pods, one of them exclusively"
)
LOST: Final = "the driver no longer describes it"
NAME_MAX: Final = 80  # characters
WHY_SHOWN_MAX: Final = 300


class AllocationError(NriGpuError):
    """An Allocate that must fail. The error's sentence ends up in the pod's event."""


class Device(Struct, frozen=True):
    """A device as the kubelet sees it."""

    id: str
    why: str  # it is unhealthy; empty if it is healthy
    closed: str  # why it is allocated to nobody; empty if it may be
    numa_node: int | None  # None where unknown
    gpu: GpuUuid  # the GPU that it is, or is a part of


class ReservingPlugin(Protocol):
    """The parts that the advertised devices need of the NRI plugin, which alone changes the ledger."""

    kubelet: KubeletTokens

    def aged(self, node: Node) -> Node:
        """Return the node with the age of its inventory, where policy asks for it."""

    def reserve(self, devices: Iterable[AllocatedDevice], *, shared: bool) -> None:
        """Reserve devices that the kubelet allocated to a pod."""


class Answer(Struct, frozen=True):
    """The answer of Allocate for one container. cdi_device: the required device's name, or empty."""

    annotations: Mapping[str, str]
    cdi_device: str = ""


class AdvertisedDevices:
    """The resources of this node, and what was advertised before: a GPU that is lost is not a GPU that was removed.

    connected: to the container runtime. offered_twice: the scheduler may be offered the same GPUs by DRA, too.
    """

    def __init__(
        self,
        settings: KubeletSettings,
        node_state: NodeState,
        plugin: ReservingPlugin,
        required: RequiredDevice,
        *,
        connected: bool = False,
        offered_twice: bool = False,
    ) -> None:
        self.settings = settings
        self.connected = connected
        self._offered_twice = offered_twice
        self._node_state = node_state
        self._plugin = plugin
        self._required = required
        self._known: dict[str, tuple[Device, ...]] = {}
        self._left: set[str] = set()  # out of use, and the kubelet wanted to allocate them: their pods are gone

    def hindrance(self) -> str:
        """Return why a container created now would not get its GPUs; empty when it would."""
        policy = self._node_state.policy
        if not self.connected:
            return NOT_CONNECTED
        if self._plugin.kubelet.key is None:
            return NO_KEY
        if policy.fault:
            return f"the policy is broken: {policy.fault}"
        if self._offered_twice:
            return OFFERED_TWICE
        node = self._plugin.aged(self._node_state.node)
        if stale := stale_fault(policy, node.inventory_age_s):
            return stale
        reason = node_fault(closure(policy.defaults.capabilities), node)
        return reason.sentence if reason else ""

    def left_out(self) -> str:
        """Return which MIG devices have no resource, and what to do, or empty."""
        return self._offer().fault

    @property
    def shared(self) -> bool:
        """Return whether several pods share each GPU."""
        return self.settings.replicas > 1

    def resources(self) -> tuple[str, ...]:
        """Name the resources. A resource that is gone stays, without devices, so that the kubelet learns of it."""
        for name in self._units():
            self._known.setdefault(name, ())
        return tuple(self._known)

    def devices(self, resource: str) -> tuple[Device, ...]:
        """List all devices of a resource, in NVML's order."""
        hindrance, state = self.hindrance(), self._node_state
        taken = held_by_others(state.ledger, state.settings.kubelet, self.offered(), shared=self.shared)
        stuck = state.ledger.stuck | overlaps(state.ledger).keys()
        found: list[Device] = []
        for unit in self._units().get(resource, ()):
            held = STUCK if unit.uuid in stuck else TAKEN if unit.uuid in taken else ""
            why, gpu = hindrance or why_not(unit, given=True) or held, whole(unit)
            closed = hindrance or why_not(unit) or held
            if not described(unit).cordon:
                self._left.difference_update(self._ids(unit))
            for id_ in self._ids(unit):
                # The kubelet fails a pod whose own device is unhealthy when it admits the pod again, as after a boot.
                kept = is_kept(unit, reservation_id(AllocatedDevice(resource, id_))) and id_ not in self._left
                found.append(Device(id_, why if kept else closed, closed, gpu.numa_node, gpu.uuid))
        self._known[resource] = (*found, *self._lost(resource, found))
        return self._known[resource]

    def offered(self) -> frozenset[AllocatedDevice]:
        """Return the devices of all resources, by the ids under which the kubelet counts them now."""
        units = ((name, unit) for name, listed in self._units().items() for unit in listed)
        return frozenset(AllocatedDevice(name, id_) for name, unit in units for id_ in self._ids(unit))

    def preferred(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> tuple[str, ...]:
        """Choose which available IDs to take, with those that must be taken. A hint, so unknown IDs are no error."""
        units = {id_: unit for unit in self._units().get(resource, ()) for id_ in self._ids(unit)}
        kept = tuple(dict.fromkeys(sorted(must)))
        free = sorted(set(available) - set(kept))
        number = min(size - len(kept), len(free))
        if number <= 0:
            return kept
        known = [id_ for id_ in free if id_ in units and not why_not(units[id_])]
        if self.shared or any(isinstance(units[id_], MigPart) for id_ in known):
            pack = self._node_state.policy.placement.strategy is Strategy.PACK
            chosen = _one_by_one(units, known, number, fullest=pack and not self.shared)
        else:
            chosen = self._together(units, known, [units[id_] for id_ in kept if id_ in units], number)
        rest = [id_ for id_ in free if id_ not in chosen]
        return (*kept, *chosen, *rest[: number - len(chosen)])

    def allocate(self, resource: str, requests: Sequence[Sequence[str]]) -> tuple[Answer, ...]:
        """Reserve the devices of each container, and return the answer for it.

        Raises: AllocationError: nothing was reserved.
        """
        key, shared = self._plugin.kubelet.key, self.shared
        requested = [sorted(ids) for ids in requests]
        asked, advertised = (
            [id_ for ids in requested for id_ in ids],
            {each.id: each for each in self.devices(resource)},
        )
        self._left.update(each.id for each in advertised.values() if each.id in asked and each.closed and not each.why)
        _check(resource, asked, advertised)
        if key is None or not all(requested):
            why = "a container asks for none" if key else NO_KEY
            raise AllocationError(f"{resource} cannot be allocated: {why}")
        devices = [[AllocatedDevice(resource, id_) for id_ in ids] for ids in requested]
        for each in devices:
            self._plugin.reserve(each, shared=shared)
        required = self._required.name()
        if required:
            self._plugin.kubelet.require(chain.from_iterable(devices))
        name = token_key(resource)
        return tuple(Answer({name: write_token(resource, ids, key, shared=shared)}, required) for ids in requested)

    def _together(
        self, units: Mapping[str, Unit], ids: Sequence[str], taken: Sequence[Unit], number: int
    ) -> tuple[str, ...]:
        """Choose whole GPUs: the best linked set, as `decision.placement.place` chooses for annotations."""
        topology, used = topology_of(self._node_state.node.inventory), self._node_state.ledger.usage()
        places = topology.places
        at = {places[units[id_].uuid]: id_ for id_ in ids}
        chosen = choose(
            topology,
            min(number, len(at)),
            tuple(sorted(at)),
            taken=tuple(sorted(places[unit.uuid] for unit in taken)),
            around=Surroundings(
                free=tuple(place for uuid, place in places.items() if uuid not in used),
                strategy=self._node_state.policy.placement.strategy,
            ),
        )
        return tuple(at[place] for place in sorted(chosen))

    def _ids(self, unit: Unit) -> tuple[str, ...]:
        if not self.shared:
            return (unit.uuid,)
        return tuple(f"{unit.uuid}{REPLICA}{number}" for number in range(self.settings.replicas))

    def _units(self) -> Mapping[str, tuple[Unit, ...]]:
        """Map each resource to its GPUs and MIG devices."""
        return self._offer().resources

    def _offer(self) -> KubeletOffer:
        return kubelet_offer(self._node_state.node.inventory, self.settings, self._node_state.policy.pool)

    def _lost(self, resource: str, found: Sequence[Device]) -> tuple[Device, ...]:
        """Return devices advertised before whose GPU is gone while the driver has a fault: they stay, unhealthy."""
        inventory = self._node_state.node.inventory
        if not (inventory.fault or inventory.faults):
            return ()
        here = {device.id for device in found}
        described = {gpu.uuid for gpu in inventory.gpus if not gpu.unavailable}
        gone = (each for each in self._known.get(resource, ()) if each.id not in here and each.gpu not in described)
        return tuple(replace(device, why=LOST, closed=LOST) for device in gone)


def _check(resource: str, ids: Sequence[str], advertised: Mapping[str, Device]) -> None:
    """Check the IDs of an Allocate. Raises: AllocationError: an ID is unknown, unhealthy or repeated."""
    if len(ids) > len(advertised):
        raise AllocationError(
            f"the kubelet asks for {len(ids)} of {resource} and this node has {len(advertised)}: its list of devices "
            "is out of date; try again."
        )
    seen: set[str] = set()
    for id_ in ids:
        name = shown(id_, NAME_MAX)
        if id_ in seen:
            raise AllocationError(f"duplicate device ID {name} of {resource} in Allocate: try again.")
        if id_ not in advertised:
            raise AllocationError(
                f"this node no longer has {name} of {resource}, because MIG devices were re-created or a GPU was "
                "removed: delete the pod to have it re-created."
            )
        if why := advertised[id_].closed:
            raise AllocationError(
                f"{name} of {resource} cannot be allocated: {why[:WHY_SHOWN_MAX].rstrip('.')}; try again."
            )
        seen.add(id_)


def _one_by_one(units: Mapping[str, Unit], ids: Sequence[str], number: int, *, fullest: bool) -> tuple[str, ...]:
    """Choose MIG devices and replicas by how much of their GPU is in use, then by how much of it was picked already."""
    gpu_of = {id_: whole(unit).uuid for id_, unit in units.items()}
    in_use = Counter(gpu_of[id_] for id_ in units.keys() - set(ids))
    picked: Counter[GpuUuid] = Counter()
    left, chosen = list(ids), list[str]()

    def rank(id_: str) -> tuple[object, ...]:
        gpu = gpu_of[id_]
        used = in_use[gpu] + picked[gpu]
        return -used if fullest else used, picked[gpu], nvml_order(units[id_]), id_

    while left and len(chosen) < number:
        best = min(left, key=rank)
        left.remove(best)
        chosen.append(best)
        picked[gpu_of[best]] += 1
    return tuple(chosen)
