"""The results of one look at the node, as the child that looks prints them and the observer reads them.

Everything in them that a container or an image chose is untrusted text.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import ContainerId, DeviceNumber
from nri_gpu.stray.uses import Extent, Use

USES_MAX: Final = 4096  # processes that are kept: a container may have any number of them, in cgroups of its own


class DeviceRequest(Struct, frozen=True, kw_only=True):
    """An entry of Docker's `DeviceRequests`, which `--gpus` and `--device` with a CDI name make."""

    driver: str = ""  # `nvidia`, `cdi`
    count: int = 0  # -1: all
    ids: tuple[str, ...] = ()


class SeenContainer(Struct, frozen=True, kw_only=True, tag="container"):
    """A container that runs, or is about to, and has to do with NVIDIA's devices.

    It has a node of NVIDIA's in its spec, or the kernel or its spec lets it open one, or it asks by its variable.
    """

    id: ContainerId
    runtime: str  # of the table of runtimes: `containerd`, `Docker`, `Podman`, `CRI-O`
    namespace: str = ""  # of its pod
    pod: str = ""  # the pod's own name; empty for a container without a pod
    pod_uid: str = ""
    name: str = ""  # in its pod; of Docker the container's own; else the short id
    user: str = ""  # the number of the user whose rootless container it is: only its processes tell of it
    sandbox: bool = False
    privileged: bool = False
    pid: int = 0  # its first process; 0 where it has none yet
    began_s: float | None = None  # when its bundle was written, seconds since the epoch
    nodes: tuple[DeviceNumber, ...] = ()  # NVIDIA's nodes in its spec
    allowed: tuple[DeviceNumber, ...] = ()  # NVIDIA's devices that its spec's rules let it open
    opens: tuple[DeviceNumber, ...] | None = None  # those that the kernel lets it open; None: not seen
    asked: str = ""  # NVIDIA_VISIBLE_DEVICES: it asks, and gives nothing
    capabilities: str = ""  # NVIDIA_DRIVER_CAPABILITIES
    requests: tuple[DeviceRequest, ...] = ()  # of Docker
    cdi: tuple[str, ...] = ()  # CDI names of NVIDIA's in its annotations
    hooks: tuple[str, ...] = ()  # NVIDIA's programs among its hooks
    driver_versions: tuple[str, ...] = ()  # of driver libraries that are mounted in it
    fault: str = ""  # why a part of it could not be seen; a clause


class Unseen(Struct, frozen=True, tag="unseen"):
    """Something that could not be looked at. sentence: what and why, and what to do."""

    what: str  # `bundles`, `processes`, `rules`, `look`
    sentence: str


Line = SeenContainer | Use | Extent | Unseen  # a line of the child's output, told apart by its `type`


class NodeLook(Struct, frozen=True, kw_only=True):
    """The result of a look. uses: processes with NVIDIA's nodes open. extent: None if no processes were looked for."""

    at: float  # when it began, seconds on the monotonic clock
    containers: tuple[SeenContainer, ...] = ()
    uses: tuple[Use, ...] = ()
    extent: Extent | None = None
    unseen: tuple[Unseen, ...] = ()
