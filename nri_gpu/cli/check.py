"""`nri-gpu check`: a policy file's faults, all at once, and advice on what is legal but unwise, or on the node."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nri_gpu.cli.client import ask
from nri_gpu.cli.gpus import look
from nri_gpu.cli.status import fail_closed
from nri_gpu.daemon.policy_file import DEFAULT_PATH, file_advice, load_policy
from nri_gpu.domain.errors import Exit, InventoryError, PolicyError
from nri_gpu.domain.names import CONTROL_SOCKET, DEFAULT_STATE
from nri_gpu.driver.owner import owner_of
from nri_gpu.host.others import node_advice
from nri_gpu.kubelet.advice import kubelet_advice
from nri_gpu.mps.folders import clients, mount_fault
from nri_gpu.plugin.guard import guard_advice
from nri_gpu.policy.advice import advise
from nri_gpu.policy.advice_rules import advise_for
from nri_gpu.policy.model import Policy


def run(args: argparse.Namespace) -> int:
    """Print faults and advice. Returns 78 for faults."""
    path = Path(args.file) if args.file else None
    state_dir = Path(args.state_dir or DEFAULT_STATE)
    said = _asked(state_dir)
    options = dict(said.get("options", {}))  # of its command line: they go before the file
    topology = options.pop("topology", None)
    try:
        policy = load_policy(path, options)
    except PolicyError as error:
        faults: list[dict[str, object]] = [
            {"file": f.file, "line": f.line, "key": f.key, "message": f.message} for f in error.faults
        ]
        lines = [f"{error.faults[0].file}: {len(faults)} fault{'s' * (len(faults) > 1)}", *map(str, error.faults)]
        _print(args.output, faults, (), lines, options)
        return Exit.CONFIGURATION
    try:
        gpus = _of_gpus(policy, args.gpus or topology)
    except InventoryError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        return Exit.CONFIGURATION
    ours = (*file_advice(path or DEFAULT_PATH), *advise(policy), *gpus)
    node = (
        *node_advice(policy),
        *kubelet_advice(policy),
        *guard_advice(policy, state_dir),
        *mps_advice(policy, state_dir),
    )
    advice = (*ours, *_of_stage(policy, state_dir), *node, *_of_daemon(said))
    with_ = [f"with the running daemon's options: {_shown(options)}"] if options else []
    closed = [f"kubelet: {fail_closed(said)}"] if said.get("kubelet", {}).get("enabled") else []
    lines = [f"{policy.source}: ok", *with_, *closed, *(f"advice: {sentence}" for sentence in advice)]
    _print(args.output, [], advice, lines, options)
    return Exit.OK


def _asked(state_dir: Path) -> Mapping[str, Any]:
    """What a daemon that runs says of itself; nothing where none runs here, or it is not ours to ask."""
    try:
        return ask(state_dir / CONTROL_SOCKET, "status")
    except (OSError, ValueError):
        return {}


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in sorted(options.items()))


def _of_gpus(policy: Policy, topology: str | None) -> tuple[str, ...]:
    """What a policy means for the GPUs of this node, or of a topology file. Raises: InventoryError, of that file."""
    if not topology and not policy.pool.pools:
        return ()  # without pools it does not matter enough to wake the driver
    try:
        inventory = asyncio.run(look(topology, policy.driver.root, policy.driver.library_dirs))
    except InventoryError as error:
        if topology:
            raise
        return (f"the pools could not be held against this node's GPUs: {error}; --gpus FILE takes a topology file",)
    return advise_for(policy, inventory)


def _of_daemon(said: Mapping[str, Any]) -> tuple[str, ...]:
    """What keeps a daemon that runs from serving, or would once it has to connect again."""
    if not (runtime := said.get("runtime")):
        return ()
    away = "" if runtime["ready"] else f"nri-gpu is not connected to the runtime: {runtime['fault'] or 'connecting'}"
    return tuple(filter(None, (away, runtime.get("list_fault"))))


def mps_advice(policy: Policy, state_dir: Path = DEFAULT_STATE) -> tuple[str, ...]:
    """Why mode=mps is refused although policy has it, on a node that nri-gpu has served since it booted."""
    seen = os.access(state_dir, os.X_OK)  # to others than root it is closed
    fault = mount_fault(clients(state_dir)) if policy.mps.enabled and seen else ""
    return (f"every container that asks with mode=mps is refused: {fault}",) if fault else ()


def _of_stage(policy: Policy, state_dir: Path) -> Iterator[str]:
    owner = owner_of(Path(policy.driver.stage_dir))
    if owner not in ("", str(state_dir.resolve())):
        yield (
            f"driver.stage_dir {policy.driver.stage_dir} is that of the nri-gpu with state folder {owner}: one with "
            f"{state_dir} refuses every container that asks, so give it a folder of its own"
        )


def _print(
    output: str | None,
    faults: list[dict[str, object]],
    advice: tuple[str, ...],
    lines: list[str],
    options: Mapping[str, Any],
) -> None:
    if output == "json":
        said = {"schema": "nri-gpu/check/v1", "faults": faults, "advice": list(advice), "options": options}
        print(json.dumps(said, indent=1))
    else:
        print("\n".join(lines))
