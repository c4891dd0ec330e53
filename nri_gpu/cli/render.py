"""Prints GPUs, their health and their topology: as tables, and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from nri_gpu.allocation.messages import why_not
from nri_gpu.cli.client import SnapshotAge
from nri_gpu.daemon.report import health_json, place_json, unlisted_json
from nri_gpu.domain.edits import Extra, NodeExtra
from nri_gpu.domain.gpu import ComputeMode, Fabric, Gpu, MigPart, Unit, health_of, whole
from nri_gpu.domain.health import HealthState
from nri_gpu.domain.node import Inventory, Link

_FOR_ONE: Final = (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.EXCLUSIVE_THREAD)


def gpus_json(inventory: Inventory, snapshot: SnapshotAge | None = None) -> dict[str, Any]:
    """Schema `nri-gpu/gpus/v1`. snapshot: the running daemon's, if there is one."""
    return {
        "schema": "nri-gpu/gpus/v1",
        "simulated": inventory.simulated,
        "driver_version": inventory.driver_version,
        "cuda_version": inventory.cuda_version,
        "fault": inventory.fault,
        "majors": {
            "nvidia": inventory.majors.nvidia,
            "nvidia_uvm": inventory.majors.nvidia_uvm,
            "nvidia_caps": inventory.majors.nvidia_caps,
        },
        "modeset": inventory.majors.modeset,
        "extras": {extra.value: _offer_json(offer) for extra, offer in inventory.extras.items()},
        "modules": dict(inventory.modules),
        "snapshot": {"number": snapshot.number, "age_s": snapshot.age_s} if snapshot else None,
        "gpus": [_gpu_json(gpu) for gpu in inventory.gpus],
        "unlisted": [unlisted_json(gpu) for gpu in inventory.unlisted],
        "faults": [{"index": each.index, "reason": each.reason, "uuid": each.uuid} for each in inventory.faults],
        "links": [{"a": link.a, "b": link.b, "pcie": link.pcie, "nvlink": link.nvlink} for link in inventory.links],
        "numa": [{"node": node.number, "cpus": node.cpus, "memory": node.memory} for node in inventory.numa],
    }


def _offer_json(offer: NodeExtra) -> dict[str, Any]:
    return {
        "lacking": offer.lacking,
        "nodes": [{"path": node.path, "major": node.major, "minor": node.minor} for node in offer.nodes],
        "mounts": [mount.destination for mount in offer.mounts],
        "channels": offer.channels.count if offer.channels else 0,
    }


def _gpu_json(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "minor_number": gpu.minor_number,
        "uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "model": gpu.model,
        "memory_bytes": gpu.memory_bytes,
        "arch": f"{gpu.arch[0]}.{gpu.arch[1]}",
        "brand": gpu.brand,
        "numa_node": gpu.numa_node,
        "mig_enabled": gpu.mig_enabled,
        "unavailable": why_not(gpu),
        "processes": gpu.processes,
        "health": health_json(gpu),
        "architecture": gpu.architecture,
        "cpus": gpu.cpus,
        "compute_mode": gpu.compute_mode,
        "persistence": gpu.persistence,
        "ecc": {"current": gpu.ecc.current, "pending": gpu.ecc.pending} if gpu.ecc else None,
        "addressing": gpu.addressing,
        "fabric": _fabric_json(gpu.fabric) if gpu.fabric else None,
        "mig": [_part_json(part) for part in gpu.parts],
        "drm": [{"name": node.name, "major": node.major, "minor": node.minor} for node in gpu.drm],
    }


def _fabric_json(fabric: Fabric) -> dict[str, Any]:
    return {
        "state": fabric.state,
        "status": fabric.status,
        "cluster": fabric.cluster,
        "clique": fabric.clique,
        "health_mask": fabric.health_mask,
    }


def _part_json(part: MigPart) -> dict[str, Any]:
    device = part.device
    return {
        "index": device.index,
        "uuid": device.uuid,
        "profile": device.profile,
        "memory_bytes": device.memory_bytes,
        "gpu_instance_id": device.gpu_instance_id,
        "compute_instance_id": device.compute_instance_id,
        "gpu_instance_minor": device.gpu_instance_minor,
        "compute_instance_minor": device.compute_instance_minor,
        "unavailable": why_not(part),
        "processes": part.processes,
        "health": health_json(part),
    }


def gpus_text(inventory: Inventory, snapshot: SnapshotAge | None = None) -> str:
    """A table, with the faults below it."""
    origin = "simulated" if inventory.simulated else "NVML"
    versions = f"driver {inventory.driver_version or '?'}, CUDA {inventory.cuda_version or '?'}, from {origin}"
    lines = [f"{len(inventory.gpus)} GPUs, {versions}" + (f"; {snapshot.text}" if snapshot else "")]
    if inventory.gpus:
        rows = [_row(unit) for unit in inventory.units]
        lines += table(("INDEX", "MODEL", "MEMORY", "ARCH", "NUMA", "PCI BUS ID", "NODE", "STATE", "UUID"), rows)
    lines += gpu_lines(inventory)
    lines += [f"GPU {fault.index} cannot be described: {fault.reason}" for fault in inventory.faults]
    lines += unlisted_lines([unlisted_json(gpu) for gpu in inventory.unlisted], inventory.fault)
    for name, major in (("nvidia", inventory.majors.nvidia), ("nvidia-uvm", inventory.majors.nvidia_uvm)):
        if major is None and not inventory.fault:
            lines.append(f"kernel module {name} is not loaded: no GPU can be granted (modprobe {name})")
    if inventory.parts and inventory.majors.nvidia_caps is None:
        lines.append("nvidia-caps has no major: no MIG device can be granted")
    lines += _offer_lines(inventory.extras)
    return "\n".join([*lines, inventory.fault] if inventory.fault else lines)


def unlisted_lines(gpus: Sequence[Mapping[str, Any]], fault: str) -> list[str]:
    """GPUs that only the kernel shows. fault: of the whole inventory, which is printed elsewhere."""
    return [
        f"GPU {gpu['pci_bus_id']}{gpu['model'] and ' ' + gpu['model']}{gpu['uuid'] and ' ' + gpu['uuid']} "
        + ("is seen by the kernel only" if gpu["reason"] == fault else f"cannot be granted: {gpu['reason']}")
        for gpu in gpus
    ]


def _offer_lines(offers: Mapping[Extra, NodeExtra]) -> Iterator[str]:
    """Extras that the host provides; drm and profile depend on the GPUs instead."""
    here = [extra for extra, offer in offers.items() if not offer.lacking]
    lacking = [extra for extra, offer in offers.items() if offer.lacking]
    if here:
        yield f"extras: {', '.join(here)}"
    if lacking:
        yield f"extras not here: {', '.join(lacking)} (`-o json` says why)"


def _row(unit: Unit) -> tuple[str, ...]:
    return _part_row(unit) if isinstance(unit, MigPart) else _gpu_row(unit)


def _part_row(part: MigPart) -> tuple[str, ...]:
    """A MIG device, indented below its GPU. Its node is the compute instance's capability."""
    minor = part.device.compute_instance_minor
    return (
        f"  {part.place}",
        f"  MIG {part.device.profile}",
        f"{part.memory_bytes / 2**30:.0f} GiB",
        "",
        "",
        f"gi {part.device.gpu_instance_id}, ci {part.device.compute_instance_id}",
        "-" if minor is None else f"nvidia-cap{minor}",
        state_of(part),
        part.uuid,
    )


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    return (
        str(gpu.index),
        gpu.model,
        f"{gpu.memory_bytes / 2**30:.0f} GiB",
        f"{gpu.arch[0]}.{gpu.arch[1]}",
        "-" if gpu.numa_node is None else str(gpu.numa_node),
        gpu.pci_bus_id,
        f"/dev/nvidia{gpu.minor_number}",
        _state(gpu),
        gpu.uuid,
    )


def _state(gpu: Gpu) -> str:
    """With a compute mode that admits one process, since containers then cannot share the GPU by time."""
    mode = gpu.compute_mode if gpu.compute_mode in _FOR_ONE and not why_not(gpu) else None
    return ", ".join([state_of(gpu), *([mode.value] if mode else [])])


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns are as wide as their widest cell."""
    lines = [tuple(heads), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    padded = ((cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return ["  ".join(line).rstrip() for line in padded]


SHOWN: Final = 10  # transitions; `-o json` has more


def state_of(unit: Unit) -> str:
    """Why it cannot be granted; else `ok`, with its health and symptoms."""
    if why := why_not(unit):
        return why
    health = health_of(unit)
    words = [health.state.value] if health.state is not HealthState.HEALTHY else []
    words += [sign.value for sign in whole(unit).signs]
    return ", ".join(["ok", *words])


def gpu_lines(inventory: Inventory) -> Iterator[str]:
    """For `gpus`, as `status` prints them."""
    return health_lines([{**place_json(unit), "health": health_json(unit)} for unit in inventory.units])


def health_lines(gpus: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each GPU or MIG device that is, or was, not healthy."""
    of_gpus = {gpu["place"]: gpu.get("health") or {} for gpu in gpus if gpu["kind"] == "gpu"}
    for unit in gpus:
        health, part = unit.get("health") or {}, unit["kind"] != "gpu"
        if part and health == of_gpus.get(unit["place"].partition(":")[0]):
            continue  # its GPU's line says it
        signs = [] if part else health.get("signs") or []
        if not (health.get("changes") or signs):
            continue
        name = f"{'MIG device' if part else 'GPU'} {unit['place']}"
        if not health.get("changes") and health["state"] == HealthState.HEALTHY:  # or no daemon judges health
            yield f"{name} shows {', '.join(signs)}"
            continue
        line = f"{name} is {health['state']}"
        if since := health["since_s"]:
            verb = "recovered from" if health["state"] == HealthState.HEALTHY else "because of"
            line += f" since {at(since)}, {verb}: {health['why']}; its state changed {health['changes']} times"
        yield line + (f"; shows {', '.join(signs)}" if signs else "")


def transition_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """How often the node changed since the daemon started, by kind, and the last changes with their times."""
    transitions = status.get("transitions") or {}
    if not transitions.get("total"):
        return
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(transitions["counts"].items()))
    last = transitions["last"][-SHOWN:]
    rest = ", the last:" if len(last) < transitions["total"] else ":"
    yield f"{transitions['total']} changes since {at(transitions['since_s'])} ({counts}){rest}"
    yield from (f"  {at(each['at_s'])}  {each['what']}" for each in last)


def at(seconds: float) -> str:
    """A time in UTC. seconds: since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


LEGEND: Final = (
    ("X", "itself"),
    ("NV#", "that many NVLinks"),
    ("PIX", "at most one PCIe bridge"),
    ("PXB", "several PCIe bridges, no host bridge"),
    ("PHB", "a PCIe host bridge"),
    ("NODE", "the host bridges of one NUMA node"),
    ("SYS", "the link between NUMA nodes"),
    ("?", "unknown"),
)


def matrix(inventory: Inventory) -> str:
    """A line for each GPU. A pair shows its NVLinks, or without any its path over PCIe."""
    links = {(link.a, link.b): link for link in inventory.links}
    cpus = {node.number: node.cpus for node in inventory.numa}
    heads = ("", *(f"GPU{gpu.index}" for gpu in inventory.gpus), "CPU Affinity", "NUMA Affinity")
    rows = [
        (
            f"GPU{gpu.index}",
            *(_cell(gpu, other, links) for other in inventory.gpus),
            ("" if gpu.numa_node is None else cpus.get(gpu.numa_node, "")) or "N/A",
            "N/A" if gpu.numa_node is None else str(gpu.numa_node),
        )
        for gpu in inventory.gpus
    ]
    legend = [f"  {word.ljust(4)} = {meaning}" for word, meaning in LEGEND]
    return "\n".join([*table(heads, rows), "", "Legend:", *legend])


def _cell(one: Gpu, other: Gpu, links: dict[tuple[int, int], Link]) -> str:
    if one.index == other.index:
        return "X"
    link = links.get((min(one.index, other.index), max(one.index, other.index)))
    if link is None:
        return "?"
    return f"NV{link.nvlink}" if link.nvlink else link.pcie
