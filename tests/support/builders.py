"""Values of the domain with defaults, so that a test names only what it is about; and the same as a runtime sends them.

A node from here has four GPUs whose minors run against their indices, since code that mixes the two up must not pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, Final

from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.allocation import ClaimUid
from nri_gpu.domain.container import Container, ContainerId, DeviceRef, Pod, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import Capabilities, Capability, Gpu, GpuUuid, MigDevice, PciBusId
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.mps import PIPE_FOLDER, PIPE_PLACE
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.node import CompatPackage, DriverFiles, DriverTree, Inventory, Majors, Node
from nri_gpu.domain.resource_claim import ClaimedDevice, PreparedClaim
from nri_gpu.ledger.grant_text import sign_grant
from nri_gpu.ledger.holders import ExternalAllocation
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger

KEY: Final = "gpu.nri.io"
MIB: Final = 2**20
GPUS: Final = 4
GENERATION: Final = "580.95.05-1a2b3c4d"
TREES: Final = "/var/lib/nri-gpu/drivers/" + GENERATION
MAJORS: Final = Majors(nvidia=195, nvidia_uvm=511, nvidia_caps=510)


def uuid(index: int) -> GpuUuid:
    """The UUID of GPU `index`; the first eight digits differ from one GPU to the next."""
    return GpuUuid(f"GPU-{index:08x}-0000-4000-8000-{index:012x}")


def gpu(index: int = 0, **fields: Any) -> Gpu:  # noqa: ANN401 - any field of a Gpu
    """A healthy A100."""
    return Gpu(
        **{
            "index": index,
            "minor_number": 7 - index,
            "uuid": uuid(index),
            "pci_bus_id": PciBusId(f"0000:{16 + index:02x}:00.0"),
            "model": "NVIDIA A100-SXM4-40GB",
            "memory_bytes": 40_960 * MIB,
            "arch": (8, 0),
            **fields,
        }
    )


def mig_uuid(gpu_index: int, place: int = 0) -> GpuUuid:
    """The UUID of MIG device `gpu_index:place`; no two begin alike in their first eight digits."""
    return GpuUuid(f"MIG-{gpu_index:04x}{place:04x}-0000-5000-8000-{place:012x}")


def mig(gpu_index: int = 0, place: int = 0, **fields: Any) -> MigDevice:  # noqa: ANN401 - any field of a MigDevice
    """A 1g.5gb of an A100, with minors that no two of a node share."""
    minor = 3 + 135 * (7 - gpu_index) + 9 * (place + 7)
    return MigDevice(
        **{
            "index": place,
            "uuid": mig_uuid(gpu_index, place),
            "gpu_instance_id": place + 7,
            "compute_instance_id": 0,
            "profile": "1g.5gb",
            "memory_bytes": 4_864 * MIB,
            "gpu_instance_minor": minor,
            "compute_instance_minor": minor + 1,
            **fields,
        }
    )


def mig_gpu(index: int = 0, profiles: Sequence[str] = ("1g.5gb", "1g.5gb"), **fields: Any) -> Gpu:  # noqa: ANN401
    """An A100 in MIG mode, cut into these."""
    parts = tuple(mig(index, place, profile=profile) for place, profile in enumerate(profiles))
    return gpu(index, **{"mig_enabled": True, "mig": parts, **fields})


def gpus(number: int = GPUS) -> tuple[Gpu, ...]:
    """Healthy GPUs with indices from 0."""
    return tuple(map(gpu, range(number)))


def inventory(found: Sequence[Gpu] | None = None, **fields: Any) -> Inventory:  # noqa: ANN401 - any other field
    """Four healthy GPUs unless others are given, all modules loaded."""
    return Inventory(**{"taken_at": 1.0, "gpus": gpus() if found is None else tuple(found), "majors": MAJORS, **fields})


def trees() -> Mapping[Capabilities, DriverTree]:
    """One staged tree for each set of capabilities."""
    every = tuple(Capability)
    sets = map(frozenset, chain.from_iterable(combinations(every, size) for size in range(1, len(every) + 1)))
    return {some: DriverTree(f"{TREES}/{'+'.join(sorted(some))}", _binaries(some)) for some in sets}


def _binaries(capabilities: Capabilities) -> tuple[str, ...]:
    return ("nvidia-smi",) if Capability.UTILITY in capabilities else ()


def driver(**fields: Any) -> DriverFiles:  # noqa: ANN401 - any field of DriverFiles
    """A driver that is staged whole."""
    return DriverFiles(**{"version": "580.95.05", "generation": GENERATION, "trees": trees(), "missing": {}, **fields})


def package(**fields: Any) -> CompatPackage:  # noqa: ANN401 - any field of a CompatPackage
    """CUDA 14.0 for that driver, staged."""
    generation = "compat14.0-600.10.01-0a1b2c3d"
    return CompatPackage(
        **{
            "cuda": (14, 0),
            "version": "600.10.01",
            "drivers": frozenset({580}),
            "generation": generation,
            "path": f"/var/lib/nri-gpu/drivers/{generation}",
            **fields,
        }
    )


def node(found: Sequence[Gpu] | None = None, *, staged: DriverFiles | None = None, **fields: Any) -> Node:  # noqa: ANN401
    """A node that is ready; the fields are its inventory's."""
    return Node(number=1, inventory=inventory(found, **fields), driver=staged or driver())


def pod(name: str = "train", claim: str | None = None, **fields: Any) -> Pod:  # noqa: ANN401 - any field of a Pod
    """A pod; claim: what its one annotation asks for all its containers."""
    return Pod(
        **{
            "id": PodId(f"sandbox-{name}"),
            "uid": PodUid(f"uid-{name}"),
            "name": name,
            "namespace": "ml",
            "annotations": {} if claim is None else {KEY: claim},
            **fields,
        }
    )


def container(claim: str | None = None, *, of: str | Pod = "train", name: str = "main", **fields: Any) -> Container:  # noqa: ANN401
    """A container that asks for `claim` through its pod; of: that pod, or its name."""
    around = pod(of, claim) if isinstance(of, str) else of
    return Container(**{"id": ContainerId(f"{around.name}.{name}"), "name": name, "pod": around, **fields})


def held_node(of: Gpu, path: str | None = None) -> DeviceRef:
    """The GPU's device node as a container lists it that has it from others."""
    return DeviceRef(path or f"/dev/nvidia{of.minor_number}", MAJORS.nvidia or 0, of.minor_number)


def grant(
    *indices: int,
    mode: Mode | None = Mode.EXCLUSIVE,
    to: Container | None = None,
    generation: str = GENERATION,
) -> Grant:
    """GPUs by index, granted to a container."""
    holder = to or container()
    return Grant(
        container_id=holder.id,
        container_name=holder.name,
        pod_id=holder.pod.id,
        pod_uid=holder.pod.uid,
        pod_name=holder.pod.name,
        namespace=holder.pod.namespace,
        uuids=tuple(map(uuid, indices)),
        mode=mode,
        generation=generation,
    )


def entry(*indices: int, phase: GrantPhase = GrantPhase.RUNNING, since: float = 0.0, **fields: Any) -> Entry:  # noqa: ANN401
    """A ledger's entry; the fields are its grant's."""
    return Entry(grant(*indices, **fields), phase, since)


def entry_of(*uuids: GpuUuid, phase: GrantPhase = GrantPhase.RUNNING, **fields: Any) -> Entry:  # noqa: ANN401
    """The same by UUID, of GPUs and MIG devices."""
    return Entry(replace(grant(**fields), uuids=uuids), phase, 0.0)


def foreign(*indices: int, of: str = "plugin", name: str = "main") -> ExternalAllocation:
    """A holder whose nodes are not from us."""
    return ExternalAllocation(
        ContainerId(f"{of}.{name}"), PodId(f"sandbox-{of}"), f"ml/{of}", frozenset(map(uuid, indices)), name=name
    )


def ledger(*entries: Entry, others: Iterable[ExternalAllocation] = ()) -> Ledger:
    """A ledger of these and no more."""
    return Ledger({each.grant.container_id: each for each in entries}, {each.container_id: each for each in others})


def prepared_claim(
    *indices: int,
    name: str = "shared",
    pods: Iterable[str] = ("train",),
    mode: Mode = Mode.EXCLUSIVE,
    text: str = "",
    admin: bool = False,
    **fields: Any,  # noqa: ANN401 - any other field
) -> PreparedClaim:
    """A claim that has these GPUs for pods of those names; its UID is its name's."""
    devices = (
        ClaimedDevice(
            request="gpu", pool="node", device=f"gpu-{7 - index}", uuid=uuid(index), mode=mode, text=text, admin=admin
        )
        for index in indices
    )
    return PreparedClaim(
        **{
            "uid": ClaimUid(f"claim-{name}"),
            "namespace": "ml",
            "name": name,
            "pods": {PodUid(f"uid-{each}"): each for each in pods},
            "devices": tuple(devices),
            **fields,
        }
    )


def pod_message(of: Pod, **fields: Any) -> pb.PodSandbox:  # noqa: ANN401 - any field of the message
    """The pod as runtimes send it."""
    return pb.PodSandbox(
        **{
            "id": of.id,
            "uid": of.uid,
            "name": of.name,
            "namespace": of.namespace,
            "annotations": of.annotations,
            "runtime_handler": of.runtime_handler,
            "labels": of.labels,
            "linux": pb.LinuxPodSandbox(cgroup_parent=of.cgroup_parent),
            **fields,
        }
    )


def container_message(of: Container, **fields: Any) -> pb.Container:  # noqa: ANN401 - any field of the message
    """The container as containerd sends it: a device cgroup that denies all, or allows all when it is privileged."""
    made = pb.Container(
        id=of.id,
        pod_sandbox_id=of.pod.id,
        name=of.name,
        annotations=of.annotations,
        env=[
            *(f"{key}=of the image" for key in of.env_twice),
            *(f"{key}={value}" for key, value in (*of.env.items(), *of.markers.items())),
        ],
    )
    for destination in sorted(of.mounts):
        made.mounts.add(destination=destination, type="bind", source="/somewhere", options=["rbind", "rw"])
    if of.mps_folder:
        made.mounts.add(destination=PIPE_PLACE, type="bind", source=f"{of.mps_folder}/{PIPE_FOLDER}", options=["bind"])
    for device in of.devices:
        made.linux.devices.add(path=device.path, type="c", major=device.major, minor=device.minor)
    for name in of.cdi_devices:
        made.CDI_devices.add(name=name)
    for program in sorted(of.nvidia_hooks):
        made.hooks.create_container.add(path=f"/usr/bin/{program}", args=[program, "hook"])
    for kind in sorted(of.rlimits):
        made.rlimits.add(type=kind, hard=1, soft=1)
    if of.pinned:
        made.linux.resources.cpu.cpus = "0-3"
    if of.uid is not None:
        made.user.uid = of.uid
        made.user.SetInParent()
    made.linux.resources.devices.add(allow=of.privileged, access="rwm")
    made.MergeFrom(pb.Container(**fields))
    return made


def create_payload(of: Container, **fields: Any) -> bytes:  # noqa: ANN401 - any field of the container's message
    """CreateContainerRequest."""
    message = pb.CreateContainerRequest(pod=pod_message(of.pod), container=container_message(of, **fields))
    return message.SerializeToString()


def event_payload(event: int, of: Container | Pod) -> bytes:
    """What a runtime up to NRI 0.11 sends when something happens to a container, or to a pod."""
    if isinstance(of, Pod):
        change = pb.StateChangeEvent(pod=pod_message(of))
    else:
        change = pb.StateChangeEvent(pod=pod_message(of.pod), container=container_message(of))
    change.event = event  # type: ignore[assignment] # an enum's number
    return change.SerializeToString()


def marked(of: Container, granted: Grant, key: bytes) -> Container:
    """A container as the runtime lists it, with a grant written on it."""
    return replace(of, annotations={**of.annotations, GRANT_KEY: sign_grant(granted, key)})
