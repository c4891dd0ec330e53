"""An inventory as the text of a topology file: `parse_topology` reads back what `topology_text` was made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from nri_gpu.domain.edits import DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.domain.gpu import Fabric, Gpu, GpuUuid, MigDevice
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.inventory.mig_minors import usual_minors
from nri_gpu.simulation.gpu_tables import NOT_KNOWN
from nri_gpu.simulation.topology import SCHEMA


def topology_text(inventory: Inventory, comment: str = "") -> str:
    """The whole file: all of the inventory but when it was taken, and whether it was simulated."""
    blocks = [_node(inventory)]
    for extra, found in inventory.extras.items():
        blocks += _extra(extra, found)
    for gpu in inventory.gpus:
        blocks += _gpu(gpu)
    blocks += [_fault(fault) for fault in inventory.faults]
    blocks += [
        _block("[[link]]", {"a": link.a, "b": link.b, "pcie": link.pcie, "nvlink": link.nvlink or None})
        for link in inventory.links
    ]
    blocks += [
        _block("[[numa]]", {"node": node.number, "cpus": node.cpus, "memory": None if node.memory else False})
        for node in inventory.numa
    ]
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return f"{head}schema = {SCHEMA}\n\n" + "\n".join(blocks)


def scrubbed(inventory: Inventory) -> Inventory:
    """The same node with made-up UUIDs: nothing else identifies a single piece of hardware.

    They differ in their first letters, as real ones do, since people write them as prefixes.
    """
    faults = (replace(each, uuid=_made_up("GPU", each.index, 0) if each.uuid else "") for each in inventory.faults)
    return replace(inventory, gpus=tuple(map(_scrubbed_gpu, inventory.gpus)), faults=tuple(faults))


def _scrubbed_gpu(gpu: Gpu) -> Gpu:
    parts = tuple(replace(part, uuid=_made_up("MIG", gpu.index, part.index + 1)) for part in gpu.mig)
    return replace(gpu, uuid=_made_up("GPU", gpu.index, 0), mig=parts)


def _made_up(kind: str, gpu: int, part: int) -> GpuUuid:
    return GpuUuid(f"{kind}-{gpu:02x}{part:02x}0000-0000-4000-8000-{gpu:06x}{part:06x}")


def _node(inventory: Inventory) -> str:
    majors = inventory.majors
    node = {"driver": inventory.driver_version or None, "cuda": inventory.cuda_version or None}
    numbers = {
        "nvidia": majors.nvidia,
        "nvidia_uvm": majors.nvidia_uvm,
        "nvidia_caps": majors.nvidia_caps,
        "modeset": majors.modeset,
    }
    blocks = [_block("[node]", node), _block("[node.majors]", numbers)]
    if inventory.modules:
        blocks.append(_block("[node.modules]", inventory.modules))
    return "\n".join(blocks)


def _extra(extra: Extra, found: NodeExtra) -> Iterator[str]:
    channels = {"major": found.channels.major, "channels": found.channels.count} if found.channels else {}
    yield _block("[[node.extra]]", {"name": extra.value, **channels, "lacking": found.lacking or None})
    yield from (_block("[[node.extra.nodes]]", _device(node)) for node in found.nodes)
    yield from (_block("[[node.extra.mounts]]", _mount(mount)) for mount in found.mounts)


def _device(node: DeviceNode) -> dict[str, object]:
    return {"path": node.path, "major": node.major, "minor": node.minor, "mode": f"{node.mode:04o}"}


def _mount(mount: Mount) -> dict[str, object]:
    return {"destination": mount.destination, "source": mount.source}


def _fault(fault: GpuFault) -> str:
    return _block(
        "[[fault]]",
        {
            "index": fault.index,
            "reason": fault.reason,
            "code": fault.code or None,
            "sign": fault.sign,
            "uuid": fault.uuid or None,
            "bus_id": fault.pci_bus_id or None,
        },
    )


def _gpu(gpu: Gpu) -> Iterator[str]:
    yield _block(
        "[[gpu]]",
        {
            "index": gpu.index,
            "minor": gpu.minor_number,
            "uuid": gpu.uuid,
            "bus_id": gpu.pci_bus_id,
            "model": gpu.model,
            "memory_bytes": gpu.memory_bytes,
            "arch": f"{gpu.arch[0]}.{gpu.arch[1]}",
            "brand": gpu.brand or None,
            "numa": gpu.numa_node,
            "unavailable": gpu.unavailable or None,
            "mig": True if gpu.mig_enabled and not gpu.mig else None,
            "signs": ", ".join(gpu.signs) or None,
            **_facts(gpu),
        },
    )
    if gpu.fabric:
        yield _block("[gpu.fabric]", _fabric(gpu.fabric))
    yield from (_block("[[gpu.mig]]", _part(gpu, place, part)) for place, part in enumerate(gpu.mig))
    for node in gpu.drm:
        yield _block("[[gpu.drm]]", {"name": node.name, "major": node.major, "minor": node.minor})


def _facts(gpu: Gpu) -> dict[str, object]:
    return {
        "architecture": gpu.architecture or None,
        "cpus": gpu.cpus or None,
        "compute_mode": gpu.compute_mode,
        "persistence": gpu.persistence,
        "ecc": gpu.ecc.current if gpu.ecc else None,
        "ecc_pending": gpu.ecc.pending if gpu.ecc and gpu.ecc.pending != gpu.ecc.current else None,
        "addressing": gpu.addressing or None,
    }


def _fabric(fabric: Fabric) -> dict[str, object]:
    return {
        "state": fabric.state,
        "status": fabric.status or None,
        "cluster": fabric.cluster or None,
        "clique": fabric.clique,
        "health_mask": fabric.health_mask,
    }


def _part(gpu: Gpu, place: int, part: MigDevice) -> dict[str, object]:
    minors = (part.gpu_instance_minor, part.compute_instance_minor)
    usual = usual_minors(gpu.minor_number, part.gpu_instance_id, part.compute_instance_id)
    written = (None, None) if minors == (usual or (None, None)) else tuple(map(_minor_number, minors))
    return {
        "index": None if part.index == place else part.index,
        "gi": part.gpu_instance_id,
        "ci": part.compute_instance_id,
        "uuid": part.uuid,
        "profile": part.profile,
        "memory_bytes": part.memory_bytes,
        "gi_minor": written[0],
        "ci_minor": written[1],
        "unavailable": part.unavailable or None,
    }


def _minor_number(minor: int | None) -> int:
    return NOT_KNOWN if minor is None else minor


def _block(head: str, values: Mapping[str, object]) -> str:
    lines = [f"{key} = {_value(value)}\n" for key, value in values.items() if value is not None]
    return "".join([f"{head}\n", *lines])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # A JSON string is a basic string of TOML, DEL excepted, which it must not hold bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
