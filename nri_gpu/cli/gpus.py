"""`nri-gpu gpus`: the node's GPUs, for people and for programs."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nri_gpu.allocation.placement import why_not
from nri_gpu.cli.render import (
    asked,
    gpus_json,
    gpus_text,
    matrix,
    snapshot_of,
    told,
    transition_lines,
)
from nri_gpu.daemon.policy_file import load_policy
from nri_gpu.domain.errors import Exit, InventoryError, PolicyError
from nri_gpu.domain.names import CONTROL_SOCKET, DEFAULT_STATE
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.source import NvmlSource, Source
from nri_gpu.simulation.source import TopologySource, source_of


def run(args: argparse.Namespace) -> int:
    """Print them. Returns 1 when there is none that can be granted, 69 when nobody could be asked."""
    # A simulated node is that of a daemon only where one is named.
    state_dir = Path(args.state_dir or DEFAULT_STATE) if args.state_dir or not args.gpus else None
    try:
        if args.watch:
            from nri_gpu.cli.gpus_watch import watch  # asks for more than a look needs

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
    from nri_gpu.simulation.record import scrubbed, topology_text

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
        return json.dumps(gpus_json(inventory, snapshot) | {"transitions": said.get("transitions")}, indent=1)
    if args.topology:
        return matrix(inventory)
    return "\n".join([gpus_text(inventory, snapshot), *transition_lines(said)])


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
