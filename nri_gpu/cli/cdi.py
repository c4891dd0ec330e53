"""`nri-gpu cdi generate`: the node's GPUs as a CDI specification without hooks, once or for as long as we run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nri_gpu.cdi.file import SUFFIXES, SpecFile, SpecFileError
from nri_gpu.cdi.generate import NotReadyError, SpecificationOptions, remove_old, rivalry, specification_text
from nri_gpu.cdi.specification import KIND
from nri_gpu.cdi.watch import SpecificationWatch
from nri_gpu.cli.gpus import look
from nri_gpu.daemon import logs
from nri_gpu.daemon.policy_file import load_policy
from nri_gpu.domain.errors import DriverError, Exit, InventoryError, NriGpuError, PolicyError
from nri_gpu.domain.gpu import Capabilities, Capability, closure
from nri_gpu.domain.node import Inventory

# Not the daemon's own folder: it removes what none of its grants names, and it knows of no container that others start.
DEFAULT_STAGE: Final = Path("/var/lib/nri-gpu/cdi")

LOOKS: Final = 5  # at a driver that changes under our eyes; then whatever comes next starts us again


class WishError(NriGpuError):
    """The command line asks for what there is not."""


def run(args: argparse.Namespace) -> int:
    """Print it, write it, or keep it written. Returns 69 when there is nothing to describe; a stale file is removed."""
    try:
        wish = _wish(args)
        file = _file(args)
    except PolicyError as error:
        print("\n".join(map(str, error.faults)), file=sys.stderr)
        return Exit.CONFIGURATION
    except WishError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        return Exit.USAGE
    if args.watch and file:
        logs.set_up(args.log_level)
        return asyncio.run(SpecificationWatch(wish, file).run())
    return _once(wish, file)


def _once(wish: SpecificationOptions, file: SpecFile | None) -> Exit:
    try:
        if file is None:
            print(specification_text(_look_now(wish), wish), end="")
            return Exit.OK
        inventory = _settle(wish, file)
    except (InventoryError, NotReadyError) as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        _withdraw(file)
        return Exit.CONFIGURATION if wish.topology and isinstance(error, InventoryError) else Exit.UNAVAILABLE
    except SpecFileError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        return Exit.PERMISSION
    for sentence in (*rivalry(file), *_tidied(wish, file, inventory)):
        print(f"nri-gpu: {sentence}", file=sys.stderr)
    return Exit.OK


def _look_now(wish: SpecificationOptions) -> Inventory:
    """Raises: InventoryError."""
    return asyncio.run(look(wish.topology, str(wish.driver_root), wish.library_dirs))


def _tidied(wish: SpecificationOptions, file: SpecFile, inventory: Inventory) -> Iterator[str]:
    try:
        if removed := remove_old(wish, file, inventory):
            yield f"files of old drivers are removed from {wish.stage_dir}: {', '.join(removed)}"
    except DriverError as error:
        yield str(error)


def _settle(wish: SpecificationOptions, file: SpecFile) -> Inventory:
    """Write until a look finds nothing new: systemd drops what its path unit sees while the service still runs.

    Returns the last look. Raises: InventoryError, NotReadyError, SpecFileError.
    """
    inventory = _look_now(wish)
    for _ in range(LOOKS):
        if not file.write(specification_text(inventory, wish)):
            break
        inventory = _look_now(wish)
    return inventory


def _withdraw(file: SpecFile | None) -> None:
    """A specification that is no longer true hands out wrong nodes and old files: better there is none."""
    try:
        if file and file.remove(KIND):
            print(f"nri-gpu: {file.path} is removed, because it is no longer true", file=sys.stderr)
    except SpecFileError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)


def _wish(args: argparse.Namespace) -> SpecificationOptions:
    """Raises: PolicyError, WishError."""
    overrides = {"driver.root": args.driver_root} if args.driver_root else {}
    policy = load_policy(Path(args.policy) if args.policy else None, overrides)
    return SpecificationOptions(
        driver_root=Path(policy.driver.root),
        library_dirs=policy.driver.library_dirs,
        stage_dir=Path(args.stage_dir or DEFAULT_STAGE).absolute(),
        loader=policy.driver.loader,
        capabilities=closure(_capabilities(args.capabilities) if args.capabilities else policy.defaults.capabilities),
        topology=args.gpus,
        refresh_s=policy.inventory.refresh_s,
    )


def _capabilities(text: str) -> Capabilities:
    words = {word.strip() for word in text.split(",")}
    if unknown := sorted(words - set(Capability)):
        raise WishError(f"--capabilities: {unknown[0]!r} is none of {', '.join(Capability)}")
    return frozenset(map(Capability, words))


def _file(args: argparse.Namespace) -> SpecFile | None:
    """Raises: WishError."""
    if args.output is None:
        if args.watch:
            raise WishError("--watch keeps a file up to date: say which with --output")
        return None
    path = Path(args.output).absolute()
    if path.suffix not in SUFFIXES:
        raise WishError(f"--output {args.output}: runtimes only read files that end in {' or '.join(SUFFIXES)}")
    return SpecFile(path)
