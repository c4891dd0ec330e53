"""A simulated node and what becomes of it: changes that a topology file plays at times of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from posixpath import normpath
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.edits import CHANNEL_MAX, Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import ComputeMode, Ecc, Fabric, FabricState, Gpu, GpuUuid, MigDevice
from nri_gpu.domain.health import EventType, ScriptedEvent, Sign
from nri_gpu.domain.node import Inventory, Majors
from nri_gpu.inventory.extras import (
    CAP_MINOR_MAX,
    COMPUTE_INSTANCES_MAX,
    GPU_INSTANCES_MAX,
    SOCKETS,
    socket_mount,
    usual_minors,
)
from nri_gpu.inventory.facts import ADDRESSING, ARCHITECTURES, MODULES
from nri_gpu.inventory.identity import parse_cluster, parse_mig_uuid, parse_module_version, parse_profile, parse_version
from nri_gpu.inventory.kernel import parse_cpulist
from nri_gpu.inventory.report import PROCESSES_MAX
from nri_gpu.simulation.tables import Table

LOST: Final = "GPU is lost (played by the topology file)"


class Change(Struct, frozen=True, kw_only=True):
    """What becomes of one GPU, or of the node, at a moment; None: nothing.

    at_s: seconds after whoever reads the file began to. gpu: index; None for the node. present: whether it is in the
    machine. lost: NVML says so, as of a GPU that fell off the bus; false: no longer. unavailable: empty where the GPU
    is well again. signs: all that a look shows from now on. fault: the sentence that asking the driver gives from now
    on; empty where it answers again.
    """

    at_s: float
    gpu: int | None = None
    present: bool | None = None
    lost: bool | None = None
    unavailable: str | None = None
    signs: tuple[Sign, ...] | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigDevice, ...] | None = None
    driver: str | None = None
    cuda: str | None = None
    majors: Majors | None = None
    fault: str | None = None

    @property
    def says(self) -> tuple[str, ...]:
        """What it changes, in the file's words."""
        named = ("present", "lost", "unavailable", "signs", "mig", "driver", "cuda", "majors", "fault")
        return tuple(name for name in named if getattr(self, name) is not None)


class Scene(Struct, frozen=True):
    """A node at its beginning, and its changes in the order of their times."""

    inventory: Inventory
    changes: tuple[Change, ...] = ()

    def after(self, elapsed_s: float) -> Inventory:
        """The node after so many seconds. Raises: InventoryError: by then nobody can ask the driver."""
        due = [change for change in self.changes if change.at_s <= elapsed_s]
        if fault := _last(change.fault for change in due):
            raise InventoryError(fault)
        inventory = self.inventory
        for change in due:
            inventory = _changed(inventory, change)
        return _without(inventory, {change.gpu: change.present for change in due if change.present is not None})


def _last(said: Iterable[str | None]) -> str:
    return next((each for each in reversed(list(said)) if each is not None), "")


def _without(inventory: Inventory, present: dict[int | None, bool]) -> Inventory:
    """Without the GPUs that are not there, and their links; what is left keeps its index."""
    gone = {index for index, there in present.items() if not there}
    if not gone:
        return inventory
    gpus = tuple(gpu for gpu in inventory.gpus if gpu.index not in gone)
    links = tuple(link for link in inventory.links if not gone & {link.a, link.b})
    return replace(inventory, gpus=gpus, links=links)


def _changed(inventory: Inventory, change: Change) -> Inventory:
    if change.gpu is not None:
        gpus = (_gpu(gpu, change) if gpu.index == change.gpu else gpu for gpu in inventory.gpus)
        return replace(inventory, gpus=tuple(gpus))
    return replace(
        inventory,
        driver_version=inventory.driver_version if change.driver is None else change.driver,
        cuda_version=inventory.cuda_version if change.cuda is None else change.cuda,
        majors=inventory.majors if change.majors is None else change.majors,
    )


def _gpu(gpu: Gpu, change: Change) -> Gpu:
    unavailable = gpu.unavailable if change.unavailable is None else change.unavailable
    signs = gpu.signs if change.signs is None else change.signs
    if change.lost is not None:
        unavailable = LOST if change.lost else ""
        signs = tuple(sign for sign in signs if sign is not Sign.LOST)
        signs = (Sign.LOST, *signs) if change.lost else signs
    return replace(
        gpu,
        unavailable=unavailable,
        signs=signs,
        mig_enabled=gpu.mig_enabled if change.mig_enabled is None else change.mig_enabled,
        mig=gpu.mig if change.mig is None else change.mig,
    )


XID_MAX: Final = 65535
INDEX_MAX: Final = 247
# In the words of the header's names: `double-bit-ecc`.
KINDS: Final[Mapping[str, EventType]] = {kind.name.lower().replace("_", "-"): kind for kind in EventType if kind.name}


def read_events(root: Table, indices: frozenset[int]) -> tuple[ScriptedEvent, ...]:
    """`[[event]]`: at_s, gpu (its index), kind, xid; in the order of their time."""
    return tuple(sorted((_event(table, indices) for table in root.tables("event")), key=lambda each: each.at_s))


def read_signs(table: Table) -> tuple[Sign, ...] | None:
    """`signs`, an array or one text with commas; None where it is not there."""
    words = table.words("signs")
    if words is None:
        return None
    known = set(Sign)
    for word in words:
        if word not in known:
            table.wrong("signs", f"{word!r} is no sign ({', '.join(Sign)})")
    return tuple(dict.fromkeys(Sign(word) for word in words if word in known))


def parse_sign(text: str) -> Sign:
    """One sign. Raises: ValueError."""
    if text not in set(Sign):
        raise ValueError(f"{text!r} is no sign ({', '.join(Sign)})")
    return Sign(text)


def _event(table: Table, indices: frozenset[int]) -> ScriptedEvent:
    at_s, gpu = table.seconds("at_s"), table.number("gpu", 0, INDEX_MAX)
    if gpu is not None and gpu not in indices:
        table.wrong("gpu", f"there is no GPU with index {gpu}")
    kind = table.parsed("kind", _parse_kind, default="xid") or EventType.XID
    xid = table.number("xid", 1, XID_MAX, optional=kind is not EventType.XID)
    if xid is not None and kind is not EventType.XID:
        table.wrong("xid", "only an event of kind xid has a number")
    table.done()
    return ScriptedEvent(at_s, gpu or 0, xid or 0, int(kind))


def _parse_kind(text: str) -> EventType:
    """Raises: ValueError."""
    if text not in KINDS:
        raise ValueError(f"{text!r} is no kind of event ({', '.join(KINDS)})")
    return KINDS[text]


MAJOR_MAX: Final = 4095  # 12 bits (linux/kdev_t.h)


def read_majors(table: Table) -> Majors:
    """One that is left out: that module is not loaded."""
    names = ("nvidia", "nvidia_uvm", "nvidia_caps")
    nvidia, uvm, caps = (table.number(name, 1, MAJOR_MAX, optional=True) for name in names)
    modeset = table.maybe_flag("modeset")
    table.done()
    return Majors(nvidia=nvidia, nvidia_uvm=uvm, nvidia_caps=caps, modeset=modeset)


NOT_KNOWN: Final = -1
UNKNOWN: Final = "unknown"


def mig_devices(tables: list[Table], gpu_minor: int, gpu_bytes: int | None) -> tuple[MigDevice, ...]:
    """The MIG devices of one GPU in the order of their indices. gpu_bytes: its memory, where that is known."""
    devices = [_mig_device(each, place, gpu_minor, gpu_bytes) for place, each in enumerate(tables)]
    return tuple(sorted(devices, key=lambda device: device.index))


def _mig_device(table: Table, place: int, gpu_minor: int, gpu_bytes: int | None) -> MigDevice:
    """Its place in the file is its index, unless it says another: NVML's list has holes."""
    index = table.number("index", 0, GPU_INSTANCES_MAX * COMPUTE_INSTANCES_MAX - 1, optional=True)
    table.once("index", (gpu_minor, place if index is None else index), among="mig")
    instance = table.number("gi", 0, GPU_INSTANCES_MAX - 1)
    compute = table.number("ci", 0, COMPUTE_INSTANCES_MAX - 1)
    uuid = table.parsed("uuid", parse_mig_uuid)
    table.once("uuid", uuid, among="gpu")
    if instance is not None and compute is not None:
        table.once("", (gpu_minor, instance, compute), among="mig")
    memory_bytes = table.number("memory_bytes", 0, 2**63 - 1) or 0
    if gpu_bytes and memory_bytes > gpu_bytes:
        table.wrong("memory_bytes", f"{memory_bytes} is more than its GPU has: {gpu_bytes}")
    minors = _cap_minors(table, usual_minors(gpu_minor, instance or 0, compute or 0))
    device = MigDevice(
        index=place if index is None else index,
        uuid=uuid or GpuUuid(""),
        gpu_instance_id=instance or 0,
        compute_instance_id=compute or 0,
        profile=table.parsed("profile", _parse_profile) or "",
        memory_bytes=memory_bytes,
        gpu_instance_minor=minors[0],
        compute_instance_minor=minors[1],
        unavailable=table.text("unavailable", default="") or "",
        processes=table.number("processes", 0, PROCESSES_MAX, optional=True),
    )
    table.done()
    return device


def _cap_minors(table: Table, usual: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Those that drivers use where the file says none; -1: nobody knows them."""
    said = tuple(table.number(key, NOT_KNOWN, CAP_MINOR_MAX, optional=True) for key in ("gi_minor", "ci_minor"))
    minors = [said[at] if said[at] is not None or usual is None else usual[at] for at in (0, 1)]
    return (
        None if minors[0] == NOT_KNOWN else minors[0],
        None if minors[1] == NOT_KNOWN else minors[1],
    )


def _parse_profile(text: str) -> str:
    """`unknown` is what NVML's survey says of a device that it cannot describe. Raises: ValueError."""
    return text if text == UNKNOWN else parse_profile(text)


UINT_MAX: Final = 2**32 - 1
E = TypeVar("E", bound=StrEnum)


class Facts(Struct, frozen=True, kw_only=True):
    """Of one GPU, as in `Gpu`."""

    architecture: str
    cpus: str
    compute_mode: ComputeMode | None
    persistence: bool | None
    ecc: Ecc | None
    addressing: str
    fabric: Fabric | None


def read_facts(table: Table) -> Facts:
    """All of them are optional."""
    return Facts(
        architecture=table.parsed("architecture", _maybe(_one_of(ARCHITECTURES.values())), default="") or "",
        cpus=table.parsed("cpus", _maybe(parse_cpulist), default="") or "",
        compute_mode=_word(table, "compute_mode", ComputeMode),
        persistence=table.maybe_flag("persistence"),
        ecc=_ecc(table),
        addressing=table.parsed("addressing", _maybe(_one_of(ADDRESSING)), default="") or "",
        fabric=_fabric(table.table("fabric")) if table.has("fabric") else None,
    )


def read_modules(table: Table) -> dict[str, str]:
    """`[node.modules]`: versions by the kernel's names."""
    found = {name: table.parsed(name, parse_module_version) or "" for name in MODULES if table.has(name)}
    table.done()
    return found


def _ecc(table: Table) -> Ecc | None:
    """`ecc_pending` is the same as `ecc` where it is left out."""
    current, pending = table.maybe_flag("ecc"), table.maybe_flag("ecc_pending")
    if current is None:
        if pending is not None:
            table.wrong("ecc_pending", "says what becomes of `ecc`, which is missing")
        return None
    return Ecc(current, current if pending is None else pending)


def _fabric(table: Table) -> Fabric | None:
    state = _word(table, "state", FabricState, optional=False)
    fabric = Fabric(
        state=state or FabricState.COMPLETED,
        status=table.number("status", 0, UINT_MAX, optional=True) or 0,
        cluster=table.parsed("cluster", parse_cluster, default="") or "",
        clique=table.number("clique", 0, UINT_MAX, optional=True) or 0,
        health_mask=table.number("health_mask", 0, UINT_MAX, optional=True),
    )
    table.done()
    return fabric


def _word(table: Table, key: str, words: type[E], *, optional: bool = True) -> E | None:
    if optional and not table.has(key):
        return None
    found = table.parsed(key, _one_of(words))
    return None if found is None else words(found)


def _one_of(words: Iterable[str]) -> Callable[[str], str]:
    known = tuple(words)

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text[:64]!r} is none of {', '.join(known)}")
        return text

    return parse


def _maybe(parse: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: parse(text) if text else ""


MINOR_MAX: Final = 2**20 - 1  # 20 bits
# Made of the granted GPUs alone: nothing to say of them.
OF_GPUS: Final = frozenset({Extra.DRM, Extra.PROFILE})
_MODE: Final = re.compile("0[0-7]{3}")


def read_offers(node: Table) -> dict[Extra, NodeExtra]:
    """The extras of a simulated node; what is wrong is noted."""
    offers: dict[Extra, NodeExtra] = {}
    for table in node.tables("extra"):
        extra = table.parsed("name", _parse_extra)
        table.once("name", extra, among="extra")
        nodes = tuple(_node(each) for each in table.tables("nodes"))
        mounts = tuple(_mount(each, extra) for each in table.tables("mounts"))
        lacking = table.text("lacking", default="") or ""
        channels = _channels(table) if extra is Extra.IMEX and not (lacking and not table.has("channels")) else None
        table.done()
        if extra is not None:
            offers[extra] = NodeExtra(nodes, mounts, channels, lacking)
            if not (nodes or mounts or channels or lacking):
                table.wrong("", f"says of {extra} neither nodes nor mounts")
    return offers


def _channels(table: Table) -> Channels | None:
    major, count = table.number("major", 1, MAJOR_MAX), table.number("channels", 1, CHANNEL_MAX + 1)
    return Channels(major, count) if major and count else None


def _node(table: Table) -> DeviceNode:
    node = DeviceNode(
        path=table.parsed("path", _parse_device_path) or "",
        major=table.number("major", 1, MAJOR_MAX) or 0,
        minor=table.number("minor", 0, MINOR_MAX) or 0,
        mode=int(table.parsed("mode", _parse_mode, default="0666") or "0", 8),
    )
    table.done()
    return node


def _mount(table: Table, extra: Extra | None) -> Mount:
    destination, source = (table.parsed(key, _parse_path) or "" for key in ("destination", "source"))
    table.done()
    return socket_mount(destination, source) if extra in SOCKETS else Mount(destination, source)


def _parse_extra(text: str) -> Extra:
    """Raises: ValueError."""
    known = [extra.value for extra in Extra if extra not in OF_GPUS]
    if text not in known:
        raise ValueError(f"{text!r} is none of {', '.join(known)}")
    return Extra(text)


def _parse_path(text: str) -> str:
    """Raises: ValueError."""
    if not text.startswith("/") or text.startswith("//") or normpath(text) != text:
        raise ValueError(f"{text!r} is not an absolute path without `.`, `..` and `//`")
    return text


def _parse_device_path(text: str) -> str:
    """Raises: ValueError."""
    if not _parse_path(text).startswith("/dev/"):
        raise ValueError(f"{text!r} is not below /dev")
    return text


def _parse_mode(text: str) -> str:
    """Text and not a number, because 0666 is no number to TOML. Raises: ValueError."""
    if not _MODE.fullmatch(text):
        raise ValueError(f'{text!r} is not a mode ("0666")')
    return text


GPU_INDEX_MAX: Final = 247  # as in the rest of the file
MIG_ARCH: Final = (8, 0)  # A100, the first that can be cut
WHOLE_ARCHS: Final = frozenset({(8, 6), (8, 7), (8, 9)})  # GA10x, Orin, Ada: none of them can
OF_A_GPU: Final = ("lost", "unavailable", "signs", "mig", "present")
OF_THE_NODE: Final = ("driver", "cuda", "majors", "fault")


def read_changes(root: Table, inventory: Inventory) -> tuple[Change, ...]:
    """In the order of their times, whatever that of the file. inventory: the file's node at its beginning."""
    tables = [table.apart() for table in root.tables("change")]
    read = [(table, _change(table, inventory)) for table in tables]
    read.sort(key=lambda each: each[1].at_s)
    _Story(inventory).check(read)
    return tuple(change for _, change in read)


def _change(table: Table, inventory: Inventory) -> Change:
    """What the node becomes at a moment; what it does not name stays as it was."""
    at_s = table.seconds("at_s")
    gpu = table.number("gpu", 0, GPU_INDEX_MAX, optional=True)
    named = next((each for each in inventory.gpus if each.index == gpu), None)
    if gpu is not None and named is None:
        table.wrong("gpu", f"there is no GPU with index {gpu}")
    change = _node_change(table, at_s) if gpu is None else _gpu_change(table, at_s, gpu, named)
    if not change.says:
        table.wrong("", "changes nothing: " + ", ".join(OF_THE_NODE if gpu is None else OF_A_GPU))
    table.done()
    return change


def _gpu_change(table: Table, at_s: float, index: int, gpu: Gpu | None) -> Change:
    """gpu: None where the file has none with that index, which was said."""
    lost, unavailable = table.maybe_flag("lost"), table.text("unavailable", optional=True)
    if lost is not None and unavailable is not None:
        table.wrong("lost", "says the same as `unavailable` in other words: one of them")
    mig = mig_enabled = None
    if table.has("mig"):
        mig_enabled, instances = table.flag_or_tables("mig")
        mig = mig_devices(instances, gpu.minor_number if gpu else 0, gpu.memory_bytes if gpu else None)
        if mig_enabled and gpu and (gpu.arch < MIG_ARCH or gpu.arch in WHOLE_ARCHS):
            arch = f"{gpu.arch[0]}.{gpu.arch[1]}"
            table.wrong("mig", f"GPU {index} is none that can be cut: its compute capability is {arch}")
    present, signs = table.maybe_flag("present"), read_signs(table)
    if present is False and (lost, unavailable, signs, mig) != (None,) * 4:
        table.wrong("present", "a GPU that leaves changes in no other way at that time")
    return Change(
        at_s=at_s,
        gpu=index,
        present=present,
        lost=lost,
        unavailable=unavailable,
        signs=signs,
        mig_enabled=mig_enabled,
        mig=mig,
    )


def _node_change(table: Table, at_s: float) -> Change:
    driver, cuda = (table.parsed(key, parse_version) if table.has(key) else None for key in ("driver", "cuda"))
    majors = read_majors(table.table("majors")) if table.has("majors") else None
    return Change(at_s=at_s, driver=driver, cuda=cuda, majors=majors, fault=table.text("fault", optional=True))


class _Story:
    """What is wrong with changes that are each right: told from the beginning, one after the other."""

    def __init__(self, inventory: Inventory) -> None:
        self._absent: dict[int, float] = {}  # index -> since when
        self._devices = {gpu.index: frozenset(part.uuid for part in gpu.mig) for gpu in inventory.gpus}
        self._said: set[tuple[int | None, float, str]] = set()

    def check(self, read: list[tuple[Table, Change]]) -> None:
        """Notes each fault. read: in the order of their times."""
        for table, change in read:
            for key, message in (*self._twice(change), *self._presence(change), *self._layout(change)):
                table.wrong(key, message)

    def _twice(self, change: Change) -> Iterator[tuple[str, str]]:
        for key in change.says:
            if (place := (change.gpu, change.at_s, key)) in self._said:
                yield key, f"another change says it for the same moment, {change.at_s:g} s"
            self._said.add(place)

    def _presence(self, change: Change) -> Iterator[tuple[str, str]]:
        if change.gpu is None:
            return
        gone_s = self._absent.get(change.gpu)
        if change.present is None:
            if gone_s is not None:
                yield "gpu", f"GPU {change.gpu} is not there at that time, but gone since {gone_s:g} s"
        elif change.present and gone_s is None:
            yield "present", f"GPU {change.gpu} is there at that time already"
        elif not change.present and gone_s is not None:
            yield "present", f"GPU {change.gpu} is gone at that time already, since {gone_s:g} s"
        elif change.present:
            del self._absent[change.gpu]
        else:
            self._absent[change.gpu] = change.at_s

    def _layout(self, change: Change) -> Iterator[tuple[str, str]]:
        if change.gpu is None or change.mig is None:
            return
        self._devices[change.gpu] = mine = frozenset(device.uuid for device in change.mig)
        for index, devices in self._devices.items():
            if index != change.gpu:
                for uuid in sorted(mine & devices - {""}):
                    yield "mig", f"{uuid} is a MIG device of another GPU"
