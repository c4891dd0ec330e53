"""What several verbs read: the policy file and this node's GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nri_gpu.daemon.policy_file import load_policy
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.model import Policy
from nri_gpu.simulation.source import source_of


def read_policy(args: argparse.Namespace) -> Policy:
    """The policy of `--policy`, with `--driver-root` where the verb has that. Raises: PolicyError."""
    driver_root = getattr(args, "driver_root", None)
    return load_policy(Path(args.policy) if args.policy else None, {"driver.root": driver_root} if driver_root else {})


async def look(topology: str | None, driver_root: str, library_dirs: Sequence[str] = ()) -> Inventory:
    """Ask NVML once, or read a topology file. Raises: InventoryError."""
    source = source_of(topology, driver_root or "/", library_dirs)
    try:
        return await source.refresh()
    finally:
        await source.close()
