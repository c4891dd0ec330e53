"""`nri-gpu gpus`: the node's GPUs, for people and for programs."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from nri_gpu.allocation.place import why_not
from nri_gpu.domain.errors import InventoryError, PolicyError
from nri_gpu.domain.extras import Extra, Offer
from nri_gpu.domain.gpu import ComputeMode, Fabric, Gpu, Inventory, MigPart, Unit
from nri_gpu.inventory.source import NvmlSource, Source, TopologySource, source_of
from nri_gpu.runtime.report import health_json, unlisted_json
from nri_gpu.runtime.state import CONTROL_SOCKET, DEFAULT_STATE
from nri_gpu.settings import load_policy
from nri_gpu.verbs.exits import Exit
from nri_gpu.verbs.health_words import asked, gpu_lines, state_of, told, transition_lines
from nri_gpu.verbs.snapshot_words import Snapshot, snapshot_of

_FOR_ONE: Final = (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.EXCLUSIVE_THREAD)


def run(args: argparse.Namespace) -> int:
    """Print them. Returns 1 when there is none that can be granted, 69 when nobody could be asked."""
    # A simulated node is that of a daemon only where one is named.
    state_dir = Path(args.state_dir or DEFAULT_STATE) if args.state_dir or not args.gpus else None
    try:
        if args.watch:
            from nri_gpu.verbs.gpus_watch import watch  # asks for more than a look needs

            _source(args)  # a fault of the policy is told now
            source, socket = partial(_source, args), state_dir / CONTROL_SOCKET if state_dir else None
            return asyncio.run(watch(source, socket, as_json=args.output == "json", simulated=bool(args.gpus)))
        inventory = asyncio.run(_look(args))
    except PolicyError as error:
        print("\n".join(map(str, error.faults)), file=sys.stderr)
        return Exit.CONFIGURATION
    except InventoryError as error:
        if not error.unlisted or args.record:
            print(f"nri-gpu: {error}", file=sys.stderr)
            return Exit.CONFIGURATION if args.gpus else Exit.UNAVAILABLE
        inventory = Inventory(taken_at=time.time(), fault=str(error), unlisted=error.unlisted)
    if args.record:  # the node, and not what has befallen it: a GPU that is bad today is not so in a simulation
        return record(inventory, Path(args.record), scrub=args.scrub)
    said = (asked(state_dir) if state_dir else None) or {}
    inventory = told(inventory, said) if said else inventory
    print(_shown(inventory, said, args))
    if inventory.fault:
        return Exit.UNAVAILABLE
    return Exit.OK if any(not why_not(unit) for unit in inventory.units) else Exit.FINDING


def record(inventory: Inventory, path: Path, *, scrub: bool) -> int:
    """Write a topology file that `--gpus` simulates."""
    from nri_gpu.inventory.record import scrubbed, topology_text

    comment = "Recorded by `nri-gpu gpus --record`" + (", UUIDs made up (--scrub)." if scrub else ".")
    text = topology_text(scrubbed(inventory) if scrub else inventory, comment)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"nri-gpu: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return Exit.PERMISSION if isinstance(error, PermissionError) else Exit.UNAVAILABLE
    print(f"{path}: {len(inventory.gpus)} GPUs; try it with `nri-gpu gpus --gpus {path}`")
    return Exit.OK


def _shown(inventory: Inventory, said: Mapping[str, Any], args: argparse.Namespace) -> str:
    """said: what a running daemon says; empty without one."""
    snapshot = snapshot_of(said or None)
    if args.output == "json":
        return json.dumps(to_json(inventory, snapshot) | {"transitions": said.get("transitions")}, indent=1)
    if args.topology:
        from nri_gpu.verbs.gpus_topology import matrix

        return matrix(inventory)
    return "\n".join([to_text(inventory, snapshot), *transition_lines(said)])


def _source(args: argparse.Namespace) -> TopologySource | NvmlSource:
    """Where policy says that the driver is; a simulated node has none. Raises: PolicyError."""
    if args.gpus:
        return source_of(args.gpus, "/")
    overrides = {"driver.root": args.driver_root} if args.driver_root else {}
    driver = load_policy(Path(args.policy) if args.policy else None, overrides).driver
    return source_of(None, driver.root or "/", driver.library_dirs)


async def _look(args: argparse.Namespace) -> Inventory:
    """Raises: InventoryError, PolicyError."""
    return await _ask(_source(args))


async def look(topology: str | None, driver_root: str | None, library_dirs: Sequence[str] = ()) -> Inventory:
    """One look at the node. Raises: InventoryError."""
    return await _ask(source_of(topology, driver_root or "/", library_dirs))


async def _ask(source: Source) -> Inventory:
    """Raises: InventoryError."""
    try:
        return await source.refresh()
    finally:
        await source.close()


def to_json(inventory: Inventory, snapshot: Snapshot | None = None) -> dict[str, Any]:
    """Schema `nri-gpu/gpus/v1`. snapshot: of the daemon that was asked beside."""
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


def _offer_json(offer: Offer) -> dict[str, Any]:
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


def to_text(inventory: Inventory, snapshot: Snapshot | None = None) -> str:
    """A table, and what is wrong below it."""
    origin = "simulated" if inventory.simulated else "NVML"
    versions = f"driver {inventory.driver_version or '?'}, CUDA {inventory.cuda_version or '?'}, from {origin}"
    lines = [f"{len(inventory.gpus)} GPUs, {versions}" + (f"; {snapshot.words}" if snapshot else "")]
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
    """GPUs that the kernel alone knows of. fault: what holds for all, said elsewhere."""
    return [
        f"GPU {gpu['pci_bus_id']}{gpu['model'] and ' ' + gpu['model']}{gpu['uuid'] and ' ' + gpu['uuid']} "
        + ("is there by the kernel's word" if gpu["reason"] == fault else f"cannot be granted: {gpu['reason']}")
        for gpu in gpus
    ]


def _offer_lines(offers: Mapping[Extra, Offer]) -> Iterator[str]:
    """Extras of the host; drm and profile are made of the GPUs themselves."""
    here = [extra for extra, offer in offers.items() if not offer.lacking]
    lacking = [extra for extra, offer in offers.items() if offer.lacking]
    if here:
        yield f"extras: {', '.join(here)}"
    if lacking:
        yield f"extras not here: {', '.join(lacking)} (`-o json` says why)"


def _row(unit: Unit) -> tuple[str, ...]:
    return _part_row(unit) if isinstance(unit, MigPart) else _gpu_row(unit)


def _part_row(part: MigPart) -> tuple[str, ...]:
    """Below its GPU and indented. Its node is the compute instance's capability."""
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
    """With a compute mode that lets one process in: beside an MPS daemon's, containers could not share it."""
    mode = gpu.compute_mode if gpu.compute_mode in _FOR_ONE and not why_not(gpu) else None
    return ", ".join([state_of(gpu), *([mode.value] if mode else [])])


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    lines = [tuple(heads), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    padded = ((cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return ["  ".join(line).rstrip() for line in padded]
