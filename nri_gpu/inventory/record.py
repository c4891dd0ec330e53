"""An inventory as the text of a topology file: `parse_topology` reads back what `topology_text` was made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

from msgspec import Struct, to_builtins

from nri_gpu.domain.edits import Extra, NodeExtra
from nri_gpu.domain.gpu import Gpu, MigDevice
from nri_gpu.domain.node import Inventory
from nri_gpu.host.kernel_view import usual_minors
from nri_gpu.inventory import topology_tables
from nri_gpu.inventory.topology_reader import Table

T = TypeVar("T", bound=Table)


def topology_text(inventory: Inventory, comment: str = "") -> str:
    """Return the whole file: all of the inventory but when it was taken, and whether it was simulated."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + "".join(_lines("", to_builtins(_file(inventory))))


def _table(kind: type[T], value: Struct, **others: object) -> T:
    """Return the table with the value's fields, except those in `others`."""
    same = {name: getattr(value, name) for name in kind.__struct_fields__ if name in value.__struct_fields__}
    return kind(**same | others)


def _file(inventory: Inventory) -> topology_tables.FileTable:
    node = topology_tables.NodeTable(
        driver=inventory.driver_version,
        cuda=inventory.cuda_version,
        majors=_table(topology_tables.MajorsTable, inventory.majors),
        modules=dict(inventory.modules),
        nvswitches=inventory.nvswitches,
        extra=tuple(_extra(extra, found) for extra, found in inventory.extras.items()),
    )
    return topology_tables.FileTable(
        schema=1,
        node=node,
        gpu=tuple(map(_gpu, inventory.gpus)),
        fault=tuple(_table(topology_tables.FaultTable, fault) for fault in inventory.faults),
        link=tuple(_table(topology_tables.LinkTable, link) for link in inventory.links),
        numa=tuple(_table(topology_tables.NumaTable, node) for node in inventory.numa),
    )


def _extra(extra: Extra, found: NodeExtra) -> topology_tables.ExtraTable:
    return topology_tables.ExtraTable(
        name=extra,
        major=found.channels.major if found.channels else None,
        channels=found.channels.count if found.channels else None,
        lacking=found.lacking,
        nodes=tuple(_table(topology_tables.DeviceTable, node, mode=f"{node.mode:04o}") for node in found.nodes),
        mounts=tuple(_table(topology_tables.MountTable, mount) for mount in found.mounts),
    )


def _gpu(gpu: Gpu) -> topology_tables.GpuTable:
    parts = tuple(_mig(gpu, place, device) for place, device in enumerate(gpu.mig))
    return _table(
        topology_tables.GpuTable,
        gpu,
        arch=gpu.arch_text or None,
        partition=parts or gpu.mig_enabled,
        ecc=gpu.ecc and gpu.ecc.current,
        ecc_pending=gpu.ecc.pending if gpu.ecc and gpu.ecc.pending != gpu.ecc.current else None,
        processes=None,  # they differ by the time the file is read
        fabric=gpu.fabric and _table(topology_tables.FabricTable, gpu.fabric),
        drm=tuple(_table(topology_tables.DrmTable, node) for node in gpu.drm),
    )


def _mig(gpu: Gpu, place: int, device: MigDevice) -> topology_tables.MigTable:
    minors = (device.gpu_instance_minor, device.compute_instance_minor)
    usual = usual_minors(gpu.minor_number, device.gpu_instance_id, device.compute_instance_id) or (None, None)
    written = (
        (None, None) if minors == usual else [topology_tables.NOT_KNOWN if minor is None else minor for minor in minors]
    )
    return _table(
        topology_tables.MigTable,
        device,
        index=None if device.index == place else device.index,
        gi_minor=written[0],
        ci_minor=written[1],
        engines=_table(topology_tables.EnginesTable, device.engines),
        processes=None,
    )


def _lines(path: str, table: Mapping[str, object]) -> Iterator[str]:
    """Yield the keys of a table, and then the tables below it."""
    below = {key: value for key, value in table.items() if isinstance(value, dict) or _is_array_of_tables(value)}
    yield from (f"{key} = {_value(value)}\n" for key, value in table.items() if key not in below)
    for key, value in below.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield f"\n[{inner}]\n"
            yield from _lines(inner, value)
        else:
            for each in cast("tuple[Mapping[str, object], ...]", value):
                yield f"\n[[{inner}]]\n"
                yield from _lines(inner, each)


def _is_array_of_tables(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], dict)


def _value(value: object) -> str:
    # JSON's values are also TOML's. A string is a basic string there, DEL excepted, which it must not hold bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
