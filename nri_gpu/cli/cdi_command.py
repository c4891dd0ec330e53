"""`nri-gpu cdi generate`: the node's GPUs as a CDI specification without hooks."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nri_gpu.cdi.generate import NotReadyError, SpecificationOptions, remove_old, specification_text
from nri_gpu.cdi.spec_file import (
    MASK,
    STANDARD,
    SUFFIXES,
    OverlapError,
    SpecFile,
    SpecFileError,
    names_in,
    names_of,
    overlaps,
)
from nri_gpu.cli.ask_daemon import daemon_status, with_cordons
from nri_gpu.domain.errors import CommandError, DriverError, Exit, InventoryError
from nri_gpu.domain.gpu import Capabilities, Capability, closure
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.domain.node import Inventory, Loader
from nri_gpu.domain.text import counted
from nri_gpu.inventory.topology_source import ask_once, source_of
from nri_gpu.records.policy_file import load_policy
from nri_gpu.system.cpu import why_no_hwcaps

# Not the daemon's folder: it removes what none of its grants uses, and does not know containers that others start.
DEFAULT_STAGE: Final = Path("/var/lib/nri-gpu/cdi")

ENDS: Final = frozenset({signal.SIGINT, signal.SIGTERM})
LOOKS: Final = 5  # at a driver that is changing; after that, the next event starts us again


def run(args: argparse.Namespace) -> int:
    """Print the specification or write it. Return 69 if there is nothing to describe; a stale file is removed.

    Return 1 if a file beside it has names of it: it is not written, since runtimes would resolve them no more.
    """
    file = _file(args)
    code = _once(_options(args), file)
    if file and "--watch" in args.dropped:  # a service that ended now would be started again without an end
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, *ENDS})
        signal.sigwait(ENDS)
        return Exit.OK
    return code


def _once(options: SpecificationOptions, file: SpecFile | None) -> Exit:
    try:
        if file is None:
            inventory = _look_now(options)
            print(specification_text(inventory, options), end="")
            _say(*_simulated(options), *_without_drm(options, inventory))
            return Exit.OK
        inventory, written = _settle(options, file)
    except (InventoryError, NotReadyError) as error:
        faults = error.faults if isinstance(error, InventoryError) else ()
        _say(*map(str, faults or (error,)))
        _withdraw(file, "because it is out of date")
        return Exit.of_faults(faults) if faults else Exit.UNAVAILABLE
    except OverlapError as error:
        _say(str(error))
        _withdraw(file, "so that what the other file names works")
        return Exit.FINDING
    except SpecFileError as error:
        _say(str(error))
        return Exit.PERMISSION if error.denied else Exit.CONFIGURATION
    _say(
        f"{file.path} {'is written' if written else 'is up to date'}: {counted(len(inventory.gpus), 'GPU')}",
        *_simulated(options),
        *_overlapping(options, file),
        *_removed_old(options, file, inventory),
        *_without_drm(options, inventory),
    )
    return Exit.OK


def _say(*sentences: str) -> None:
    for sentence in sentences:
        print(f"nri-gpu: {sentence}", file=sys.stderr)


def _simulated(options: SpecificationOptions) -> Iterator[str]:
    if options.topology:
        yield f"SIMULATED: the GPUs are those of {options.topology}"


def _overlapping(options: SpecificationOptions, file: SpecFile) -> Iterator[str]:
    for each in overlaps(file.path, names_of(file.path), options.standard):
        yield str(each) if each.counts == file.path else f"warning: {each}"


def _without_drm(options: SpecificationOptions, inventory: Inventory) -> Iterator[str]:
    """Yield what a specification with graphics lacks while nvidia-drm is not loaded."""
    if Capability.GRAPHICS in options.capabilities and not any(gpu.drm for gpu in inventory.gpus):
        yield (
            "graphics lacks the nodes in /dev/dri, since module nvidia-drm is not loaded: `modprobe nvidia-drm`, "
            "after which nri-gpu-cdi.path generates it again"
        )


def _look_now(options: SpecificationOptions) -> Inventory:
    """Return the node's inventory now, with the GPUs that root took out of use. Raises: InventoryError."""
    stage_dir = str(options.stage_dir)
    source = source_of(options.topology, options.driver_root, options.library_dirs, stage_dir=stage_dir)
    inventory = ask_once(source)
    return inventory if options.topology else with_cordons(inventory, daemon_status(DEFAULT_STATE), options.usage)


def _removed_old(options: SpecificationOptions, file: SpecFile, inventory: Inventory) -> Iterator[str]:
    try:
        if removed := remove_old(options, file, inventory):
            yield f"removed files of old drivers from {options.stage_dir}: {', '.join(removed)}"
    except DriverError as error:
        yield str(error)


def _settle(options: SpecificationOptions, file: SpecFile) -> tuple[Inventory, bool]:
    """Write until nothing changes any more: a systemd path unit misses events while its service runs.

    Return the last look, and whether the file was written.

    Raises: InventoryError, NotReadyError, OverlapError, SpecFileError.
    """
    inventory, written = _look_now(options), False
    for _ in range(LOOKS):
        text = specification_text(inventory, options)
        _check_alone(file.path, text, options)
        if not file.write(text):
            break
        inventory, written = _look_now(options), True
    return inventory, written


def _check_alone(path: Path, text: str, options: SpecificationOptions) -> None:
    """Refuse a file beside which another has names of it: neither would serve them. Raises: OverlapError."""
    for each in overlaps(path, names_in(text), options.standard):
        if each.files[0] == path and each.counts is None:
            raise OverlapError(
                f"{each}. So {path} is not written: to use it, remove {each.files[1]}, and if NVIDIA's "
                f"nvidia-cdi-refresh keeps that, first run `{MASK}`"
            )


def _withdraw(file: SpecFile | None, why: str) -> None:
    """Remove a specification that would do harm. why: a clause."""
    try:
        if file and file.remove():
            _say(f"removed {file.path}, {why}")
    except SpecFileError as error:
        _say(str(error))


def _options(args: argparse.Namespace) -> SpecificationOptions:
    """Return the options of a specification. Raises: PolicyError, CommandError."""
    policy = load_policy(args.policy, {"driver.root": args.driver_root}, all_options=False)
    loader = policy.driver.loader
    if loader in (Loader.FOLDERS, Loader.HWCAPS) and why_no_hwcaps():
        loader = Loader.FILES  # the variable that leads to the tree elsewhere cannot be added to by CDI
    return SpecificationOptions(
        driver_root=Path(policy.driver.root),
        library_dirs=policy.driver.library_dirs,
        stage_dir=Path(args.stage_dir or DEFAULT_STAGE).absolute(),
        loader=loader,
        capabilities=closure(_capabilities(args.capabilities) if args.capabilities else policy.defaults.capabilities),
        topology=args.gpus,
        usage=policy.usage,
        standard=STANDARD,
    )


def _capabilities(text: str) -> Capabilities:
    words = {word.strip() for word in text.split(",")}
    if unknown := sorted(words - set(Capability)):
        raise CommandError(Exit.USAGE, f"--capabilities: {unknown[0]!r} is not one of {', '.join(Capability)}")
    return frozenset(map(Capability, words))


def _file(args: argparse.Namespace) -> SpecFile | None:
    """Return the file to write, or None to print. Raises: CommandError."""
    if args.output in (None, "-"):
        return None
    path = Path(args.output).absolute()
    if path.suffix not in SUFFIXES:
        raise CommandError(
            Exit.USAGE, f"--output {args.output}: runtimes only read files that end in {' or '.join(SUFFIXES)}"
        )
    return SpecFile(path)
