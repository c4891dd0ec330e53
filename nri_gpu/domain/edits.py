"""What is added to a container: devices, mounts, environment, annotations, limits; one value with one merge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Self, TypeVar

from msgspec import Struct, field


class DeviceNode(Struct, frozen=True):
    """A character device node to make in the container.

    The runtime adds a device-cgroup rule `c major:minor rw` for it by itself (containerd/nri:
    pkg/runtime-tools/generate/generate.go). mode: permission bits, octal 0666 unless said otherwise.
    """

    path: str
    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0


class Mount(Struct, frozen=True):
    """A read-only bind mount of a host path; the runtime makes missing parents of the destination."""

    destination: str
    source: str
    options: tuple[str, ...] = ("rbind", "rprivate", "ro", "nosuid", "nodev")


def staged_below(stage_dir: str, sources: Iterable[str]) -> frozenset[str]:
    """Generations of driver files among the sources of mounts. stage_dir: where they are, without symlinks."""
    prefix = f"{stage_dir}/"
    return frozenset([each.removeprefix(prefix).partition("/")[0] for each in sources if each.startswith(prefix)])


class Rlimit(Struct, frozen=True):
    """A limit of the container's processes. type: as in setrlimit(2), `RLIMIT_MEMLOCK`. hard, soft: its own unit."""

    type: str
    hard: int
    soft: int


UNLIMITED: Final = 2**64 - 1  # RLIM_INFINITY

K = TypeVar("K")
V = TypeVar("V")


def _frozen(items: Mapping[K, V]) -> Mapping[K, V]:
    return MappingProxyType(dict(items))


class Edits(Struct, frozen=True):
    """Everything we add to one container.

    Keyed by what the runtime calls a conflict (device path, mount destination, variable, annotation, kind of limit),
    so the same key cannot stand in a reply twice. Where two parts name one key the later wins, which keeps merge
    associative. cpuset_cpus, cpuset_mems: lists in the kernel's syntax, `0-15,32`; empty leaves them as they are.
    """

    devices: Mapping[str, DeviceNode] = field(default_factory=dict)
    mounts: Mapping[str, Mount] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    rlimits: Mapping[str, Rlimit] = field(default_factory=dict)
    cpuset_cpus: str = ""
    cpuset_mems: str = ""

    @classmethod
    def of(
        cls,
        *,
        devices: tuple[DeviceNode, ...] = (),
        mounts: tuple[Mount, ...] = (),
        env: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        rlimits: tuple[Rlimit, ...] = (),
        cpuset_cpus: str = "",
        cpuset_mems: str = "",
    ) -> Self:
        """Edits from plain parts."""
        return cls(
            devices=_frozen({device.path: device for device in devices}),
            mounts=_frozen({mount.destination: mount for mount in mounts}),
            env=_frozen(env or {}),
            annotations=_frozen(annotations or {}),
            rlimits=_frozen({limit.type: limit for limit in rlimits}),
            cpuset_cpus=cpuset_cpus,
            cpuset_mems=cpuset_mems,
        )

    def merge(self, other: Edits) -> Edits:
        """Both; where they name the same key, `other` wins."""
        return Edits(
            devices=_frozen({**self.devices, **other.devices}),
            mounts=_frozen({**self.mounts, **other.mounts}),
            env=_frozen({**self.env, **other.env}),
            annotations=_frozen({**self.annotations, **other.annotations}),
            rlimits=_frozen({**self.rlimits, **other.rlimits}),
            cpuset_cpus=other.cpuset_cpus or self.cpuset_cpus,
            cpuset_mems=other.cpuset_mems or self.cpuset_mems,
        )


NO_EDITS = Edits.of()
