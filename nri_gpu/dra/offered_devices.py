"""The node's offer to the scheduler: a device for each GPU, and for each MIG device of a GPU in MIG mode.

Attributes and capacities have the names and the spelling of NVIDIA's driver, so that its selectors keep working
(kubernetes-sigs/dra-driver-nvidia-gpu: cmd/gpu-kubelet-plugin/deviceinfo.go; NVIDIA/go-nvlib: pkg/nvlib/device). That
driver's MIG devices have memory slices, too, which our inventory does not know. Taints are always called
gpu.nri.io/..., whatever name the driver has, so that one toleration serves every node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from nri_gpu.decision.eligible import node_fault
from nri_gpu.decision.offered import is_allocatable
from nri_gpu.decision.overlaps import overlaps
from nri_gpu.decision.refusals import IN_MIG_MODE, why_not
from nri_gpu.decision.topology import Topology, split, topology_of
from nri_gpu.domain.gpu import (
    FabricState,
    Gpu,
    GpuUuid,
    MigPart,
    Unit,
    closure,
    described,
    health_of,
    whole,
)
from nri_gpu.domain.gpu import slices as slices_of
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.domain.resource_claim import device_name
from nri_gpu.dra.questions import SHARES, Attribute, Capacity, GpuCondition, OfferedDevice, Taint, Version
from nri_gpu.kubelet.node_labels import family
from nri_gpu.ledger.holders import UNUSED, Usage
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.dra_settings import DraSettings
from nri_gpu.policy.health_settings import OnBad
from nri_gpu.policy.model import Policy
from nri_gpu.policy.select import stale_fault

UNHEALTHY: Final = "gpu.nri.io/unhealthy"
CORDONED: Final = "gpu.nri.io/cordoned"
HELD: Final = "gpu.nri.io/held"
NODE_NOT_READY: Final = "gpu.nri.io/node-not-ready"
NO_SCHEDULE: Final = "NoSchedule"
NO_EXECUTE: Final = "NoExecute"
TEXT_MAX: Final = 64  # characters (kubernetes: resource/v1, DeviceAttributeMaxValueLength)
SLICES: Final = 7  # of a GPU in MIG mode
_NO_CLUSTER: Final = frozenset("0-")  # letters of the cluster UUID of a fabric within one machine

_BRANDS: Final[Mapping[str, str]] = {
    "unknown": "Unknown",
    "quadro": "Quadro",
    "tesla": "Tesla",
    "nvs": "NVS",
    "grid": "Grid",
    "geforce": "GeForce",
    "titan": "Titan",
    "vapps": "NvidiaVApps",
    "vpc": "NvidiaVPC",
    "vcs": "NvidiaVCS",
    "vws": "NvidiaVWS",
    "cloudgaming": "NvidiaCloudGaming",
    "quadrortx": "QuadroRTX",
    "nvidiartx": "NvidiaRTX",
    "nvidia": "Nvidia",
    "geforcertx": "GeForceRTX",
    "titanrtx": "TitanRTX",
}
_ADDRESSING: Final[Mapping[str, str]] = {"hmm": "HMM", "ats": "ATS", "none": "None"}

CounterSets = dict[str, dict[str, int]]


def not_ready(node: Node, policy: Policy, *, connected: bool) -> str:
    """Return why nothing could be granted now, in a word; empty if it could. connected: to the container runtime."""
    if not connected:
        return "no-runtime"
    if policy.fault:
        return "policy-broken"
    if stale_fault(policy, node.inventory_age_s):
        return "inventory-stale"
    return "driver-not-ready" if node_fault(closure(policy.defaults.capabilities), node) else ""


def offer(
    node: Node, ledger: Ledger, policy: Policy, settings: DraSettings, hindrance: str = ""
) -> tuple[tuple[OfferedDevice, ...], CounterSets]:
    """Return the devices, in the order in which to use them, and the counter sets that they consume of.

    hindrance: as `not_ready` says it.
    """
    inventory, usage = node.inventory, ledger.usage()
    withheld = dict.fromkeys(overlaps(ledger), "several-pods") | dict.fromkeys(ledger.stuck, "lost-container")
    domains = _nvlink_domains(inventory)
    # Counters are for devices of one claim: we cannot say whether each of several claims consumes them.
    shared, units = settings.replicas > 1, tuple(_units(inventory, policy, settings.pool))
    shares = {SHARES: settings.replicas} if shared else {}  # the memory of a GPU may be unknown, and then limits nobody
    parts = [] if shared else [unit for unit in units if isinstance(unit, MigPart)]
    counters: dict[GpuUuid, dict[str, int]] = {unit.uuid: {} for unit in units} | {
        part.uuid: _counters(part) for part in parts
    }
    devices = (
        OfferedDevice(
            name=device_name(unit),
            attributes=_attributes(unit, inventory, domains),
            capacity={
                name: Capacity(amount, amount // settings.replicas if shared else 0)
                for name, amount in (_capacity(unit) | shares).items()
            },
            taints=tuple(
                _taints(
                    unit,
                    policy,
                    withheld.get(unit.uuid) or _holder(usage.get(unit.uuid, UNUSED), settings.replicas),
                    hindrance,
                )
            ),
            shared=shared,
            counter_set=_counter_set(whole(unit)) if counters[unit.uuid] else "",
            counters=counters[unit.uuid],
            fault=why_not(unit, given=True) or _replaced(unit, ledger),
        )
        for unit in units
    )
    return tuple(devices), _counter_sets(parts)


def conditions(inventory: Inventory) -> tuple[GpuCondition, ...]:
    """Return which of the node's GPUs can be granted, and why others cannot; a GPU in MIG mode is well."""
    found = [_condition(gpu) for gpu in inventory.gpus]
    missing = (each for each in inventory.faults if each.uuid)
    found += (GpuCondition(each.uuid, each.index, "unavailable", each.reason) for each in missing)
    return tuple(found)


def _condition(gpu: Gpu) -> GpuCondition:
    word, why = _withheld(gpu), why_not(gpu)
    if not word or why == IN_MIG_MODE:
        return GpuCondition(gpu.uuid, gpu.index)
    health = gpu.health
    return GpuCondition(gpu.uuid, gpu.index, word, why if health.grantable else health.why, health.since or None)


def _units(inventory: Inventory, policy: Policy, pool: str) -> Iterator[Unit]:
    """Yield what is offered, in order: whole GPUs, then MIG devices, GPU by GPU."""
    fits = (is_allocatable(gpu) and policy.pool.offers(gpu, pool) for gpu in inventory.gpus)
    whole_gpus = tuple(place for place, fit in enumerate(fits) if fit)
    yield from (inventory.gpus[place] for place in _nested(topology_of(inventory), whole_gpus))
    yield from (part for part in inventory.parts if is_allocatable(part) and policy.pool.offers(part, pool))


def _nested(topology: Topology, places: tuple[int, ...]) -> tuple[int, ...]:
    """Order places of GPUs, so that the best joined GPUs are next to each other: pairs, pairs of pairs, and so on.

    The scheduler takes the first devices that fit, and knows nothing of links. So claims for 2, 4 or 8 get linked GPUs,
    and leave linked GPUs. The order does not follow what is in use: the slices would be written anew with every pod.
    """
    if len(places) <= 2:
        return places
    half = split(topology, 1 << ((len(places) - 1).bit_length() - 1), places)
    rest = tuple(place for place in places if place not in half)
    return _nested(topology, half) + _nested(topology, rest)


def _attributes(unit: Unit, inventory: Inventory, domains: Mapping[GpuUuid, str]) -> dict[str, Attribute]:
    """Make the attributes of a device.

    Those that NVIDIA's driver always publishes are always there, as a selector for a missing attribute is an error.
    Unknown attributes are `Unknown` and 0.0.0; what only some GPUs have is left out.
    """
    gpu = whole(unit)
    texts = {
        "type": "mig" if isinstance(unit, MigPart) else "gpu",
        "uuid": unit.uuid,
        "productName": gpu.model,
        "brand": _BRANDS.get(gpu.brand, "Unknown"),
        "architecture": (gpu.architecture or family(gpu.arch or (0, 0)) or "unknown").replace("-", " ").title(),
        "addressingMode": _ADDRESSING.get(gpu.addressing, ""),
        "resource.kubernetes.io/pciBusID": gpu.pci_bus_id,
        "resource.kubernetes.io/pcieRoot": gpu.pcie_root,
        "nvlinkDomain": domains.get(unit.uuid, ""),
    }
    if isinstance(unit, MigPart):
        texts |= {"parentUUID": gpu.uuid, "profile": unit.device.profile}
    versions = {
        "cudaComputeCapability": gpu.arch_text,
        "driverVersion": inventory.driver_version,
        "cudaDriverVersion": inventory.cuda_version,
    }
    found: dict[str, Attribute] = {name: text[:TEXT_MAX] for name, text in texts.items() if text}
    found |= {name: Version(_semver(version or "0")) for name, version in versions.items()}
    if gpu.numa_node is None:
        return found
    # A number and no list: a list is dropped without DRAListTypeAttributes, and with it both are compared alike.
    return found | dict.fromkeys(("numaNode", "resource.kubernetes.io/numaNode"), gpu.numa_node)


def _capacity(unit: Unit) -> dict[str, int]:
    """Return the capacities that are known."""
    found = {"memory": unit.memory_bytes}
    if isinstance(unit, MigPart):
        engines = unit.device.engines
        found |= {
            "multiprocessors": engines.multiprocessors,
            "copyEngines": engines.copy_engines,
            "decoders": engines.decoders,
            "encoders": engines.encoders,
            "jpegEngines": engines.jpeg_engines,
            "ofaEngines": engines.ofa_engines,
        }
    return {name: amount for name, amount in found.items() if amount is not None}


def _semver(version: str) -> str:
    """Write `580.95.05` as `580.95.5`, `13.0` as `13.0.0`: semantic versions have 3 numbers without leading zeros."""
    return ".".join(str(int(number)) for number in (*version.split("."), "0", "0")[:3])


def _nvlink_domains(inventory: Inventory) -> Mapping[GpuUuid, str]:
    """Map each GPU with NVLink to a name that it shares with all GPUs that it reaches by NVLink, and with no other.

    The name is that of its fabric where it joined a fabric of several machines; else the UUID of the first such GPU.
    """
    uuids = {gpu.index: gpu.uuid for gpu in inventory.gpus}
    reached = {index: [index] for index in uuids}
    for link in inventory.links:
        if link.nvlink and {link.a, link.b} <= uuids.keys() and reached[link.a] is not reached[link.b]:
            reached[link.a] += reached[link.b]
            reached |= dict.fromkeys(reached[link.b], reached[link.a])
    linked = {gpu.uuid: uuids[min(reached[gpu.index])] for gpu in inventory.gpus if len(reached[gpu.index]) > 1}
    found = ((gpu, _fabric(gpu) or linked.get(gpu.uuid, "")) for gpu in inventory.gpus)
    # NVLink does not reach into a GPU in MIG mode.
    return {gpu.uuid: domain for gpu, domain in found if domain and not gpu.mig_enabled}


def _fabric(gpu: Gpu) -> str:
    """Return `<cluster UUID>.<clique>`; empty where the GPU has not joined the fabric of several machines."""
    fabric = gpu.fabric
    if (
        fabric is None
        or fabric.state is not FabricState.COMPLETED
        or fabric.status
        or set(fabric.cluster) <= _NO_CLUSTER
    ):
        return ""
    return f"{fabric.cluster}.{fabric.clique}"


def _taints(unit: Unit, policy: Policy, holder: str, hindrance: str) -> Iterator[Taint]:
    if word := _withheld(unit, given=True):
        stops = policy.health.containers is OnBad.STOP and not health_of(unit).grantable
        yield Taint(UNHEALTHY, word, NO_EXECUTE if stops else NO_SCHEDULE)
    if described(unit).cordon:
        yield Taint(CORDONED, "by-the-administrator", NO_SCHEDULE)  # never NoExecute: what has it keeps it
    if holder:
        yield Taint(HELD, holder, NO_SCHEDULE)
    if hindrance:
        yield Taint(NODE_NOT_READY, hindrance, NO_SCHEDULE)


def _withheld(unit: Unit, *, given: bool = False) -> str:
    """Return in a word why nobody is granted the unit, or empty. given: nor who had it before it was out of use."""
    if not health_of(unit).grantable:
        return health_of(unit).state.value
    return "unavailable" if why_not(unit, given=given) else ""


def _replaced(unit: Unit, ledger: Ledger) -> str:
    """Return that a claim was prepared with another GPU that had the unit's name, or empty."""
    name = device_name(unit)
    for claim in ledger.claims.values():
        for each in claim.devices:
            if each.device == name and each.uuid != unit.uuid and not each.admin:
                return f"{claim.called} has {each.uuid}, which was {name} before: delete the pods of that claim"
    return ""


def _holder(used: Usage, replicas: int) -> str:
    """Return the holder's kind, if it is no claim: the scheduler knows claims, and would allocate what others hold."""
    crowded = 1 < replicas <= used.shares and bool(used.others)
    if used.claims and not crowded:
        return ""
    if used.external:
        return "other-component"
    if used.reservations:
        return "device-plugin"
    shareable = replicas > 1 and used.mode is Mode.SHARED and not crowded
    return "container" if used.grants and not shareable else ""


def _counter_set(gpu: Gpu) -> str:
    return f"{device_name(gpu)}-counter-set"


def _counter_sets(parts: Iterable[MigPart]) -> CounterSets:
    """Count what each GPU has to give: never less than what its MIG devices, which were made, take of it."""
    taken: dict[str, Counter[str]] = {}
    sizes: CounterSets = {}
    for part in parts:
        name = _counter_set(part.gpu)
        taken.setdefault(name, Counter()).update(_counters(part))
        sizes[name] = {"memory": part.gpu.memory_bytes or 0, "slices": SLICES}
    whole_sets = ((name, Counter(each) | taken[name]) for name, each in sizes.items())
    return {name: dict(each) for name, each in whole_sets}


def _counters(part: MigPart) -> dict[str, int]:
    """Count what a MIG device consumes of its GPU, as far as that is known. Its slices are in its profile."""
    profile = part.device.profile
    slices = {"slices": slices_of(profile)[0]} if profile[:1].isdigit() else {}
    return {"memory": part.memory_bytes, **slices} if part.memory_bytes else slices
