"""A node as one look joined it: its containers, what they were given, and what their processes have open. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property

from msgspec import Struct

from nri_gpu.decision.refusals import called
from nri_gpu.domain.container import ContainerId, DeviceNumber
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import listed
from nri_gpu.observe.looks import SeenContainer
from nri_gpu.observe.observed_allocations import NO_UNITS, Allotment, Numbers, short_name
from nri_gpu.observe.unit_access import UnitAccess
from nri_gpu.policy.forms import Globs
from nri_gpu.stray.judge import container_of
from nri_gpu.stray.uses import CLOSED_MAX, Extent, Use


class SeenIds(Struct, frozen=True):
    """The ids of the containers that were seen."""

    ids: frozenset[ContainerId]

    def knows(self, container_id: ContainerId) -> bool:
        return container_id in self.ids


def open_numbers(containers: Iterable[SeenContainer], uses: Iterable[Use]) -> Numbers:
    """Map containers to the numbers that their processes have open."""
    known, found = SeenIds(frozenset(each.id for each in containers)), defaultdict[ContainerId, set[DeviceNumber]](set)
    for use in uses:
        if id_ := container_of(use.cgroups, known):
            found[id_].update(use.numbers)
    return {id_: frozenset(numbers) for id_, numbers in found.items()}


def closed_containers(containers: Iterable[SeenContainer], extent: Extent | None) -> frozenset[ContainerId]:
    """Return the containers of which a look at processes may have missed open files."""
    ids = frozenset(each.id for each in containers)
    if extent is None or not extent.whole or len(extent.closed_in) >= CLOSED_MAX:
        return ids
    known = SeenIds(ids)
    return frozenset(id_ for path in extent.closed_in if (id_ := container_of([path], known)))


class JoinedNode(Struct, frozen=True, kw_only=True, dict=True):
    """The node. open_numbers: what processes of containers have open. quiet: users that are no finding.

    closed: containers of whose processes not all open files may be seen.
    """

    inventory: Inventory
    containers: tuple[SeenContainer, ...]
    allotments: tuple[Allotment, ...]
    open_numbers: Numbers
    closed: frozenset[ContainerId] = frozenset()
    quiet: Globs

    @cached_property
    def access(self) -> UnitAccess:
        return UnitAccess(self.inventory)

    @cached_property
    def seen(self) -> Mapping[ContainerId, SeenContainer]:
        return {each.id: each for each in self.containers}

    @cached_property
    def of_container(self) -> Mapping[ContainerId, tuple[Allotment, ...]]:
        """Map containers that are seen to what they were given."""
        found = defaultdict[ContainerId, tuple[Allotment, ...]](tuple)
        for each in self.allotments:
            if each.container.id:
                found[each.container.id] += (each,)
        return found

    @cached_property
    def of_unit(self) -> Mapping[GpuUuid, tuple[Allotment, ...]]:
        """Map GPUs and MIG devices to whom they were given; monitors and the like hold none."""
        found = defaultdict[GpuUuid, tuple[Allotment, ...]](tuple)
        for each in self.allotments:
            if each.uuid and not self.is_quiet(each.container):
                found[each.uuid] += (each,)
        return found

    def given(self, container: SeenContainer) -> frozenset[GpuUuid]:
        return NO_UNITS.union(each.uuid for each in self.of_container.get(container.id, ()) if each.uuid)

    def is_quiet(self, container: SeenContainer) -> bool:
        """Return whether a container's pod may use GPUs that nobody gave it."""
        return self.quiet.match(short_name(container))

    def names(self, uuids: Iterable[GpuUuid]) -> str:
        """Return `GPU 0 (GPU-...), MIG device 1:0 (MIG-...)` in the order of the node."""
        wanted = frozenset(uuids)
        return listed(called(unit) for uuid, unit in self.access.units.items() if uuid in wanted)
