"""The devices that the kubelet lists for containers, of device plugins and of claims, whoever made them.

The question is put by a child process, because the observer has no other use for gRPC:

    python -I -m nri_gpu.observe.kubelet_devices SOCKET
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.fair_share import fair_share
from nri_gpu.domain.text import counted
from nri_gpu.observe.given import NO_KUBELET, Given, GivenDevice, PodContainer
from nri_gpu.stray.allocated import AllocationsUnknownError, answer_of_child, asked, has_kubelet
from nri_gpu.system.capabilities import set_aside
from nri_gpu.system.proc import name_process
from nri_gpu.system.storage import stat_of

if TYPE_CHECKING:
    from nri_gpu._pb import podresources_pb2 as pb

DEVICES_MAX: Final = 4096  # 16 GPUs, each shared by 48 replicas, are 768
LIST_BYTES_MAX: Final = 1 << 20  # of all of them as they are printed: the observer holds them
TEXT_MAX: Final = 512  # characters; Kubernetes' own names have at most 253
CDI_MAX: Final = 64  # names of one device
# Resources of NVIDIA's whose ids may be plain numbers; others of its domain are network cards and virtual machines'.
_RESOURCES: Final = ("nvidia.com/gpu", "nvidia.com/mig-")
# Ids of GPUs whatever the resource's name: UUIDs, replicas of them, nodes (`/dev/nvidia0`, GKE's `nvidia0/gi1`).
_IDS: Final = ("GPU-", "MIG-", "/dev/nvidia", "nvidia")
_COMPUTE_DOMAINS: Final = "compute-domain.nvidia.com"  # a driver of NVIDIA's whose devices are no GPUs


class _Listed(Struct, frozen=True):
    """The answer, as the child prints it. left_out: how many devices are missing because they are beyond the limits."""

    devices: list[tuple[PodContainer, GivenDevice]]
    left_out: int = 0


async def given_devices(socket: str) -> Given:
    """Return what the kubelet lists. Its `fault` says why it does not; then there are no devices in it."""
    at = time.monotonic()
    try:
        if not has_kubelet(socket):
            if socket and stat_of(Path(socket)):
                return Given(at=at, fault=f"{socket} is no socket: set kubelet.podresources to the kubelet's")
            return NO_KUBELET
        return given_of(await answer_of_child("nri_gpu.observe.kubelet_devices", socket), at)
    except AllocationsUnknownError as error:
        return Given(at=at, kubelet=True, fault=str(error))


def given_of(text: bytes, at: float) -> Given:
    """Return what the child printed. at: when it was asked."""
    listed = msgspec.json.decode(text, type=_Listed)
    found: defaultdict[PodContainer, tuple[GivenDevice, ...]] = defaultdict(tuple)
    for container, device in listed.devices:
        found[container] += (device,)
    beyond = counted(listed.left_out, "device")
    fault = f"the kubelet lists {beyond} too many, or with names too long: they are left out" if listed.left_out else ""
    return Given(at=at, devices=found, kubelet=True, fault=fault)


def printed(answer: pb.ListPodResourcesResponse) -> bytes:
    """Return the devices that may be GPUs, each once: a pod that is over may be listed beside its successor."""
    every = dict.fromkeys(each for each in _each(answer) if _may_be_gpu(each[1]))
    kept = fair_share(filter(lambda each: _fits(*each), every), lambda each: each[0][:2], LIST_BYTES_MAX, _size)
    return msgspec.json.encode(_Listed(kept, len(every) - len(kept)))


def _size(listed: tuple[PodContainer, GivenDevice]) -> int:
    return max(LIST_BYTES_MAX // DEVICES_MAX, len(msgspec.json.encode(listed)))


def _each(answer: pb.ListPodResourcesResponse) -> Iterator[tuple[PodContainer, GivenDevice]]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            names = (pod.namespace, pod.name, container.name)
            for devices in container.devices:
                for id_ in devices.device_ids:
                    yield names, GivenDevice(resource=devices.resource_name, id=id_)
            for claimed in container.dynamic_resources:
                claim = f"{claimed.claim_namespace}/{claimed.claim_name}"
                for each in claimed.claim_resources:
                    cdi = tuple(device.name for device in each.cdi_devices)
                    device = GivenDevice(
                        driver=each.driver_name, pool=each.pool_name, device=each.device_name, claim=claim, cdi=cdi
                    )
                    yield names, device


def _may_be_gpu(device: GivenDevice) -> bool:
    if device.driver:
        return device.driver != _COMPUTE_DOMAINS
    return device.id.startswith(_IDS) or device.resource.startswith(_RESOURCES)


def _fits(container: PodContainer, device: GivenDevice) -> bool:
    texts = (*container, device.resource, device.id, device.driver, device.pool, device.device, device.claim)
    return len(device.cdi) <= CDI_MAX and all(len(each) <= TEXT_MAX for each in (*texts, *device.cdi))


async def _ask(socket: Path) -> bytes:
    return printed(await asked(socket, lambda client: client.listing()))


def main(arguments: list[str]) -> None:
    with suppress(OSError):
        set_aside()  # the observer's other child has a use for them
    try:
        sys.stdout.buffer.write(asyncio.run(_ask(Path(arguments[0]))))
    except NriGpuError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    name_process("devices")
    main(sys.argv[1:])
