"""A container that the runtime is about to create, in our words; protobuf ends in `nri/convert.py`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NewType

from msgspec import Struct, field

from nri_gpu.domain.kubelet import KubeletAllocation

ContainerId = NewType("ContainerId", str)
PodId = NewType("PodId", str)  # of the sandbox; a pod's sandbox can be made anew
PodUid = NewType("PodUid", str)  # of the pod itself, stable for its life


DeviceNumber = tuple[int, int]  # major and minor of a character device


class DeviceRef(Struct, frozen=True):
    """A device node that a container already holds, as the runtime lists it."""

    path: str
    major: int
    minor: int


class Qos(StrEnum):
    """A pod's service class, as the kubelet derives it from requests and limits."""

    GUARANTEED = "guaranteed"
    BURSTABLE = "burstable"
    BESTEFFORT = "besteffort"


# Where the kubelet's cgroup drivers put a pod: /kubepods/burstable/podUID, or below some slice
# kubepods-burstable-podUID.slice; a guaranteed pod has no word between (kubernetes: pkg/kubelet/cm).
_KUBEPODS: Final = "kubepods"
_QOS_FOLDERS: Final = {"burstable": Qos.BURSTABLE, "besteffort": Qos.BESTEFFORT, "pod": Qos.GUARANTEED}


class Pod(Struct, frozen=True, kw_only=True):
    """The pod around a container. Annotations and labels are written by whoever made the pod: untrusted.

    cgroup_parent: as the runtime was told; empty where nobody told it.
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
        """The service class, derived from the cgroup: NRI does not tell it. None where no kubelet made the pod."""
        _, found, below = self.cgroup_parent.rpartition(_KUBEPODS)
        if not found or below[:1] not in ("/", "-"):
            return None
        return next((qos for word, qos in _QOS_FOLDERS.items() if below.startswith(word, 1)), None)


class Container(Struct, frozen=True, kw_only=True):
    """One container of a pod.

    env: NAME -> value, as merged from image and pod. It never grants; only variables we add to are read, and those by
    which an image says what it requires.
    devices: extra nodes others put there (CRI, CDI, earlier plugins); a privileged one lists all of the host's.
    env_twice: variables that come twice, from image and pod both: an adjustment reaches only the first, and the last
    is what the program sees (seen on containerd 1.7.24 and 2.1.9).
    requirement_chars: of all variables NVIDIA_REQUIRE_*; where that is too much to check, env has the first of them.
    cdi_devices: fully qualified names that the pod's makers or the kubelet asked the runtime for; known from NRI 0.10.
    nvidia_hooks: programs of NVIDIA's that OCI hooks of the container run, by their names.
    rlimits: kinds of limits that it comes with, `RLIMIT_MEMLOCK`; told by containerd from 2.3 on.
    pinned: it has a cpuset of its own: the kubelet's static CPU manager or another plugin looks after its CPUs.
    privileged: its device cgroup allows everything (the wildcard rule containerd writes).
    opened: devices that rules of its device cgroup open by their exact numbers, whether it has nodes for them or not.
    wildcard: rules of its device cgroup open character devices without naming both numbers; it is not privileged.
    staged: generations of driver files that it mounts from where we stage them.
    kubelet: what the kubelet gave it, read off its annotations and no longer among them; None where it did not.
    uid: whose its program is, as the host counts users; told by containerd from 2.3 on, and not of user namespaces.
    mps_folder: the MPS daemon's on the host whose pipes are mounted where we mount them; empty where none are.
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
