"""`nri-gpu gpus`: the node's GPUs, for people and for programs."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nri_gpu.allocation.messages import why_not
from nri_gpu.cli.client import daemon_status, snapshot_of, with_health
from nri_gpu.cli.node import read_policy
from nri_gpu.cli.render import gpus_json, gpus_text, matrix, transition_lines
from nri_gpu.domain.errors import Exit, InventoryError
from nri_gpu.domain.names import CONTROL_SOCKET, DEFAULT_STATE
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.source import NvmlSource
from nri_gpu.simulation.source import TopologySource, source_of


def run(args: argparse.Namespace) -> int:
    """Print them. Returns 1 when none can be granted, 69 when NVML cannot be asked."""
    # A simulated node has a daemon only where one is named.
    state_dir = Path(args.state_dir or DEFAULT_STATE) if args.state_dir or not args.gpus else None
    if args.watch:
        from nri_gpu.cli.gpus_watch import watch  # needs more than a single look

        _source(args)  # reports a fault of the policy now
        source, socket = partial(_source, args), state_dir / CONTROL_SOCKET if state_dir else None
        return asyncio.run(watch(source, socket, as_json=args.output == "json", simulated=bool(args.gpus)))
    try:
        inventory = asyncio.run(_look(args))
    except InventoryError as error:
        if not error.unlisted or args.record:
            raise
        inventory = Inventory(taken_at=time.time(), fault=str(error), unlisted=error.unlisted)
    if args.record:  # as NVML has it: a GPU that is unhealthy today is not so in a simulation
        return record(inventory, Path(args.record), scrub=args.scrub)
    status = daemon_status(state_dir) if state_dir else {}
    inventory = with_health(inventory, status) if status else inventory
    print(_shown(inventory, status, args))
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


def _shown(inventory: Inventory, status: Mapping[str, Any], args: argparse.Namespace) -> str:
    """status: the running daemon's; empty without one."""
    snapshot = snapshot_of(status)
    if args.output == "json":
        return json.dumps(gpus_json(inventory, snapshot) | {"transitions": status.get("transitions")}, indent=1)
    if args.topology:
        return matrix(inventory)
    return "\n".join([gpus_text(inventory, snapshot), *transition_lines(status)])


def _source(args: argparse.Namespace) -> TopologySource | NvmlSource:
    """NVML, with the driver where policy says it is, or a topology file. Raises: PolicyError."""
    if args.gpus:
        return source_of(args.gpus, "/")
    driver = read_policy(args).driver
    return source_of(None, driver.root, driver.library_dirs)


async def _look(args: argparse.Namespace) -> Inventory:
    """Raises: InventoryError, PolicyError."""
    source = _source(args)
    try:
        return await source.refresh()
    finally:
        await source.close()
