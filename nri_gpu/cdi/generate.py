"""`cdi generate`: makes the CDI specification of this node, keeps it up to date, and removes files of old drivers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct

from nri_gpu.allocation.messages import why_not
from nri_gpu.cdi.file import STANDARD, SpecFile, SpecFileError, spec_files
from nri_gpu.cdi.specification import specification
from nri_gpu.decision.eligibility import lacking_library
from nri_gpu.domain.errors import DriverError, Exit, NriGpuError
from nri_gpu.domain.gpu import Capabilities, Gpu
from nri_gpu.domain.node import DriverTree, Inventory, Loader, Node
from nri_gpu.driver.owner import owner_of
from nri_gpu.driver.scan import scan
from nri_gpu.driver.stage import GENERATION, prune, stage
from nri_gpu.injection.devices import missing_capability_major, missing_modules, two_versions
from nri_gpu.inventory.controller import InventoryCache
from nri_gpu.simulation.source import source_of
from nri_gpu.system.storage import boot_id, text_of, write_whole
from nri_gpu.system.tasks import LogOnce, cancelled, exit_code

LOCK_WAIT_S: Final = 60.0  # another process may be staging files
BOOT_FILE: Final = ".boot"  # in a generation: the id of the boot in which a specification last named it


class NotReadyError(NriGpuError):
    """There is nothing to describe on this node. Says why."""


class SpecificationOptions(Struct, frozen=True):
    """What to describe. capabilities: closed. topology: the file of a simulated node. refresh_s: for `--watch`.

    standard: where runtimes look for specifications.
    """

    driver_root: Path
    library_dirs: tuple[str, ...]
    stage_dir: Path
    loader: Loader
    capabilities: Capabilities
    topology: str | None
    refresh_s: float
    standard: tuple[Path, ...] = STANDARD


def specification_text(inventory: Inventory, options: SpecificationOptions) -> str:
    """The text of the specification, after staging the driver's files. Raises: NotReadyError."""
    if inventory.fault:
        raise NotReadyError(inventory.fault)
    if reason := missing_modules(options.capabilities, inventory):
        raise NotReadyError(reason.sentence)
    gpus = tuple(unit for unit in inventory.units if not why_not(unit))
    if reason := missing_capability_major(gpus, inventory.majors):
        gpus = tuple(unit for unit in gpus if isinstance(unit, Gpu))
        if not gpus:
            raise NotReadyError(reason.sentence)
    if not gpus:
        why = "; ".join(f"GPU {gpu.index}: {why_not(gpu)}" for gpu in inventory.gpus) or "there is none"
        raise NotReadyError(f"this node has no available GPU ({why})")
    tree = _staged(inventory, options)
    document = specification(
        gpus, capabilities=options.capabilities, inventory=inventory, tree=tree, loader=options.loader
    )
    return json.dumps(document, indent=1) + "\n"


def _staged(inventory: Inventory, options: SpecificationOptions) -> DriverTree | None:
    try:
        found = scan(options.driver_root, library_dirs=options.library_dirs, module=inventory.driver_version)
        if inventory.driver_version not in ("", found.version) and not inventory.simulated:
            raise NotReadyError(two_versions(found.version, inventory.driver_version))
        if owner := owner_of(options.stage_dir):
            raise NotReadyError(
                f"stage folder {options.stage_dir} belongs to `nri-gpu run` with state folder {owner}, which removes "
                "files that none of its grants uses: give another --stage-dir"
            )
        files = stage(found, options.stage_dir, wait_s=LOCK_WAIT_S)
        _use(options.stage_dir / files.generation)
    except (DriverError, OSError) as error:
        if inventory.simulated:
            return None
        raise NotReadyError(str(error)) from error
    if reason := lacking_library(options.capabilities, Node(number=1, inventory=inventory, driver=files)):
        raise NotReadyError(reason.sentence)
    tree = files.trees.get(options.capabilities)
    if tree is None and not inventory.simulated:
        raise NotReadyError(f"the driver on this node lacks files for {', '.join(sorted(options.capabilities))}")
    return tree


def remove_old(options: SpecificationOptions, file: SpecFile, inventory: Inventory) -> tuple[str, ...]:
    """Remove files of old drivers, after `file` was written. Returns their generations; none on a simulated node.

    What was in use in this boot stays: a container may have it.

    Raises: DriverError: a folder cannot be removed, or a specification that may name one cannot be read.
    """
    version = inventory.driver_version
    if inventory.simulated or not version or not options.stage_dir.is_dir():
        return ()
    base = options.stage_dir.resolve()
    try:
        named = frozenset(_named(base, {folder.resolve() for folder in (file.path.parent, *options.standard)}))
        return prune(base, lambda folder: _is_old(folder, version) and folder.name not in named)
    except OSError as error:
        raise DriverError(f"old driver files stay in {base}: {error}") from error


def _is_old(folder: Path, version: str) -> bool:
    """Return whether it is of another driver and was not used in this boot. One that names no boot joins this one."""
    if folder.name.partition("-")[0] == version:
        return False
    if (boot := text_of(folder / BOOT_FILE)) is None:
        _use(folder)
    return boot not in (None, boot_id())


def _use(generation: Path) -> None:
    """Keep a generation until the next boot. Raises: OSError."""
    if text_of(generation / BOOT_FILE) != (boot := boot_id()):
        write_whole(generation / BOOT_FILE, boot.encode())


def _named(base: Path, folders: Iterable[Path]) -> Iterable[str]:
    generation = re.compile(rf"{re.escape(str(base))}/({GENERATION.pattern})")
    paths = (path for folder in folders for path in spec_files(folder))
    return (found for path in paths for found in generation.findall(path.read_text(errors="replace")))


class SpecificationWatch:
    """`--watch`: updates the file when GPUs or driver change. It stays when we stop, for containers started later."""

    def __init__(self, options: SpecificationOptions, file: SpecFile) -> None:
        self._options = options
        self._file = file
        self._again = asyncio.Event()
        self._stop = asyncio.Event()
        self._log = LogOnce()
        self._silence = LogOnce()
        self._cache = InventoryCache(
            source_of(options.topology, options.driver_root, options.library_dirs),
            publish=lambda _: self._again.set(),
            on_fault=lambda sentence: self._silence.warning("inventory not refreshed", sentence),
            refresh_s=options.refresh_s,
        )
        self._cache.subscribe(lambda _inventory, _began: self._silence.clear())

    async def run(self) -> Exit:
        """Returns after SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._look_again)
        parts = [asyncio.create_task(each) for each in (self._cache.run(), self._keep_up_to_date())]
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({*parts, stopping}, return_when=asyncio.FIRST_COMPLETED)
        code = exit_code(parts)
        await cancelled([*parts, stopping])
        return code

    def stop(self) -> None:
        self._stop.set()

    async def _keep_up_to_date(self) -> None:
        await self._cache.ready()
        while True:
            self._again.clear()
            # In a thread: it reads the disk, and staging may copy files.
            await asyncio.to_thread(self._update)
            # Nothing tells when the driver's files change, so they are looked at each time: a few milliseconds.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.refresh_s):
                    await self._again.wait()

    def _update(self) -> None:
        inventory = self._cache.current
        assert inventory, "the cache is ready"
        bound = logger.bind(path=str(self._file.path), driver_version=inventory.driver_version)
        try:
            if self._file.write(specification_text(inventory, self._options)):
                bound.bind(gpus=len(inventory.gpus)).info("CDI specification written")
                for sentence in self._file.conflicts(self._options.standard):
                    bound.bind(fault=sentence).warning("other CDI specification describes the same devices")
                for generation in remove_old(self._options, self._file, inventory):
                    bound.bind(generation=generation).info("old driver files removed")
            self._log.clear()
        except NotReadyError as error:
            self._report("CDI specification removed, nothing to describe", str(error))
            with contextlib.suppress(SpecFileError):  # such a file cannot be written either, which is logged
                self._file.remove()
        except SpecFileError as error:
            self._report("CDI specification not written", str(error))
        except DriverError as error:
            self._report("old driver files not removed", str(error))

    def _report(self, phrase: str, fault: str) -> None:
        self._log.warning(phrase, fault, path=str(self._file.path))

    def _look_again(self) -> None:
        self._cache.poke()
        self._again.set()
