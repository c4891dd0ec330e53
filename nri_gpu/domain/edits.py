"""The things added to a container: devices, mounts, environment, limits; one value with one merge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import reduce
from typing import Final, Self

from msgspec import Struct, field

from nri_gpu.domain.value import Recorded


class DeviceNode(Recorded, frozen=True):
    """A character device node to make in the container.

    The runtime adds a device-cgroup rule `c major:minor rw` for it (containerd/nri:
    pkg/runtime-tools/generate/generate.go). mode: permission bits, octal 0666 unless said otherwise.
    """

    path: str
    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0


class Mount(Recorded, frozen=True):
    """A read-only bind mount of a host path; the runtime makes missing parents of the destination."""

    destination: str
    source: str
    options: tuple[str, ...] = ("rbind", "rprivate", "ro", "nosuid", "nodev")


def staged_below(stage_dir: str, sources: Iterable[str]) -> frozenset[str]:
    """Return the generations of driver files among the sources of mounts. stage_dir: their folder, without symlinks."""
    prefix = f"{stage_dir}/"
    return frozenset([each.removeprefix(prefix).partition("/")[0] for each in sources if each.startswith(prefix)])


class Rlimit(Struct, frozen=True):
    """A limit of the container's processes. type: as in setrlimit(2), `RLIMIT_MEMLOCK`. hard, soft: its own unit."""

    type: str
    hard: int
    soft: int


UNLIMITED: Final = 2**64 - 1  # RLIM_INFINITY


class Edits(Struct, frozen=True):
    """Everything we add to one container.

    Keyed by what the runtime calls a conflict (device path, mount destination, variable, kind of limit), so the same
    key cannot stand in a reply twice. Where two parts name one key the later wins, which keeps merge associative.
    cpuset_cpus, cpuset_mems: lists in the kernel's syntax, `0-15,32`; empty leaves them as they are.
    """

    devices: Mapping[str, DeviceNode] = field(default_factory=dict)
    mounts: Mapping[str, Mount] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
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
        rlimits: tuple[Rlimit, ...] = (),
        cpuset_cpus: str = "",
        cpuset_mems: str = "",
    ) -> Self:
        return cls(
            devices={device.path: device for device in devices},
            mounts={mount.destination: mount for mount in mounts},
            env=env or {},
            rlimits={limit.type: limit for limit in rlimits},
            cpuset_cpus=cpuset_cpus,
            cpuset_mems=cpuset_mems,
        )

    def merge(self, other: Edits) -> Edits:
        """Return both; if they name the same key, `other` wins."""
        return Edits(
            devices={**self.devices, **other.devices},
            mounts={**self.mounts, **other.mounts},
            env={**self.env, **other.env},
            rlimits={**self.rlimits, **other.rlimits},
            cpuset_cpus=other.cpuset_cpus or self.cpuset_cpus,
            cpuset_mems=other.cpuset_mems or self.cpuset_mems,
        )

    @staticmethod
    def merged(parts: Iterable[Edits]) -> Edits:
        """Return all parts as one; of parts that name the same key, the last wins."""
        return reduce(Edits.merge, parts, NO_EDITS)


NO_EDITS = Edits.of()


class Extra(StrEnum):
    """An extra, asked for by name. Most open more than the granted GPUs, so policy must list them."""

    DRM = "drm"
    GDS = "gds"
    GDRCOPY = "gdrcopy"
    RDMA = "rdma"
    NVSWITCH = "nvswitch"
    IMEX = "imex"
    PERSISTENCED = "persistenced"
    FABRICMANAGER = "fabricmanager"
    FIRMWARE = "firmware"
    MIG_CONFIG = "mig-config"
    MIG_MONITOR = "mig-monitor"


FORMER_EXTRAS: Final = ("profile",)  # of an earlier version; a request for them is not refused
HARMLESS: Final = frozenset({Extra.DRM})  # opens nothing beyond the granted GPUs
CHANNEL_MAX: Final = 2**20 - 1  # ids of IMEX channels have 20 bits (kernel-open/nvidia/nv-caps-imex.c)
CHANNELS_DEFAULT: Final = 2048  # NVreg_ImexChannelCount, if not set


class Extras(Struct, frozen=True):
    """The extras that one container asks for."""

    asked: frozenset[Extra] = frozenset()
    channels: tuple[int, ...] = ()  # of IMEX in rising order, where that is asked for
    ignored: tuple[str, ...] = ()  # of FORMER_EXTRAS


NO_EXTRAS: Final = Extras()


class Channels(Recorded, frozen=True):
    """The IMEX channels of a node: 0 to count - 1, each a minor under one major."""

    major: int
    count: int


class NodeExtra(Recorded, frozen=True):
    """The node's part in one extra.

    lacking: why it cannot be given and what to do, a clause that follows the extra's name, or empty.
    """

    nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    channels: Channels | None = None
    lacking: str = ""
