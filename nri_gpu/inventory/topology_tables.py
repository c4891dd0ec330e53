"""The tables of a topology file: their keys, with types and bounds, and what each describes.

Here and where `Table` is, annotations are not postponed: they are read at each start of a simulated node.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from posixpath import normpath
from typing import Annotated, Final, Literal

from msgspec import Meta, convert, field

from nri_gpu.domain import bounds
from nri_gpu.domain.edits import CHANNEL_MAX, Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.domain.gpu import (
    ComputeMode,
    DrmNode,
    Ecc,
    Fabric,
    Gpu,
    GpuDescription,
    GpuUuid,
    MigDescription,
    MigDevice,
    MigEngines,
    PciBusId,
    parse_bus_id,
)
from nri_gpu.domain.health import RESETS, EventType, RecoveryAction, ScriptedEvent, Sign
from nri_gpu.domain.node import GpuFault, Link, Majors, NumaNode
from nri_gpu.host.extras import SOCKETS, socket_mount
from nri_gpu.host.kernel_view import COMPUTE_INSTANCES_MAX, GPU_INSTANCES_MAX, usual_minors
from nri_gpu.host.modules import CAP_MINOR_MAX, MODULES
from nri_gpu.inventory.topology_reader import Table, parsed, unique
from nri_gpu.request.image_requirements import BRANDS

NOT_KNOWN: Final = -1  # of a capability minor
# An extra that is made of the granted GPUs alone is in no file.
EXTRAS: Final = tuple(extra for extra in Extra if extra is not Extra.DRM)
# The names in nvml.h, written like `double-bit-ecc`.
EVENT_KINDS: Final[Mapping[str, EventType]] = {
    kind.name.lower().replace("_", "-"): kind for kind in EventType if kind.name
}
_ARCH: Final = bounds.Format(r"[0-9]{1,2}\.[0-9]{1,2}", 'a compute capability ("9.0")')  # in TOML, 8.10 is 8.1
_MODE: Final = bounds.Format("0[0-7]{3}", 'a mode ("0666")')  # TOML has no 0666


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _absolute(text: str) -> str:
    if not text.startswith("/") or text.startswith("//") or normpath(text) != text:
        raise ValueError(f"{text!r} is not an absolute path without `.`, `..` and `//`")
    return text


def _below_dev(text: str) -> str:
    if not _absolute(text).startswith("/dev/"):
        raise ValueError(f"{text!r} is not below /dev")
    return text


Seconds = Annotated[float, Meta(ge=0, le=31_536_000)]  # a year
CapabilityMinor = Annotated[int, Meta(ge=NOT_KNOWN, le=CAP_MINOR_MAX)]
Version = Annotated[str, bounds.VERSION.meta("")]
BusId = Annotated[PciBusId, bounds.BUS_ID.meta(), parsed(parse_bus_id), unique("gpu")]
Signs = Annotated[
    tuple[Sign, ...],
    Meta(description=f"an array of texts, or one text with commas, of {', '.join(Sign)}"),
    parsed(_words),
]
HostPath = Annotated[str, parsed(_absolute)]


class DrmTable(DrmNode, Table, frozen=True, kw_only=True):
    """A table of `gpu.drm`."""

    name: Annotated[str, bounds.DRM_NAME.meta(), unique("drm")]


class FabricTable(Fabric, Table, frozen=True):
    """`gpu.fabric`."""


class EnginesTable(MigEngines, Table, frozen=True):
    """`gpu.mig.engines`."""


class MigTable(
    MigDescription, Table, frozen=True, kw_only=True, rename={"gpu_instance_id": "gi", "compute_instance_id": "ci"}
):
    """`[[gpu.mig]]`, a MIG device."""

    # The device's place in the file unless the file gives it: NVML's list has holes.
    index: Annotated[int, Meta(ge=0, le=GPU_INSTANCES_MAX * COMPUTE_INSTANCES_MAX - 1)] | None = None
    gpu_instance_id: Annotated[int, Meta(ge=0, le=GPU_INSTANCES_MAX - 1)]
    compute_instance_id: Annotated[int, Meta(ge=0, le=COMPUTE_INSTANCES_MAX - 1)]
    uuid: Annotated[GpuUuid, bounds.MIG_UUID.meta(), unique("gpu")]
    gi_minor: CapabilityMinor | None = None  # the one that drivers use, unless given; -1 if it is unknown
    ci_minor: CapabilityMinor | None = None  # likewise
    engines: EnginesTable = EnginesTable()

    def device(self, place: int, gpu_minor: int) -> MigDevice:
        """Return the MIG device. place: in the file. gpu_minor: of its GPU's device node."""
        usual = usual_minors(gpu_minor, self.gpu_instance_id, self.compute_instance_id) or (None, None)
        said = (self.gi_minor, self.ci_minor)
        minors = [use if say is None else say for say, use in zip(said, usual, strict=True)]
        gpu_instance, compute_instance = (None if minor == NOT_KNOWN else minor for minor in minors)
        facts = {
            **{name: getattr(self, name) for name in MigDescription.__struct_fields__},
            "index": place if self.index is None else self.index,
            "gpu_instance_minor": gpu_instance,
            "compute_instance_minor": compute_instance,
        }
        return convert(facts, MigDevice, from_attributes=True)


Partition = bool | tuple[MigTable, ...]  # `mig`: whether the GPU is in MIG mode, or its MIG devices


def _tables(partition: Partition) -> tuple[MigTable, ...]:
    return () if isinstance(partition, bool) else partition


def _devices(partition: Partition, gpu_minor: int) -> tuple[MigDevice, ...]:
    """Return the MIG devices in the order of their indices."""
    found = (table.device(place, gpu_minor) for place, table in enumerate(_tables(partition)))
    return tuple(sorted(found, key=attrgetter("index")))


def _twice(partition: Partition) -> Iterator[tuple[str, str]]:
    """Yield each MIG device that has an earlier one's index or instances."""
    met: dict[object, int] = {}
    for place, table in enumerate(_tables(partition)):
        index = place if table.index is None else table.index
        for key, value in ((".index", index), ("", (table.gpu_instance_id, table.compute_instance_id))):
            if (first := met.setdefault((key, value), place)) != place:
                yield f"mig[{place}]{key}", f"the same as mig[{first}]{key}"


def _with_recovery(signs: tuple[Sign, ...], action: RecoveryAction | None) -> tuple[Sign, ...]:
    """Return the signs of a GPU with that recovery action, as NVML shows them."""
    if action is None or (action in RESETS) == (Sign.RESET_REQUIRED in signs):
        return signs
    others = tuple(sign for sign in signs if sign is not Sign.RESET_REQUIRED)
    return (*others, Sign.RESET_REQUIRED) if action in RESETS else others


class GpuTable(
    GpuDescription,
    Table,
    frozen=True,
    kw_only=True,
    rename={"minor_number": "minor", "pci_bus_id": "bus_id", "numa_node": "numa", "partition": "mig"},
):
    """`[[gpu]]`. ecc_pending: equal to ecc if it is left out."""

    index: Annotated[bounds.GpuIndex, unique("gpu")]
    minor_number: Annotated[bounds.GpuIndex, unique("gpu")]
    uuid: Annotated[GpuUuid, bounds.UUID.meta(), unique("gpu")]
    pci_bus_id: BusId
    arch: Annotated[str, _ARCH.meta()] | None = None
    brand: Annotated[str, bounds.one_of(["", *BRANDS])] = ""
    numa_node: bounds.NumaNumber | None = None
    partition: Partition = False
    signs: Signs = ()
    ecc: bool | None = None
    ecc_pending: bool | None = None
    fabric: FabricTable | None = None
    drm: tuple[DrmTable, ...] = ()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the conflicts of `ecc_pending`, and of MIG devices with each other."""
        if self.ecc is None and self.ecc_pending is not None:
            yield "ecc_pending", "needs `ecc`, which is missing"
        yield from _twice(self.partition)

    def gpu(self) -> Gpu:
        prohibited = self.compute_mode is ComputeMode.PROHIBITED
        pending = self.ecc if self.ecc_pending is None else self.ecc_pending
        facts = {
            **{name: getattr(self, name) for name in self.__struct_fields__ if name in Gpu.__struct_fields__},
            "arch": None if self.arch is None else tuple(map(int, self.arch.split("."))),
            "unavailable": self.unavailable or (bounds.compute_prohibited(self.pci_bus_id) if prohibited else ""),
            "signs": _with_recovery(tuple(dict.fromkeys(self.signs)), self.recovery_action),
            "mig_enabled": self.partition is not False,
            "mig": _devices(self.partition, self.minor_number),
            "ecc": None if self.ecc is None else Ecc(self.ecc, bool(pending)),
        }
        return convert(facts, Gpu, from_attributes=True)


class FaultTable(GpuFault, Table, frozen=True, kw_only=True, rename={"pci_bus_id": "bus_id"}):
    """`[[fault]]`: a GPU that exists and could not be described."""

    index: Annotated[bounds.GpuIndex, unique("gpu")]
    uuid: Annotated[str, bounds.UUID.meta(), unique("gpu")] = ""
    pci_bus_id: BusId = PciBusId("")


class LinkTable(Link, Table, frozen=True):
    """`[[link]]`."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.a >= self.b:
            yield "a", f"must be less than b: {self.a}, {self.b}"


class NumaTable(NumaNode, Table, frozen=True, kw_only=True, rename={"number": "node"}):
    """`[[numa]]`."""

    number: Annotated[bounds.NumaNumber, unique("numa")]
    cpus: Annotated[str, bounds.CPULIST.meta()]


class DeviceTable(Table, frozen=True):
    """A table of an extra's `nodes`."""

    path: Annotated[str, parsed(_below_dev)]
    major: bounds.DeviceMajor
    minor: bounds.DeviceMinor
    mode: Annotated[str, _MODE.meta()] = "0666"


class MountTable(Table, frozen=True):
    """A table of an extra's `mounts`."""

    destination: HostPath
    source: HostPath


class ExtraTable(Table, frozen=True):
    """`[[node.extra]]`. Only IMEX has major and channels."""

    name: Annotated[str, bounds.one_of(EXTRAS), unique("extra")]
    major: bounds.DeviceMajor | None = None
    channels: Annotated[int, Meta(ge=1, le=CHANNEL_MAX + 1)] | None = None
    lacking: str = ""
    nodes: tuple[DeviceTable, ...] = ()
    mounts: tuple[MountTable, ...] = ()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the conflicts of an extra's name with its keys."""
        if self.name != Extra.IMEX:
            for key in ("major", "channels"):
                if getattr(self, key) is not None:
                    yield key, f"only {Extra.IMEX} has it"
            if not (self.nodes or self.mounts or self.lacking):
                yield "", f"{self.name} has neither nodes nor mounts"
        elif not self.lacking or self.channels is not None:
            for key in ("major", "channels"):
                if getattr(self, key) is None:
                    yield key, "missing; a whole number"

    def extra(self) -> NodeExtra:
        nodes = (DeviceNode(node.path, node.major, node.minor, int(node.mode, 8)) for node in self.nodes)
        mount = socket_mount if self.name in SOCKETS else Mount
        mounts = (mount(each.destination, each.source) for each in self.mounts)
        channels = Channels(self.major, self.channels) if self.major and self.channels else None
        return NodeExtra(tuple(nodes), tuple(mounts), channels, self.lacking)


class MajorsTable(Majors, Table, frozen=True):
    """`[node.majors]`. A module whose major is left out is not loaded."""


Modules = Annotated[
    dict[Annotated[str, bounds.one_of(MODULES)], Annotated[str, bounds.MODULE_VERSION.meta()]],
    Meta(description=f"a table with versions of modules ({', '.join(MODULES)})"),
]


class NodeTable(Table, frozen=True):
    """`[node]`."""

    driver: Version = ""
    cuda: Version = ""
    majors: MajorsTable = MajorsTable()
    modules: Modules = field(default_factory=dict)
    nvswitches: Annotated[int, Meta(ge=0, le=64)] = 0
    extra: tuple[ExtraTable, ...] = ()


class EventTable(Table, frozen=True):
    """`[[event]]`."""

    at_s: Seconds
    gpu: bounds.GpuIndex
    kind: Annotated[str, bounds.one_of(EVENT_KINDS)] = "xid"
    xid: Annotated[int, Meta(ge=1, le=65535)] | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        is_xid = EVENT_KINDS[self.kind] is EventType.XID
        if is_xid and self.xid is None:
            yield "xid", "missing; a whole number"
        elif not is_xid and self.xid is not None:
            yield "xid", "only an event of kind xid has a number"

    def event(self) -> ScriptedEvent:
        return ScriptedEvent(self.at_s, self.gpu, self.xid or 0, int(EVENT_KINDS[self.kind]))


class FileTable(Table, frozen=True):
    schema: Literal[1]
    node: NodeTable
    gpu: tuple[GpuTable, ...] = ()
    fault: tuple[FaultTable, ...] = ()
    link: tuple[LinkTable, ...] = ()
    numa: tuple[NumaTable, ...] = ()
    event: tuple[EventTable, ...] = ()
