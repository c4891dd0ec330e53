"""What a topology file says of changes: `[[change]]`, each at a time of its own."""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.gpu import Gpu, Inventory
from nri_gpu.inventory.identity import parse_version
from nri_gpu.inventory.mig_table import mig_devices
from nri_gpu.inventory.scene import LOST, Change
from nri_gpu.inventory.table import Table

GPU_INDEX_MAX: Final = 247  # as in the rest of the file


def read_changes(root: Table, inventory: Inventory) -> tuple[Change, ...]:
    """In the order of their times. inventory: the file's node at its beginning."""
    changes = [_change(table.apart(), inventory) for table in root.tables("change")]
    return tuple(sorted(changes, key=lambda change: change.at_s))


def _change(table: Table, inventory: Inventory) -> Change:
    """What the node becomes at a moment; what it does not name stays as it was."""
    at_s = table.seconds("at_s")
    gpu = table.number("gpu", 0, GPU_INDEX_MAX, optional=True)
    named = next((each for each in inventory.gpus if each.index == gpu), None)
    if gpu is not None and named is None:
        table.wrong("gpu", f"there is no GPU with index {gpu}")
    change = _gpu_change(table, at_s, named, inventory) if gpu is not None else _node_change(table, at_s)
    if not change.says_something:
        table.wrong("", "changes nothing: " + ("lost, unavailable, mig" if gpu is not None else "driver, cuda, fault"))
    table.done()
    return change


def _gpu_change(table: Table, at_s: float, gpu: Gpu | None, inventory: Inventory) -> Change:
    lost, unavailable = table.maybe_flag("lost"), table.text("unavailable", optional=True)
    if lost is not None and unavailable is not None:
        table.wrong("lost", "says the same as `unavailable` in other words: one of them")
    mig = mig_enabled = None
    if table.has("mig"):
        mig_enabled, instances = table.flag_or_tables("mig")
        mig = mig_devices(instances, gpu.minor_number if gpu else 0, gpu.memory_bytes if gpu else None)
        others = {part.uuid for part in inventory.parts if part.gpu is not gpu}
        for device in mig:
            if device.uuid in others:
                table.wrong("mig", f"{device.uuid} is a MIG device of another GPU")
    if lost is not None:
        unavailable = LOST if lost else ""
    return Change(at_s=at_s, gpu=gpu.index if gpu else 0, unavailable=unavailable, mig_enabled=mig_enabled, mig=mig)


def _node_change(table: Table, at_s: float) -> Change:
    driver, cuda = (table.parsed(key, parse_version) if table.has(key) else None for key in ("driver", "cuda"))
    return Change(at_s=at_s, driver=driver, cuda=cuda, fault=table.text("fault", optional=True))
