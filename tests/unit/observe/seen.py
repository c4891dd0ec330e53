"""Containers, processes and looks of a made-up node, for tests of what an observer makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Final

from nri_gpu.domain.container import ContainerId, DeviceNumber
from nri_gpu.domain.node import Inventory
from nri_gpu.health.gpu_record import Moment
from nri_gpu.observe.given import Given, GivenDevice, PodContainer
from nri_gpu.observe.looks import NodeLook, SeenContainer
from nri_gpu.observe.observed import Memory, Observed, observed_after
from nri_gpu.policy.model import Policy
from nri_gpu.stray.uses import Extent, Use
from tests.support import builders as make

# Two GPUs, and one that is cut into two MIG devices; their minors run against their indices.
INVENTORY: Final = make.inventory([make.gpu(0), make.gpu(1), make.mig_gpu(2)], driver_version="580.95.05")
CTL, UVM = (195, 255), (511, 0)
WALL: Final = 1_800_000_000.0
MOMENT: Final = Moment(5_000.0, WALL)


def nodes(*indices: int) -> tuple[DeviceNumber, ...]:
    """The nodes of GPUs, with those that all share."""
    return (*((195, 7 - index) for index in indices), CTL, UVM)


def capability(place: int) -> DeviceNumber:
    """Of MIG device 2:place."""
    minor = INVENTORY.gpus[2].mig[place].compute_instance_minor
    assert minor is not None
    return 510, minor


def id_of(name: str) -> ContainerId:
    return ContainerId(sha256(name.encode()).hexdigest())


def container(pod: str = "train", *, name: str = "main", namespace: str = "ml", **fields: Any) -> SeenContainer:  # noqa: ANN401
    """A container of a pod."""
    return SeenContainer(
        **{
            "id": id_of(f"{namespace}{pod}{name}"),
            "runtime": "containerd",
            "namespace": namespace,
            "pod": pod,
            "pod_uid": f"uid-{pod}",
            "name": name,
            "pid": 41,
            "began_s": WALL - 9_000,
            **fields,
        }
    )


def opened(pod: str, *numbers: DeviceNumber, **fields: Any) -> SeenContainer:  # noqa: ANN401
    """A container whose nodes are these, and which the kernel lets open them."""
    return container(pod, **{"nodes": numbers, "allowed": numbers, "opens": numbers, **fields})


def docker(name: str, **fields: Any) -> SeenContainer:  # noqa: ANN401
    """A container of Docker's."""
    return SeenContainer(**{"id": id_of(name), "runtime": "Docker", "name": name, "pid": 42, **fields})


def use(of: SeenContainer | str, *numbers: DeviceNumber, pid: int = 7, program: str = "/bin/train") -> Use:
    """A process of a container, or in a cgroup."""
    cgroup = of if isinstance(of, str) else f"/kubepods/pod1/{of.id}"
    return Use(pid, 100 * pid, program, (cgroup,), numbers)


def plugin(*ids: str, resource: str = "nvidia.com/gpu") -> tuple[GivenDevice, ...]:
    return tuple(GivenDevice(resource=resource, id=each) for each in ids)


def claimed(device: str, claim: str = "ml/claim", driver: str = "gpu.nvidia.com") -> GivenDevice:
    return GivenDevice(driver=driver, pool="node1", device=device, claim=claim)


def given(*of: tuple[SeenContainer, Iterable[GivenDevice]], **fields: Any) -> Given:  # noqa: ANN401
    listed: dict[PodContainer, tuple[GivenDevice, ...]] = {
        (each.namespace, each.pod, each.name): tuple(devices) for each, devices in of
    }
    return Given(**{"at": 4_999.0, "kubelet": True, "devices": listed, **fields})


def look(*found: SeenContainer | Use, at: float = 4_999.0, extent: Extent | None = Extent(99, 0, True)) -> NodeLook:  # noqa: B008
    return NodeLook(
        at=at,
        containers=tuple(each for each in found if isinstance(each, SeenContainer)),
        uses=tuple(each for each in found if isinstance(each, Use)),
        extent=extent,
    )


def observed(
    looked: NodeLook,
    listed: Given | None = None,
    *,
    memory: Memory | None = None,
    inventory: Inventory = INVENTORY,
    moment: Moment = MOMENT,
    policy: Policy | None = None,
    **fields: Any,  # noqa: ANN401
) -> Observed:
    return observed_after(
        memory or Memory(), looked, listed or Given(), inventory, policy or Policy(), moment, **fields
    )
