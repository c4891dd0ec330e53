"""What a topology file says of changes: `[[change]]`, each at a time of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.domain.gpu import Gpu, Inventory
from nri_gpu.inventory.identity import parse_version
from nri_gpu.inventory.majors_table import read_majors
from nri_gpu.inventory.mig_table import mig_devices
from nri_gpu.inventory.scene import Change
from nri_gpu.inventory.script import read_signs
from nri_gpu.inventory.table import Table

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
