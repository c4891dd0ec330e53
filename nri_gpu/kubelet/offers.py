"""What the kubelet is offered, which of it goes well together, and what it is answered. Pure but for the books."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from nri_gpu.allocation.fit import why_not
from nri_gpu.allocation.token import token_key, write_token
from nri_gpu.domain.gpu import Gpu, Inventory, Unit, whole
from nri_gpu.domain.kubelet import REPLICA, Handed
from nri_gpu.domain.profile import is_compute_slice
from nri_gpu.kubelet.books import AllocationError, Books, Device
from nri_gpu.kubelet.prefer import prefer
from nri_gpu.policy.kubelet import KubeletSettings, MigStrategy

SHARED: Final = ".shared"
TAKEN: Final = "it is held by a container that got it by annotation, or by another hand"
LOST: Final = "the driver does not describe it any more"
WHY_SHOWN_MAX: Final = 300  # characters

_Filter = Callable[[Unit], bool]


class Offers:
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
            self.books.promise([Handed(resource, id_) for id_ in ids], shared=self.shared)
        return tuple({token_key(resource): write_token(resource, ids, key, shared=self.shared)} for ids in asked)

    def required(self, resource: str, ids: Iterable[str]) -> str:
        """The CDI device to be answered beside a container's annotations; empty for none."""
        return self.books.required([Handed(resource, id_) for id_ in ids])

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
