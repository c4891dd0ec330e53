"""The answer of `nri-gpu blockers`, as its JSON has it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from nri_gpu.system.node_name import NamedNode

SCHEMA: Final = "nri-gpu/blockers/v1"


class BlockerKind(StrEnum):
    """The kinds of users, in the order in which they are ended: whoever serves others ends after them.

    PROCESS: one of the host, without a unit. MODULE: a kernel module of another component. REFERENCES: of the driver's
    modules, by nobody who is known.
    """

    POD = "pod"
    STATIC_POD = "static pod"
    CONTAINER = "container"
    PROCESS = "process"
    UNIT = "unit"
    MPS = "MPS daemon"
    DISPLAY = "display"
    MONITOR = "monitor"
    FABRIC = "fabric manager"
    PERSISTENCE = "persistence"
    CONSOLE = "console"
    MODULE = "module"
    REFERENCES = "references"


class BlockingProcess(Struct, frozen=True):
    """A process. started: clock ticks since boot. program: its path."""

    pid: int
    started: int
    program: str


class NodeGpu(Struct, frozen=True, kw_only=True):
    """A GPU that the driver drives, as the kernel shows it. index: as NVML counts, by PCI addresses.

    drm: name, major and minor of its nodes in /dev/dri.
    """

    index: int
    uuid: str
    pci_bus_id: str
    minor_number: int
    drm: tuple[tuple[str, int, int], ...] = ()


class Blocker(Struct, frozen=True, kw_only=True):
    """A user of the driver. what: a clause on what it has. next: lines to copy that end it; empty if nothing does."""

    kind: BlockerKind
    name: str
    what: str
    next: tuple[str, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  # that it has open, or may open by its spec
    libcuda: bool = False  # a process of it maps the driver's CUDA library
    mounts: tuple[str, ...] = ()  # files of the driver on the host
    processes: tuple[BlockingProcess, ...] = ()
    namespace: str = ""
    pod: str = ""
    container_ids: tuple[str, ...] = ()
    unit: str = ""
    references: int | None = None  # to a kernel module, or null for what is none


class BlockersReport(Struct, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """The answer. Both lists are in the order in which to end what is on them. unseen: why there may be more.

    driver_version: of the loaded module, or empty. gpu: the one that was asked for, or null for the whole driver, and
    only then are modules and what will break looked at.
    """

    node: NamedNode
    driver_version: str
    gpu: NodeGpu | None
    keeps_loaded: tuple[Blocker, ...]
    will_break: tuple[Blocker, ...]
    unload: tuple[str, ...] = ()  # lines to copy once nothing keeps it loaded
    unseen: tuple[str, ...] = ()
    denied: bool = False  # for want of permission
