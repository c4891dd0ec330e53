"""`nri-gpu gpus`: the node's GPUs, for people and for programs.

Health is a running daemon's to know, so it is asked, too.
"""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path
from typing import Final

from nri_gpu.cli.ask_daemon import daemon_status, with_health
from nri_gpu.cli.gpus_document import gpus_document
from nri_gpu.cli.page import Tone
from nri_gpu.cli.render import answer, gpus_page, lines, transition_lines
from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.errors import CommandError, Exit, InventoryError
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.nvml_source import NvmlSource
from nri_gpu.inventory.topology_source import TopologySource, ask_once, source_of
from nri_gpu.records.policy_file import load_policy
from nri_gpu.system.clocks import since_boot_s

LINK: Final = "it is a link; name the file that it points to, or print with `--record -`"


def run(args: argparse.Namespace) -> int:
    """Print the GPUs. Return 1 if none can be granted, 69 if NVML cannot be asked."""
    # A simulated node has a daemon only where one is named.
    state_dir = Path(args.state_dir or DEFAULT_STATE) if args.state_dir or not args.gpus else None
    try:
        inventory = ask_once(_source(args))
    except InventoryError as error:
        if not error.unlisted or args.record:
            raise
        inventory = Inventory(taken_at=since_boot_s(), fault=str(error), unlisted=error.unlisted)
    if args.record:  # as NVML has it: a GPU that is unhealthy today is not so in a simulation
        return _record(inventory, args.record)
    status = daemon_status(state_dir) if state_dir else None
    inventory = with_health(inventory, status) if status else inventory
    page = [*gpus_page(inventory, status), *lines(transition_lines(status.transitions if status else None), Tone.FAINT)]
    answer(args, gpus_document(inventory, status), page)
    if inventory.fault:
        return Exit.UNAVAILABLE
    return Exit.OK if any(not why_not(unit) for unit in inventory.units) else Exit.FINDING


def _source(args: argparse.Namespace) -> TopologySource | NvmlSource:
    """Return NVML, with the driver where policy says it is, or a topology file. Raises: PolicyError."""
    if args.gpus:
        return source_of(args.gpus, "/")
    driver = load_policy(args.policy, {"driver.root": args.driver_root}).driver
    return source_of(None, driver.root, driver.library_dirs)


def _record(inventory: Inventory, path: str) -> int:
    """Write a topology file that `--gpus` simulates, or print it for the path `-`."""
    from nri_gpu.inventory.record import topology_text

    text = topology_text(inventory, "Recorded by `nri-gpu gpus --record`.")
    if path == "-":
        print(text, end="")
        return Exit.OK
    try:
        with open(path, "w", encoding="utf-8", opener=_no_link) as file:
            file.write(text)
    except OSError as error:
        why = LINK if error.errno == errno.ELOOP else error.strerror
        raise CommandError(Exit.of(error), f"{path} cannot be written: {why}") from None
    print(f"{path}: {len(inventory.gpus)} GPUs; try it with `nri-gpu gpus --gpus {path}`")
    return Exit.OK


def _no_link(path: str, flags: int) -> int:
    """Open only a file, never a link: in a folder that others can write, a link may lead to a file of root's."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
