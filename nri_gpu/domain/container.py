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
TOLD_WITHIN_S: Final = 1.0  # how long to wait for the runtime to tell of an exit that was seen: its word comes first


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
    """A container's first process, in the PID namespace of the runtime."""

    pid: int
    started: int  # tells it from a later process with its PID; clock ticks since boot
    cgroup: Cgroup | None = None  # the container's own, in which the process was started, or None if it cannot be seen
    others: tuple[Cgroup, ...] = ()  # of the container's name, too, where only names tell whose a cgroup is


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

    cgroup_parent: as the kubelet set it, or empty.
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
    def on_nvidia_runtime(self) -> bool:
        """Return whether its handler's name is one of NVIDIA's runtime, which injects by NVIDIA_VISIBLE_DEVICES.

        The toolkit names handlers `nvidia`, `nvidia-cdi` and `nvidia-legacy`; a runtime's default has no name here.
        """
        return self.runtime_handler.startswith("nvidia")

    @property
    def full_name(self) -> str:
        """Return `namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def qos(self) -> Qos | None:
        """Return the QoS class, derived from the cgroup since NRI lacks it, or None if no kubelet made the pod."""
        _, found, below = self.cgroup_parent.rpartition(_KUBEPODS)
        if not found or below[:1] not in ("/", "-"):
            return None
        return next((qos for word, qos in _QOS_FOLDERS.items() if below.startswith(word, 1)), None)


class Container(Recorded, frozen=True, kw_only=True):
    """A container of a pod."""

    id: ContainerId
    name: str
    pod: Pod
    annotations: Mapping[str, str] = field(default_factory=dict)
    # NAME -> value, as merged from image and pod: the variables that we add to, and those by which an image says what
    # it requires.
    env: Mapping[str, str] = field(default_factory=dict)
    # Variables that both image and pod set: an adjustment reaches only the first, and the program sees the last (seen
    # on containerd 1.7.24 and 2.1.9).
    env_twice: frozenset[str] = frozenset()
    # Of all variables NVIDIA_REQUIRE_*; if that is too much to check, env has the first of them.
    requirement_chars: int = 0
    # Nodes from other components (CRI, CDI, earlier plugins); a privileged container lists all of the host's.
    devices: tuple[DeviceRef, ...] = ()
    mounts: frozenset[str] = frozenset()
    # Fully qualified names that the pod or the kubelet asked the runtime for; known from NRI 0.10 on.
    cdi_devices: tuple[str, ...] = ()
    nvidia_hooks: frozenset[str] = frozenset()  # NVIDIA's programs that OCI hooks of the container run, by name
    # Kinds of limits that are set, `RLIMIT_MEMLOCK`; known from containerd 2.3 on.
    rlimits: frozenset[str] = frozenset()
    pinned: bool = False  # its cpuset is set, by the kubelet's static CPU manager or another plugin
    privileged: bool = False  # its device cgroup allows everything (the wildcard rule containerd writes)
    # Device numbers its device cgroup allows exactly, whether or not a node exists.
    opened: frozenset[DeviceNumber] = frozenset()
    wildcard: bool = False  # its device cgroup opens character devices without both numbers; it is not privileged
    staged: frozenset[str] = frozenset()  # generations of our staged driver files that it mounts
    kubelet: KubeletAllocation | None = None  # what the kubelet allocated to it, taken out of its annotations, or None
    # The user id of its program on the host; known from containerd 2.3 on, and not in user namespaces.
    uid: int | None = None
    mps_folder: str = ""  # the host folder of the MPS daemon whose pipes it mounts, or empty
    # Variables that name devices of ResourceClaims, untrusted: at most MARKERS_MAX + 1. They are taken out once they
    # are read: `kubelet` then has the devices.
    markers: Mapping[str, str] = field(default_factory=dict)
    # Made by containerd from a checkpoint: its name and annotations are then not those of its pod.
    restored: bool = False


class Added(Struct, frozen=True):
    """A thing that a plugin added or removed. owner: the plugin, as `NN-name`, or empty if the runtime does not say."""

    name: str
    owner: str


class AddedNode(Struct, frozen=True):
    """A device node that a plugin added. name: its path in the container."""

    name: str
    owner: str
    major: int
    minor: int


class Adjusted(Struct, frozen=True, kw_only=True):
    """A container about to be created, as plugins adjusted it."""

    container: Container  # as it was before any plugin
    grant: Added | None = None  # the signed grant that was written on it, if any
    nodes: tuple[AddedNode, ...] = ()
    cdi_devices: tuple[Added, ...] = ()  # names that plugins added, not those that the kubelet asked for
    # Majors of character devices that plugins opened in its device cgroup by rules of their own.
    opened: frozenset[int] = frozenset()
    removed: tuple[Added, ...] = ()  # device nodes, by path, and mounts, by destination, that a plugin had added before
    staged: frozenset[str] = frozenset()  # generations of our staged driver files that plugins mount
    asked: tuple[str, ...] = ()  # the plugins that the runtime asked, `10-nri-gpu`

    @property
    def added_devices(self) -> tuple[DeviceRef, ...]:
        return tuple([DeviceRef(node.name, node.major, node.minor) for node in self.nodes])

    @property
    def devices(self) -> tuple[DeviceRef, ...]:
        """Return the nodes that the container will have: its own, which no plugin can remove, and the added ones."""
        return self.container.devices + self.added_devices
