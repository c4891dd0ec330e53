"""What this room needs of the rest of the daemon, and the words it speaks to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from msgspec import Struct, field

from nri_gpu.allocation.messages import why_not
from nri_gpu.allocation.topology import Room, choose, topology_of
from nri_gpu.domain.claim import Strategy
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigPart, Unit, is_compute_slice, nvml_order, whole
from nri_gpu.domain.kubelet import REPLICA, AllocatedDevice
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.kubelet.token import token_key, write_token
from nri_gpu.policy.kubelet import KubeletSettings, MigStrategy
from nri_gpu.policy.model import Policy


class Books(Protocol):
    """The one ledger, the one inventory and the one policy of this node."""

    def node(self) -> Node:
        """The newest snapshot."""
        ...

    def policy(self) -> Policy:
        """What holds now; every default while it is broken."""
        ...

    def hindrance(self) -> str:
        """Why a container created now would not get its GPUs, in a sentence; empty when it would."""
        ...

    def taken(self, *, shared: bool) -> frozenset[GpuUuid]:
        """GPUs that others than the kubelet's pods hold."""
        ...

    def used(self) -> frozenset[GpuUuid]:
        """GPUs that anybody holds."""
        ...

    def promise(self, devices: Iterable[AllocatedDevice], *, shared: bool) -> None:
        """The kubelet gave these to a pod."""
        ...

    def required(self, devices: Iterable[AllocatedDevice]) -> str:
        """The CDI device to be answered beside these; empty for none."""
        ...

    def key(self) -> bytes | None:
        """What tokens are signed with; None while it cannot be had."""
        ...


class AllocationError(NriGpuError):
    """An Allocate that must fail. Its sentence ends up in the pod's event."""


class Device(Struct, frozen=True):
    """One device as the kubelet is told of it.

    why: it cannot be had; empty when it can. numa_node: None where the host does not tell.
    """

    id: str
    why: str = field(default="")
    numa_node: int | None = None


def prefer(
    units: Mapping[str, Unit], available: Sequence[str], must: Sequence[str], size: int, books: Books, *, replicas: bool
) -> tuple[str, ...]:
    """Ids, those that must be included first. units: what the ids are; ids of none are taken last, in order."""
    kept = tuple(dict.fromkeys(sorted(must)))
    open_ones = sorted(set(available) - set(kept))
    number = min(size - len(kept), len(open_ones))
    if number <= 0:
        return kept
    known = [id_ for id_ in open_ones if id_ in units]
    if replicas or any(isinstance(units[id_], MigPart) for id_ in known):
        chosen = _one_by_one(units, known, number, _fullest_first(books) and not replicas)
    else:
        chosen = _together(units, known, [units[id_] for id_ in kept if id_ in units], number, books)
    rest = [id_ for id_ in open_ones if id_ not in chosen]
    return (*kept, *chosen, *rest[: number - len(chosen)])


def _together(
    units: Mapping[str, Unit], ids: Sequence[str], taken: Sequence[Unit], number: int, books: Books
) -> tuple[str, ...]:
    """Whole GPUs: the best linked set, as `allocation.place` chooses for annotations."""
    inventory, used = books.node().inventory, books.used()
    places = topology_of(inventory).places
    at = {places[units[id_].uuid]: id_ for id_ in ids}
    free = tuple(place for uuid, place in places.items() if uuid not in used)
    chosen = choose(
        topology_of(inventory),
        min(number, len(at)),
        tuple(sorted(at)),
        taken=tuple(sorted(places[unit.uuid] for unit in taken)),
        room=Room(free=free, strategy=books.policy().placement.strategy),
    )
    return tuple(at[place] for place in sorted(chosen))


def _one_by_one(units: Mapping[str, Unit], ids: Sequence[str], number: int, fullest: bool) -> tuple[str, ...]:
    """MIG devices and replicas: links do not matter, how much of each GPU is in use does, then how much was picked."""
    gpu_of = {id_: whole(unit).uuid for id_, unit in units.items()}
    candidates, sign = set(ids), -1 if fullest else 1
    in_use = Counter(gpu_of[id_] for id_ in units if id_ not in candidates)
    picked: Counter[GpuUuid] = Counter()
    left, chosen = list(ids), list[str]()

    def rank(id_: str) -> tuple[object, ...]:
        gpu = gpu_of[id_]
        return sign * (in_use[gpu] + picked[gpu]), picked[gpu], nvml_order(units[id_]), id_

    while left and len(chosen) < number:
        best = min(left, key=rank)
        left.remove(best)
        chosen.append(best)
        picked[gpu_of[best]] += 1
    return tuple(chosen)


def _fullest_first(books: Books) -> bool:
    return books.policy().placement.strategy is Strategy.PACK


SHARED: Final = ".shared"
TAKEN: Final = "it is held by a container that got it by annotation, or by another hand"
LOST: Final = "the driver does not describe it any more"
WHY_SHOWN_MAX: Final = 300  # characters

_Filter = Callable[[Unit], bool]


class AdvertisedDevices:
    """The resources of this node. Remembers what it offered, since a GPU that is lost is not a GPU that was removed."""

    def __init__(self, settings: KubeletSettings, books: Books) -> None:
        self.settings = settings
        self.books = books
        self._known: dict[str, tuple[Device, ...]] = {}

    def resources(self) -> tuple[str, ...]:
        """By name; one that was there once stays, with no devices, for the kubelet forgets only what it is told."""
        for name in self._units(self.books.node().inventory):
            self._known.setdefault(name, ())
        return tuple(self._known)

    def devices(self, resource: str) -> tuple[Device, ...]:
        """All of a resource, in NVML's order, with what is wrong with each."""
        inventory, hindrance = self.books.node().inventory, self.books.hindrance()
        taken = self.books.taken(shared=self.shared)
        found: list[Device] = []
        for unit in self._units(inventory).get(resource, ()):
            why = hindrance or why_not(unit) or (TAKEN if unit.uuid in taken else "")
            found += [Device(id_, why, whole(unit).numa_node) for id_ in self._ids(unit)]
        self._known[resource] = (*found, *self._lost(resource, found, inventory))
        return self._known[resource]

    def preferred(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> tuple[str, ...]:
        """Which of those available to take, with those that must be; a hint, so nothing is wrong enough to refuse."""
        units = {
            id_: unit for unit in self._units(self.books.node().inventory).get(resource, ()) for id_ in self._ids(unit)
        }
        return prefer(units, available, must, size, self.books, replicas=self.shared)

    def allocate(self, resource: str, requests: Sequence[Sequence[str]]) -> tuple[Mapping[str, str], ...]:
        """The annotations for each container.

        Raises:
            AllocationError: nothing was promised to any of them.

        """
        key = self.books.key()
        offered = {device.id: device for device in self.devices(resource)}
        asked = [sorted(ids) for ids in requests]
        _check(resource, [id_ for ids in asked for id_ in ids], offered)
        if key is None or not all(asked):
            raise AllocationError(f"no {resource} can be given out: {'a container asks for none' if key else 'no key'}")
        for ids in asked:
            self.books.promise([AllocatedDevice(resource, id_) for id_ in ids], shared=self.shared)
        return tuple({token_key(resource): write_token(resource, ids, key, shared=self.shared)} for ids in asked)

    def required(self, resource: str, ids: Iterable[str]) -> str:
        """The CDI device to be answered beside a container's annotations; empty for none."""
        return self.books.required([AllocatedDevice(resource, id_) for id_ in ids])

    @property
    def shared(self) -> bool:
        """Whether several pods share each GPU."""
        return self.settings.replicas > 1

    def _ids(self, unit: Unit) -> tuple[str, ...]:
        if not self.shared:
            return (unit.uuid,)
        return tuple(f"{unit.uuid}{REPLICA}{number}" for number in range(self.settings.replicas))

    def _units(self, inventory: Inventory) -> Mapping[str, tuple[Unit, ...]]:
        """Resource -> GPUs and MIG devices."""
        suffix = SHARED if self.shared and self.settings.rename else ""
        main = self.settings.resource + suffix
        gpus, strategy = inventory.gpus, self.settings.mig_strategy
        found: dict[str, list[Unit]] = {main: []}
        if strategy is MigStrategy.MIXED:
            found[main] += [gpu for gpu in gpus if not gpu.mig_enabled]
            for part in inventory.parts:
                if part.gpu.mig_enabled and not is_compute_slice(part.device.profile):
                    found.setdefault(_of_profile(self.settings.resource, part.device.profile) + suffix, []).append(part)
        elif strategy is MigStrategy.SINGLE and any(gpu.mig_enabled for gpu in gpus):
            found[main] += inventory.parts if _alike(gpus) else ()
        else:
            found[main] += gpus
        return {name: tuple(filter(self._in_pool(inventory), units)) for name, units in found.items()}

    def _in_pool(self, inventory: Inventory) -> _Filter:
        if not self.settings.pool:
            return lambda unit: True
        members = self.books.policy().pool.members(inventory)
        return lambda unit: unit.uuid in members and members[unit.uuid].name == self.settings.pool

    def _lost(self, resource: str, found: Sequence[Device], inventory: Inventory) -> tuple[Device, ...]:
        """Offered before, gone now, and the driver has trouble: capacity stays, as for any GPU that is ill."""
        if not (inventory.fault or inventory.faults):
            return ()
        here = {device.id for device in found}
        gone = (device for device in self._known.get(resource, ()) if device.id not in here)
        return tuple(Device(device.id, LOST, device.numa_node) for device in gone)


def _check(resource: str, ids: Sequence[str], offered: Mapping[str, Device]) -> None:
    """Raises: AllocationError."""
    if len(ids) > len(offered):
        raise AllocationError(
            f"the kubelet asks for {len(ids)} of {resource} at once and this node has {len(offered)}: it has an old "
            "list, so let it try again."
        )
    seen: set[str] = set()
    for id_ in ids:
        shown = ascii(id_)[1:-1][:80]
        if id_ in seen:
            raise AllocationError(f"the kubelet asks for {shown} of {resource} twice at once: a bug of its, try again.")
        if id_ not in offered:
            raise AllocationError(
                f"this node has no {shown} of {resource} any more: MIG devices were remade or a GPU was removed; let "
                "the pod be created anew."
            )
        if why := offered[id_].why:
            raise AllocationError(
                f"{shown} of {resource} cannot be given out: {why[:WHY_SHOWN_MAX].rstrip('.')}; try again."
            )
        seen.add(id_)


def _of_profile(resource: str, profile: str) -> str:
    """`nvidia.com/mig-1g.10gb.me`: a resource's name has no `+`."""
    return f"{resource.partition('/')[0]}/mig-{profile.replace('+', '.')}"


def _alike(gpus: Sequence[Gpu]) -> bool:
    """Whether the strategy `single` can be: every GPU in MIG mode, none empty, one profile."""
    return all(gpu.mig_enabled and gpu.mig for gpu in gpus) and len({d.profile for gpu in gpus for d in gpu.mig}) == 1
