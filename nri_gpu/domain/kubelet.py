"""What the kubelet gave to a container, as its device plugin half wrote it and its NRI half read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import GpuUuid

# Of annotations on the container; behind it the resource, because of two with one key the kubelet keeps either.
HANDED_KEY: Final = "gpu.nri.io/kubelet"
REPLICA: Final = "::"  # between a UUID and the number of a replica, as NVIDIA's device plugin writes it


class Handed(Struct, frozen=True):
    """One device of one resource, by the id that the kubelet counts it by."""

    resource: str
    id: str

    @property
    def uuid(self) -> GpuUuid:
        """Of the GPU or MIG device that it is, or is a replica of."""
        return GpuUuid(self.id.partition(REPLICA)[0])


class KubeletGrant(Struct, frozen=True):
    """All that the kubelet gave to one container. fault: why that is worth nothing; empty when it holds."""

    devices: tuple[Handed, ...] = ()
    shared: bool = False
    fault: str = ""

    @property
    def uuids(self) -> tuple[GpuUuid, ...]:
        """GPUs and MIG devices, each once: two replicas of one are one."""
        return tuple(dict.fromkeys(each.uuid for each in self.devices))


class Standing(Struct, frozen=True):
    """How one resource stands with the kubelet.

    since: registered since, seconds since the epoch; None while it is not. fault: why not, or what is wrong with it.
    """

    resource: str
    since: float | None = None
    fault: str = ""


def handed_key(annotations: Iterable[str]) -> str:
    """The first key by which the kubelet handed something over; empty where it did not."""
    return next((key for key in annotations if key == HANDED_KEY or key.startswith(f"{HANDED_KEY}.")), "")
