"""What happens to a simulated node over time: the changes and events that its topology file plays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, MigDevice
from nri_gpu.domain.health import EventType, ScriptedEvent, Sign
from nri_gpu.domain.node import Inventory, Majors
from nri_gpu.inventory.formats import GPU_INDEX_MAX, parse_version
from nri_gpu.simulation.gpu_tables import read_mig_devices, read_signs
from nri_gpu.simulation.tables import MAJOR_MAX, Table

LOST: Final = "GPU is lost (simulated by the topology file)"
XID_MAX: Final = 65535
# The names in nvml.h, written like `double-bit-ecc`.
EVENT_KINDS: Final[Mapping[str, EventType]] = {
    kind.name.lower().replace("_", "-"): kind for kind in EventType if kind.name
}
MIG_ARCH: Final = (8, 0)  # A100, the first with MIG
ARCHS_WITHOUT_MIG: Final = frozenset({(8, 6), (8, 7), (8, 9)})  # GA10x, Orin, Ada
GPU_KEYS: Final = ("lost", "unavailable", "signs", "mig", "present")
NODE_KEYS: Final = ("driver", "cuda", "majors", "fault")


class ScenarioChange(Struct, frozen=True, kw_only=True):
    """A change of one GPU, or of the node; None leaves a field as it is.

    at_s: seconds after the file was first read. gpu: index; None for the node. present: whether it is in the machine.
    lost: whether NVML reports it as lost. unavailable: empty makes the GPU available again. signs: all that it shows
    from now on. fault: why the driver does not answer from now on; empty when it answers again.
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
    def keys(self) -> tuple[str, ...]:
        """The keys of the file that it sets."""
        return tuple(name for name in (*GPU_KEYS, *NODE_KEYS) if getattr(self, name) is not None)


class Scenario(Struct, frozen=True):
    """A node at the beginning, and its changes in the order of their times."""

    inventory: Inventory
    changes: tuple[ScenarioChange, ...] = ()

    def after(self, elapsed_s: float) -> Inventory:
        """The node after so many seconds. Raises: InventoryError: by then the driver does not answer."""
        due = [change for change in self.changes if change.at_s <= elapsed_s]
        if fault := _last(change.fault for change in due):
            raise InventoryError(fault)
        inventory = self.inventory
        for change in due:
            inventory = _changed(inventory, change)
        return _without_absent(inventory, {change.gpu: change.present for change in due if change.present is not None})


def _last(faults: Iterable[str | None]) -> str:
    return next((fault for fault in reversed(list(faults)) if fault is not None), "")


def _without_absent(inventory: Inventory, present: Mapping[int | None, bool]) -> Inventory:
    """Removes the absent GPUs and their links; the others keep their index."""
    absent = {index for index, there in present.items() if not there}
    if not absent:
        return inventory
    gpus = tuple(gpu for gpu in inventory.gpus if gpu.index not in absent)
    links = tuple(link for link in inventory.links if not absent & {link.a, link.b})
    return replace(inventory, gpus=gpus, links=links)


def _changed(inventory: Inventory, change: ScenarioChange) -> Inventory:
    if change.gpu is not None:
        gpus = (_changed_gpu(gpu, change) if gpu.index == change.gpu else gpu for gpu in inventory.gpus)
        return replace(inventory, gpus=tuple(gpus))
    return replace(
        inventory,
        driver_version=inventory.driver_version if change.driver is None else change.driver,
        cuda_version=inventory.cuda_version if change.cuda is None else change.cuda,
        majors=inventory.majors if change.majors is None else change.majors,
    )


def _changed_gpu(gpu: Gpu, change: ScenarioChange) -> Gpu:
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


def read_events(root: Table, indices: frozenset[int]) -> tuple[ScriptedEvent, ...]:
    """`[[event]]`: at_s, gpu (an index), kind, xid; in the order of their times."""
    events = (_read_event(table, indices) for table in root.tables("event"))
    return tuple(sorted(events, key=lambda event: event.at_s))


def _read_event(table: Table, indices: frozenset[int]) -> ScriptedEvent:
    at_s, gpu = table.seconds("at_s"), table.number("gpu", 0, GPU_INDEX_MAX)
    if gpu is not None and gpu not in indices:
        table.wrong("gpu", f"there is no GPU with index {gpu}")
    kind = EVENT_KINDS[table.one_of("kind", EVENT_KINDS, default="xid") or "xid"]
    xid = table.number("xid", 1, XID_MAX, optional=kind is not EventType.XID)
    if xid is not None and kind is not EventType.XID:
        table.wrong("xid", "only an event of kind xid has a number")
    table.done()
    return ScriptedEvent(at_s, gpu or 0, xid or 0, int(kind))


def read_changes(root: Table, inventory: Inventory) -> tuple[ScenarioChange, ...]:
    """`[[change]]`, in the order of their times. inventory: the file's node at the beginning."""
    tables = [table.apart() for table in root.tables("change")]
    changes = [(table, _read_change(table, inventory)) for table in tables]
    changes.sort(key=lambda each: each[1].at_s)
    _Sequence(inventory).check(changes)
    return tuple(change for _, change in changes)


def _read_change(table: Table, inventory: Inventory) -> ScenarioChange:
    at_s = table.seconds("at_s")
    index = table.number("gpu", 0, GPU_INDEX_MAX, optional=True)
    gpu = next((each for each in inventory.gpus if each.index == index), None)
    if index is not None and gpu is None:
        table.wrong("gpu", f"there is no GPU with index {index}")
    change = _node_change(table, at_s) if index is None else _gpu_change(table, at_s, index, gpu)
    if not change.keys:
        table.wrong("", "changes nothing: " + ", ".join(NODE_KEYS if index is None else GPU_KEYS))
    table.done()
    return change


def _gpu_change(table: Table, at_s: float, index: int, gpu: Gpu | None) -> ScenarioChange:
    """gpu: None where the file has none with that index, which is noted already."""
    lost, unavailable = table.maybe_flag("lost"), table.text("unavailable", optional=True)
    if lost is not None and unavailable is not None:
        table.wrong("lost", "says the same as `unavailable` in other words: one of them")
    mig = mig_enabled = None
    if table.has("mig"):
        mig_enabled, instances = table.flag_or_tables("mig")
        mig = read_mig_devices(instances, gpu.minor_number if gpu else 0, gpu.memory_bytes if gpu else None)
        if mig_enabled and gpu and (gpu.arch < MIG_ARCH or gpu.arch in ARCHS_WITHOUT_MIG):
            arch = f"{gpu.arch[0]}.{gpu.arch[1]}"
            table.wrong("mig", f"GPU {index} does not support MIG: its compute capability is {arch}")
    present, signs = table.maybe_flag("present"), read_signs(table)
    if present is False and (lost, unavailable, signs, mig) != (None,) * 4:
        table.wrong("present", "a GPU that leaves changes in no other way at that time")
    return ScenarioChange(
        at_s=at_s,
        gpu=index,
        present=present,
        lost=lost,
        unavailable=unavailable,
        signs=signs,
        mig_enabled=mig_enabled,
        mig=mig,
    )


def _node_change(table: Table, at_s: float) -> ScenarioChange:
    driver, cuda = (table.parsed(key, parse_version) if table.has(key) else None for key in ("driver", "cuda"))
    majors = read_majors(table.table("majors")) if table.has("majors") else None
    return ScenarioChange(at_s=at_s, driver=driver, cuda=cuda, majors=majors, fault=table.text("fault", optional=True))


def read_majors(table: Table) -> Majors:
    """A module whose major is left out is not loaded."""
    names = ("nvidia", "nvidia_uvm", "nvidia_caps")
    nvidia, uvm, caps = (table.number(name, 1, MAJOR_MAX, optional=True) for name in names)
    modeset = table.maybe_flag("modeset")
    table.done()
    return Majors(nvidia=nvidia, nvidia_uvm=uvm, nvidia_caps=caps, modeset=modeset)


class _Sequence:
    """Finds what is wrong with changes that are each right, by going through them in order."""

    def __init__(self, inventory: Inventory) -> None:
        self._absent: dict[int, float] = {}  # index -> since when
        self._devices = {gpu.index: frozenset(part.uuid for part in gpu.mig) for gpu in inventory.gpus}
        self._set: set[tuple[int | None, float, str]] = set()

    def check(self, changes: Iterable[tuple[Table, ScenarioChange]]) -> None:
        """Notes each fault. changes: in the order of their times."""
        for table, change in changes:
            for key, message in (*self._twice(change), *self._presence(change), *self._layout(change)):
                table.wrong(key, message)

    def _twice(self, change: ScenarioChange) -> Iterator[tuple[str, str]]:
        for key in change.keys:
            if (place := (change.gpu, change.at_s, key)) in self._set:
                yield key, f"another change sets it at the same time, {change.at_s:g} s"
            self._set.add(place)

    def _presence(self, change: ScenarioChange) -> Iterator[tuple[str, str]]:
        if change.gpu is None:
            return
        absent_s = self._absent.get(change.gpu)
        if change.present is None:
            if absent_s is not None:
                yield "gpu", f"GPU {change.gpu} is absent at that time, since {absent_s:g} s"
        elif change.present and absent_s is None:
            yield "present", f"GPU {change.gpu} is already present at that time"
        elif not change.present and absent_s is not None:
            yield "present", f"GPU {change.gpu} is already absent at that time, since {absent_s:g} s"
        elif change.present:
            del self._absent[change.gpu]
        else:
            self._absent[change.gpu] = change.at_s

    def _layout(self, change: ScenarioChange) -> Iterator[tuple[str, str]]:
        if change.gpu is None or change.mig is None:
            return
        self._devices[change.gpu] = mine = frozenset(device.uuid for device in change.mig)
        for index, devices in self._devices.items():
            if index != change.gpu:
                for uuid in sorted(mine & devices - {""}):
                    yield "mig", f"{uuid} is a MIG device of another GPU"
