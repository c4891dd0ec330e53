"""`nri-gpu cdi generate`: the node's GPUs as a CDI specification without hooks, once or for as long as we run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu import telemetry
from nri_gpu.allocation.place import why_not
from nri_gpu.cdi_file import STANDARD, SUFFIXES, SpecFile, SpecFileError
from nri_gpu.domain.errors import DriverError, InventoryError, NriGpuError, PolicyError
from nri_gpu.domain.gpu import Capabilities, Capability, DriverTree, Inventory
from nri_gpu.driver.scan import scan
from nri_gpu.driver.stage import stage
from nri_gpu.injection.cdi import KIND, specification
from nri_gpu.injection.devices import missing_modules
from nri_gpu.inventory.cache import InventoryCache
from nri_gpu.inventory.source import NvmlSource, Source, TopologySource
from nri_gpu.settings import load_policy
from nri_gpu.verbs.exits import Exit
from nri_gpu.verbs.gpus import look

# Not the daemon's own folder: it removes what none of its grants names, and it knows of no container that others start.
DEFAULT_STAGE: Final = Path("/var/lib/nri-gpu/cdi")


class NotReadyError(NriGpuError):
    """Nothing true can be written about this node. Says why."""


class WishError(NriGpuError):
    """The command line asks for what there is not."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for. topology: the file of a simulated node. refresh_s: between two looks of `--watch`."""

    driver_root: Path
    stage_dir: Path
    capabilities: Capabilities
    topology: str | None
    refresh_s: float


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
        telemetry.set_up(args.log_level)
        return asyncio.run(Watch(wish, file).run())
    return _once(wish, file)


def specification_text(inventory: Inventory, wish: Wish) -> str:
    """The specification as a file holds it; the driver's files are staged then. Raises: NotReadyError."""
    if inventory.fault:
        raise NotReadyError(inventory.fault)
    if reason := missing_modules(wish.capabilities, inventory):
        raise NotReadyError(reason.sentence)
    gpus = tuple(gpu for gpu in inventory.gpus if not why_not(gpu))
    if not gpus:
        why = "; ".join(f"GPU {gpu.index}: {why_not(gpu)}" for gpu in inventory.gpus) or "there is none"
        raise NotReadyError(f"this node has no GPU to give ({why})")
    tree = _staged(inventory, wish)
    document = specification(gpus, capabilities=wish.capabilities, inventory=inventory, tree=tree)
    return json.dumps(document, indent=1) + "\n"


def _staged(inventory: Inventory, wish: Wish) -> DriverTree | None:
    try:
        found = scan(wish.driver_root)
        if inventory.driver_version not in ("", found.version) and not inventory.simulated:
            raise NotReadyError(
                f"the driver's libraries on this node are {found.version} but its loaded kernel module is "
                f"{inventory.driver_version}: reload the module or reboot the node"
            )
        return stage(found, wish.stage_dir).trees[wish.capabilities]
    except DriverError as error:
        if inventory.simulated:
            return None
        raise NotReadyError(str(error)) from error


def _once(wish: Wish, file: SpecFile | None) -> Exit:
    try:
        inventory = asyncio.run(look(wish.topology, str(wish.driver_root)))
        text = specification_text(inventory, wish)
    except (InventoryError, NotReadyError) as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        _withdraw(file)
        return Exit.CONFIGURATION if wish.topology and isinstance(error, InventoryError) else Exit.UNAVAILABLE
    if file is None:
        print(text, end="")
        return Exit.OK
    try:
        file.write(text)
    except SpecFileError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        return Exit.PERMISSION
    for sentence in _rivalry(file):
        print(f"nri-gpu: {sentence}", file=sys.stderr)
    return Exit.OK


def _withdraw(file: SpecFile | None) -> None:
    """A specification that is no longer true hands out wrong nodes and old files: better there is none."""
    try:
        if file and file.remove(KIND):
            print(f"nri-gpu: {file.path} is removed, because it is no longer true", file=sys.stderr)
    except SpecFileError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)


def _rivalry(file: SpecFile) -> Iterator[str]:
    for rival in file.rivals(KIND, STANDARD):
        what = f"{rival.path} describes {KIND} too" + (", with hooks" if rival.hooks else "")
        if rival.path.parent == file.path.parent.resolve():
            yield f"{what}: runtimes refuse a device that two files of one folder name; remove one of them"
        else:
            yield f"{what}: where both name a device, the file in the later folder of the runtime's list wins"


def _wish(args: argparse.Namespace) -> Wish:
    """Raises: PolicyError, WishError."""
    overrides = {"driver.root": args.driver_root} if args.driver_root else {}
    policy = load_policy(Path(args.policy) if args.policy else None, overrides)
    return Wish(
        driver_root=Path(policy.driver.root),
        stage_dir=Path(args.stage_dir or DEFAULT_STAGE).absolute(),
        capabilities=_capabilities(args.capabilities) if args.capabilities else policy.defaults.capabilities,
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


class Watch:
    """Keeps the file true until told to stop; then it stays, for containers go on being started."""

    def __init__(self, wish: Wish, file: SpecFile, source: Source | None = None) -> None:
        self._wish = wish
        self._file = file
        self._source = source or (TopologySource(wish.topology) if wish.topology else NvmlSource(wish.driver_root))
        self._cache = InventoryCache(
            self._source, publish=lambda _: self._again.set(), on_fault=self._fault, refresh_s=wish.refresh_s
        )
        self._again = asyncio.Event()
        self._stop = asyncio.Event()
        self._said = ""

    async def run(self) -> Exit:
        """Returns after SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._look_again)
        parts = [asyncio.create_task(each) for each in (self._cache.run(), self._keep_true())]
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({*parts, stopping}, return_when=asyncio.FIRST_COMPLETED)
        died = [part for part in parts if part.done() and part.exception()]
        for part in died:
            logger.opt(exception=part.exception()).critical("bug: a part of nri-gpu died, so all of it ends")
        for task in (*parts, stopping):
            task.cancel()
        await asyncio.gather(*parts, stopping, return_exceptions=True)
        return Exit.BUG if died else Exit.OK

    def stop(self) -> None:
        """Let `run` return."""
        self._stop.set()

    async def _keep_true(self) -> None:
        await self._cache.ready()
        while True:
            self._again.clear()
            # Off the loop: it reads the disk, and staging may copy.
            await asyncio.to_thread(self._update)
            # Nothing tells of a driver's files, so they are looked at each time: a few milliseconds.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wish.refresh_s):
                    await self._again.wait()

    def _update(self) -> None:
        inventory = self._cache.current
        assert inventory, "the cache is ready"
        bound = logger.bind(path=str(self._file.path), driver_version=inventory.driver_version)
        try:
            if self._file.write(specification_text(inventory, self._wish)):
                bound.bind(gpus=len(inventory.gpus)).info("CDI specification written")
                for sentence in _rivalry(self._file):
                    bound.bind(fault=sentence).warning("another CDI specification is in the way")
            self._said = ""
        except NotReadyError as error:
            self._report("the node has no CDI specification now", str(error))
            with contextlib.suppress(SpecFileError):  # where it cannot be written either, that has been said
                self._file.remove(KIND)
        except SpecFileError as error:
            self._report("CDI specification not written", str(error))

    def _report(self, what: str, sentence: str) -> None:
        if sentence != self._said:
            logger.bind(path=str(self._file.path), fault=sentence).warning(what)
        self._said = sentence

    def _fault(self, sentence: str) -> None:
        logger.bind(fault=sentence).warning("inventory not refreshed")

    def _look_again(self) -> None:
        self._cache.poke()
        self._again.set()
