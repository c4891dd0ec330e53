"""A container that the runtime is about to create, without protobuf (`nri/convert.py` reads it)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NewType

from msgspec import Struct, field

from nri_gpu.domain.allocation import KubeletAllocation
from nri_gpu.domain.value import Recorded

ContainerId = NewType("ContainerId", str)
PodId = NewType("PodId", str)  # of the sandbox; a pod's sandbox can be made anew
PodUid = NewType("PodUid", str)  # of the pod itself, stable for its life


MARKERS_MAX: Final = 128  # on one container


DeviceNumber = tuple[int, int]  # major and minor of a character device


class DeviceRef(Recorded, frozen=True):
    """A character device's node that a container already holds, as the runtime lists it."""

    path: str
    major: int
    minor: int


class Cgroup(Struct, frozen=True):
    """A cgroup. controller: `devices` of cgroup v1, empty for cgroup v2. path: from the root of its hierarchy."""

    controller: str
    path: str


class FirstProcess(Struct, frozen=True):
    """A container's first process, in the PID namespace of the runtime.

    started: clock ticks since boot, by which it is told from a later one with its PID. cgroup: the container's own, in
    which it was started; None where it cannot be seen.
    """

    pid: int
    started: int
    cgroup: Cgroup | None = None


class Qos(StrEnum):
    """A pod's service class, as the kubelet derives it from requests and limits."""

    GUARANTEED = "guaranteed"
    BURSTABLE = "burstable"
    BESTEFFORT = "besteffort"


# Where the kubelet's cgroup drivers put a pod: /kubepods/burstable/podUID, or below some slice
# kubepods-burstable-podUID.slice; a guaranteed pod has no word between (kubernetes: pkg/kubelet/cm).
_KUBEPODS: Final = "kubepods"
_QOS_FOLDERS: Final = {"burstable": Qos.BURSTABLE, "besteffort": Qos.BESTEFFORT, "pod": Qos.GUARANTEED}


class Pod(Recorded, frozen=True, kw_only=True):
    """The pod of a container. Annotations and labels come from the pod's creator: untrusted.

    cgroup_parent: as the kubelet set it; empty where it is not set.
    """

    id: PodId
    uid: PodUid
    name: str
    namespace: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    runtime_handler: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    cgroup_parent: str = ""

    @property
    def qos(self) -> Qos | None:
        """The QoS class, derived from the cgroup since NRI does not have it. None where no kubelet made the pod."""
        _, found, below = self.cgroup_parent.rpartition(_KUBEPODS)
        if not found or below[:1] not in ("/", "-"):
            return None
        return next((qos for word, qos in _QOS_FOLDERS.items() if below.startswith(word, 1)), None)


class Container(Recorded, frozen=True, kw_only=True):
    """One container of a pod.

    env: NAME -> value, as merged from image and pod: the variables that we add to, and those by which an image
    says what it requires.
    devices: nodes from other components (CRI, CDI, earlier plugins); a privileged container lists all of the host's.
    env_twice: variables that both image and pod set: an adjustment reaches only the first, and the program sees the
    last (seen on containerd 1.7.24 and 2.1.9).
    requirement_chars: of all variables NVIDIA_REQUIRE_*; where that is too much to check, env has the first of them.
    cdi_devices: fully qualified names that the pod or the kubelet asked the runtime for; known from NRI 0.10 on.
    nvidia_hooks: NVIDIA's programs that OCI hooks of the container run, by name.
    rlimits: kinds of limits that are set, `RLIMIT_MEMLOCK`; known from containerd 2.3 on.
    pinned: its cpuset is set, by the kubelet's static CPU manager or another plugin.
    privileged: its device cgroup allows everything (the wildcard rule containerd writes).
    opened: devices that its device cgroup opens by exact numbers, with or without nodes.
    wildcard: its device cgroup opens character devices without both numbers; it is not privileged.
    staged: generations of our staged driver files that it mounts.
    kubelet: what the kubelet allocated to it, taken out of its annotations; None where it allocated nothing.
    uid: the user id of its program on the host; known from containerd 2.3 on, and not in user namespaces.
    mps_folder: the host folder of the MPS daemon whose pipes it mounts; empty where it mounts none.
    markers: variables that name devices of ResourceClaims, untrusted; MARKERS_MAX of them and one more at most. They
    are taken out once they are read: `kubelet` then has the devices.
    restored: containerd makes it from a checkpoint. Its name and its annotations are then not those of its pod.
    """

    id: ContainerId
    name: str
    pod: Pod
    annotations: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    env_twice: frozenset[str] = frozenset()
    requirement_chars: int = 0
    devices: tuple[DeviceRef, ...] = ()
    mounts: frozenset[str] = frozenset()
    cdi_devices: tuple[str, ...] = ()
    nvidia_hooks: frozenset[str] = frozenset()
    rlimits: frozenset[str] = frozenset()
    pinned: bool = False
    privileged: bool = False
    opened: frozenset[DeviceNumber] = frozenset()
    wildcard: bool = False
    staged: frozenset[str] = frozenset()
    kubelet: KubeletAllocation | None = None
    uid: int | None = None
    mps_folder: str = ""
    markers: Mapping[str, str] = field(default_factory=dict)
    restored: bool = False


class Added(Struct, frozen=True):
    """Something that a plugin added. owner: that plugin, as `NN-name`; empty where the runtime does not say."""

    name: str
    owner: str


class AddedNode(Struct, frozen=True):
    """A device node that a plugin added. name: its path in the container."""

    name: str
    owner: str
    major: int
    minor: int


class Adjusted(Struct, frozen=True, kw_only=True):
    """A container about to be created.

    container: as it was before any plugin. grant: the signed grant that was written on it, if any.
    cdi_devices: names that plugins added, not those that the kubelet asked for.
    opened: majors of character devices that plugins opened in its device cgroup by rules of their own.
    """

    container: Container
    grant: Added | None = None
    nodes: tuple[AddedNode, ...] = ()
    cdi_devices: tuple[Added, ...] = ()
    opened: frozenset[int] = frozenset()
