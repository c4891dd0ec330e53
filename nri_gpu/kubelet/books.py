"""What this room needs of the rest of the daemon, and the words it speaks to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct, field

from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.gpu import GpuUuid, Node
from nri_gpu.domain.kubelet import Handed
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

    def promise(self, devices: Iterable[Handed], *, shared: bool) -> None:
        """The kubelet gave these to a pod."""
        ...

    def required(self, devices: Iterable[Handed]) -> str:
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
