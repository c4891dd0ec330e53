"""The daemon's offer as ResourceSlices of this node, and the writes that lead there from the API server's slices.

This module is pure. Rules and limits are Kubernetes' (staging/src/k8s.io/api/resource/v1/types.go): a slice has devices
or counter sets. The scheduler uses a pool while all `resourceSliceCount` slices of its newest generation are there, and
takes devices in the order of the slices' names and of the devices in a slice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.dra.questions import SHARES, Attribute, Capacity, NodeView, OfferedDevice, Taint, Version

# Of devices a slice: 128 without taints and counters. A taint that comes must not move devices to other slices.
DEVICES_MAX: Final = 64
COUNTER_SETS_MAX: Final = 8  # of a slice
PROPERTIES_MAX: Final = 32  # attributes and capacities of a device
_NAME_PART_MAX: Final = 100  # characters of the node's name in that of a slice, which has 253
AWAY: Final = Taint("gpu.nri.io/daemon-not-running", "", "NoSchedule")
Counters = dict[str, dict[str, str]]  # name -> `value` -> quantity
T = TypeVar("T")


class Gate(StrEnum):
    """A feature that not every API server has; what belongs to a missing feature is dropped without a word."""

    TAINTS = "DRADeviceTaints"
    SHARED = "DRAConsumableCapacity"
    COUNTERS = "DRAPartitionableDevices"


ALL_GATES: Final = frozenset(Gate)


class _Object(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A part of a Kubernetes object: fields that we never set are not read, either."""


class DeviceCapacity(_Object, frozen=True):
    value: str
    request_policy: dict[str, object] | None = None


class CounterSet(_Object, frozen=True):
    name: str
    counters: Counters


class CounterConsumption(_Object, frozen=True):
    counter_set: str
    counters: Counters


class SliceDevice(_Object, frozen=True, kw_only=True):
    """A device of a slice. attributes: name -> type -> value."""

    name: str
    attributes: dict[str, dict[str, object]] = {}
    capacity: dict[str, DeviceCapacity] = {}
    consumes_counters: tuple[CounterConsumption, ...] = ()
    taints: tuple[Taint, ...] = ()
    allow_multiple_allocations: bool = False


class SlicePool(_Object, frozen=True):
    name: str
    generation: int
    resource_slice_count: int


class SliceSpec(_Object, frozen=True, kw_only=True):
    driver: str
    pool: SlicePool
    node_name: str = ""
    devices: tuple[SliceDevice, ...] = ()
    shared_counters: tuple[CounterSet, ...] = ()


class OwnerReference(_Object, frozen=True):
    """The owner of a slice: the garbage collector removes the slice with this object."""

    name: str
    uid: str
    kind: str = ""
    api_version: str = ""
    controller: bool = False


class SliceMetadata(_Object, frozen=True):
    name: str
    uid: str = ""
    resource_version: str = ""
    owner_references: tuple[OwnerReference, ...] = ()


class ResourceSlice(_Object, frozen=True):
    metadata: SliceMetadata
    spec: SliceSpec
    api_version: str = ""
    kind: str = ""

    @property
    def version(self) -> int:
        """Return a number by which the newer of two versions of a slice is known; 0 where it has none."""
        version = self.metadata.resource_version
        return int(version) if version.isdecimal() else 0


class Writes(Struct, frozen=True):
    """The writes to make, in this order: what is gone is withdrawn even where the rest is refused."""

    delete: tuple[ResourceSlice, ...]
    update: tuple[ResourceSlice, ...]
    create: tuple[ResourceSlice, ...]

    def __bool__(self) -> bool:
        return bool(self.delete or self.update or self.create)


def slice_specs(view: NodeView, node: str, gates: Collection[Gate]) -> dict[str, SliceSpec]:
    """Map the name of each slice to its spec, the pool's generation left at 0. gates: of the API server.

    Without DRADeviceTaints a device with a taint is left out.
    """
    offered = [each for each in view.devices if Gate.TAINTS in gates or not each.taints]
    devices = [_device(each, gates) for each in offered]
    sets = [CounterSet(name, _counters(amounts)) for name, amounts in view.counter_sets.items()]
    if Gate.COUNTERS not in gates or not any(device.consumes_counters for device in devices):
        sets = []
    identity = hashlib.sha256(f"{view.driver}/{node}".encode()).hexdigest()[:8]
    ending = f"{view.driver}-{node[:_NAME_PART_MAX].rstrip('-.')}-{identity}"
    parts = {f"{n:02}-{ending}": (tuple(part), ()) for n, part in enumerate(_parts(devices, DEVICES_MAX))}
    counters = {f"c{n:02}-{ending}": ((), tuple(part)) for n, part in enumerate(_parts(sets, COUNTER_SETS_MAX))}
    pool = SlicePool(node, 0, len(parts) + len(counters))
    return {
        name: SliceSpec(driver=view.driver, pool=pool, node_name=node, devices=some, shared_counters=shared)
        for name, (some, shared) in (counters | parts).items()
    }


def plan_writes(wanted: Mapping[str, SliceSpec], current: Iterable[ResourceSlice]) -> Writes:
    """Plan what to write for the wanted slices, and nothing of what is there already. `create` has no owner yet.

    The pool's generation stays where a single update is enough, so that the scheduler never sees an incomplete pool.
    """
    there = {each.metadata.name: each for each in current}
    newest = max((each.spec.pool.generation for each in there.values()), default=0)
    kept = {name: there[name] for name in wanted if name in there}
    changed = [name for name, each in kept.items() if each.spec != _following(wanted[name], each.spec, newest)]
    generation = newest
    if len(kept) < len(wanted) or len(changed) > 1:
        generation, changed = newest + 1, list(kept)
    return Writes(
        delete=tuple(each for name, each in there.items() if name not in wanted),
        update=tuple(
            replace(kept[name], spec=_following(wanted[name], kept[name].spec, generation)) for name in changed
        ),
        create=tuple(
            ResourceSlice(SliceMetadata(name), _of_generation(spec, generation))
            for name, spec in wanted.items()
            if name not in kept
        ),
    )


def kept_as_sent(sent: ResourceSlice, kept: ResourceSlice) -> ResourceSlice:
    """Return the API server's answer to a write, with what was sent as its content.

    So nothing is written again and again to a server that writes something in another way than we do.
    """
    return replace(kept, spec=_with_times(sent.spec, kept.spec))


def gates_of(spec: SliceSpec) -> frozenset[Gate]:
    """Return the gates without which a part of a spec would be dropped."""
    uses = {
        Gate.TAINTS: any(device.taints for device in spec.devices),
        Gate.SHARED: any(device.allow_multiple_allocations for device in spec.devices),
        Gate.COUNTERS: spec.shared_counters or any(device.consumes_counters for device in spec.devices),
    }
    return frozenset(gate for gate, used in uses.items() if used)


def gates_wanted(view: NodeView, node: str) -> frozenset[Gate]:
    """Return the gates that this node has a use for. Each node has a use for taints: a GPU may fall ill at any time."""
    return frozenset({Gate.TAINTS}).union(*map(gates_of, slice_specs(view, node, ALL_GATES).values()))


def specimen(driver: str, node: str, gates: Collection[Gate]) -> ResourceSlice:
    """Make a slice that uses these gates. It is sent as a dry run, to see which of them the API server has."""
    device = OfferedDevice(
        name="specimen",
        attributes={},
        capacity={"memory": Capacity(2, 1)},
        taints=(AWAY,) if Gate.TAINTS in gates else (),
        shared=True,
        counter_set="specimen",
        counters={"memory": 1},
    )
    view = NodeView(number=0, driver=driver, dir="", registry_dir="", cdi_dir="", devices=(device,))
    ((name, spec),) = slice_specs(view, node, gates).items()
    return ResourceSlice(SliceMetadata(f"specimen-{name}"), _of_generation(spec, 1))


def without_daemon(view: NodeView) -> NodeView:
    """Taint every device of a view as away, for as long as the daemon cannot prepare a claim."""
    return replace(view, devices=tuple(replace(each, taints=(*each.taints, AWAY)) for each in view.devices))


def quantity(amount: int) -> str:
    """Write a Kubernetes quantity as the API server spells it: `80Gi`, `1500`, `2k`."""
    base, units = (1024, "KMGTPE") if amount >= 1024 and amount % 1024 == 0 else (1000, "kMGTPE")
    unit = 0
    while amount and amount % base == 0 and unit < len(units):
        amount, unit = amount // base, unit + 1
    return f"{amount}{units[unit - 1]}{'i' if base == 1024 else ''}" if unit else str(amount)


def _device(offered: OfferedDevice, gates: Collection[Gate]) -> SliceDevice:
    shared = offered.shared and Gate.SHARED in gates
    counted = bool(offered.counters) and Gate.COUNTERS in gates
    attributes = islice(offered.attributes.items(), max(0, PROPERTIES_MAX - len(offered.capacity)))
    return SliceDevice(
        name=offered.name,
        attributes={name: _attribute(value) for name, value in attributes},
        capacity={
            name: _capacity(amount, shared) for name, amount in offered.capacity.items() if shared or name != SHARES
        },
        consumes_counters=(CounterConsumption(offered.counter_set, _counters(offered.counters)),) if counted else (),
        taints=offered.taints,
        allow_multiple_allocations=shared,
    )


def _attribute(value: Attribute) -> dict[str, object]:
    match value:
        case Version():
            return {"version": value.text}
        case bool():
            return {"bool": value}
        case int():
            return {"int": value}
        case str():
            return {"string": value}


def _capacity(capacity: Capacity, shared: bool) -> DeviceCapacity:
    """Make a capacity. Of a shared device, a claim that asks for less gets a share too, so that no more claims come."""
    value = quantity(capacity.amount)
    if not shared:
        return DeviceCapacity(value)
    share = quantity(capacity.share)
    return DeviceCapacity(value, {"default": share, "validRange": {"min": share, "max": value}})


def _counters(amounts: Mapping[str, int]) -> Counters:
    return {name: {"value": quantity(amount)} for name, amount in amounts.items()}


def _parts(whole: Sequence[T], most: int) -> list[Sequence[T]]:
    return [whole[start : start + most] for start in range(0, len(whole), most)]


def _of_generation(spec: SliceSpec, generation: int) -> SliceSpec:
    return replace(spec, pool=replace(spec.pool, generation=generation))


def _following(spec: SliceSpec, before: SliceSpec, generation: int) -> SliceSpec:
    return _with_times(_of_generation(spec, generation), before)


def _with_times(spec: SliceSpec, before: SliceSpec) -> SliceSpec:
    """Add the times of taints that were there before: tolerations in seconds count from them."""
    times = {
        (device.name, replace(taint, time_added=None)): taint.time_added
        for device in before.devices
        for taint in device.taints
    }

    def dated(device: SliceDevice) -> SliceDevice:
        new = (replace(taint, time_added=None) for taint in device.taints)
        return replace(device, taints=tuple(replace(each, time_added=times.get((device.name, each))) for each in new))

    return replace(spec, devices=tuple(map(dated, spec.devices)))
