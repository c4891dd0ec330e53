"""A container's request, parsed: how many or which GPUs, in which mode, and with what else."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from nri_gpu.domain.edits import NO_EXTRAS, Extras
from nri_gpu.domain.gpu import Capabilities
from nri_gpu.domain.mps import NO_MPS_LIMITS, MpsLimits


class Strategy(StrEnum):
    """The choice between several sets of GPUs that serve an exclusive request equally well."""

    PACK = "pack"  # next to those in use, so that the remaining GPUs stay together
    SPREAD = "spread"  # away from those in use, each with its own path to the host


class NumaBinding(StrEnum):
    """The part of a granted container that is bound to the NUMA nodes of its GPUs."""

    NONE = "none"
    CPUS = "cpus"
    MEMORY = "memory"
    BOTH = "both"


class Mode(StrEnum):
    """The way GPUs are held: exclusive is exclusive to the pod, whose containers may share; mps: through one daemon."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    MPS = "mps"


class Operator(StrEnum):
    AT_LEAST = ">="
    AT_MOST = "<="
    ABOVE = ">"
    BELOW = "<"
    EQUAL = "="


class Everything(Struct, frozen=True):
    """`all`: every healthy GPU that is not in MIG mode."""


class Nothing(Struct, frozen=True):
    """`none`: no GPU, on purpose."""


class Count(Struct, frozen=True):
    """`2` or `count=2`."""

    gpus: int


class Devices(Struct, frozen=True):
    """`device=0,GPU-…,0000:3b:00.0,0:1,MIG-…`: ids as written.

    A GPU has an NVML index, a UUID or its unambiguous beginning, and a PCI bus id. A MIG device has both indices, and a
    UUID or its beginning.
    """

    ids: tuple[str, ...]


class MigProfile(Struct, frozen=True):
    """A number of MIG devices of one profile."""

    profile: str
    devices: int


class MigProfiles(Struct, frozen=True):
    """`mig=1g.10gb:2,3g.40gb`: each profile once."""

    wanted: tuple[MigProfile, ...]


Wanted = Everything | Nothing | Count | Devices | MigProfiles


class ModelSelector(Struct, frozen=True):
    """`model=*H100*`: case-insensitive glob over the model name."""

    glob: str


class MemorySelector(Struct, frozen=True):
    """`memory>=40Gi`: total framebuffer, bytes."""

    operator: Operator
    memory_bytes: int


class ArchSelector(Struct, frozen=True):
    """`arch>=9.0`: compute capability."""

    operator: Operator
    arch: tuple[int, int]


Selector = ModelSelector | MemorySelector | ArchSelector


class Claim(Struct, frozen=True, kw_only=True):
    """A container's request."""

    key: str  # the annotation it came from
    text: str  # its value
    wanted: Wanted
    mode: Mode | None = None  # None leaves it to the policy
    capabilities: Capabilities | None = None  # None leaves them to the policy
    selectors: tuple[Selector, ...] = ()
    extras: Extras = NO_EXTRAS
    kubelet: bool = False  # the kubelet chose the GPUs, so its pool is open to the request
    sharing: MpsLimits = NO_MPS_LIMITS
    admin: bool = False  # the container monitors the GPUs and holds none
