"""Extras: what a container may ask for beside GPUs and the driver's files, and what a node has of each."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from msgspec import Struct

from nri_gpu.domain.edits import DeviceNode, Mount, Rlimit


class Extra(StrEnum):
    """One thing to ask for by name. Most reach beyond the GPUs that were granted, so policy must list them."""

    DRM = "drm"
    GDS = "gds"
    GDRCOPY = "gdrcopy"
    RDMA = "rdma"
    NVSWITCH = "nvswitch"
    IMEX = "imex"
    PERSISTENCED = "persistenced"
    FABRICMANAGER = "fabricmanager"
    PROFILE = "profile"
    FIRMWARE = "firmware"
    MIG_CONFIG = "mig-config"
    MIG_MONITOR = "mig-monitor"


# What opens nothing but the granted GPUs, or rather less of them.
HARMLESS: Final = frozenset({Extra.DRM, Extra.PROFILE})
CHANNEL_MAX: Final = 2**20 - 1  # ids of IMEX channels have 20 bits (kernel-open/nvidia/nv-caps-imex.c)
CHANNELS_DEFAULT: Final = 2048  # NVreg_ImexChannelCount, where nobody sets it


class Extras(Struct, frozen=True):
    """What one container asks for. channels: IMEX channels in rising order; there are some just where IMEX is asked."""

    asked: frozenset[Extra] = frozenset()
    channels: tuple[int, ...] = ()


NO_EXTRAS: Final = Extras()


class Channels(Struct, frozen=True):
    """The IMEX channels of a node: 0 to count - 1, each a minor under one major."""

    major: int
    count: int


class Offer(Struct, frozen=True):
    """What a node has of one extra, ready to be given.

    lacking: why it cannot be given, with the cure: a clause to stand behind the extra's name; empty when it can.
    """

    nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    channels: Channels | None = None
    lacking: str = ""


class Parts(Struct, frozen=True):
    """What a container gets for its extras: hashable, since it decides edits that are kept."""

    nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    rlimits: tuple[Rlimit, ...] = ()


NO_PARTS: Final = Parts()

PROFILE_GPUS_MAX: Final = 8  # of one node: a file for each set of them is 255 files
PROFILE_MINOR_MAX: Final = 31  # the driver's README: EGLVisibleDGPUDevices is a mask of 32 bits


class Profiles(Struct, frozen=True):
    """Application profiles written ahead, one for each set of device minors. fault: why there are none, a clause."""

    folder: str
    minors: frozenset[int] = frozenset()
    fault: str = ""

    def path(self, minors: Iterable[int]) -> str:
        """The file for a set of GPUs; all of them must be in `minors`."""
        return f"{self.folder}/{mask(minors):x}.conf"


def mask(minors: Iterable[int]) -> int:
    """A set of device minors as bits."""
    return sum(1 << minor for minor in set(minors))
