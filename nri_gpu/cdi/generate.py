"""`cdi generate`: the CDI specification of this node, and the removal of old drivers' files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.cdi.spec_file import STANDARD, SpecFile, spec_files
from nri_gpu.cdi.specification import specification
from nri_gpu.decision.eligible import lacking_library
from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.errors import DriverError, NriGpuError, fault_of
from nri_gpu.domain.gpu import Capabilities, Gpu
from nri_gpu.domain.node import DriverFiles, DriverTree, Inventory, Loader, Node
from nri_gpu.driver.driver_scan import scan
from nri_gpu.driver.manifest import staged_driver, why_unfit
from nri_gpu.driver.stage import GENERATION, prune, stage
from nri_gpu.driver.stage_owner import owner_of
from nri_gpu.driver.trees import planned
from nri_gpu.injection.device_nodes import missing_capability_major, missing_modules, two_versions
from nri_gpu.policy.usage_settings import UsageSettings
from nri_gpu.system.storage import boot_id, text_of, write_whole

LOCK_WAIT_S: Final = 60.0  # another process may be staging files
BOOT_FILE: Final = ".boot"  # in a generation: the id of the boot in which a specification last named it


class NotReadyError(NriGpuError):
    """The reason why there is nothing to describe on this node."""


class SpecificationOptions(Struct, frozen=True):
    """The options of a specification."""

    driver_root: Path
    library_dirs: tuple[str, ...]
    stage_dir: Path
    loader: Loader
    capabilities: Capabilities  # closed
    topology: str | None  # the file of a simulated node
    standard: tuple[Path, ...] = STANDARD  # where runtimes look for specifications
    usage: UsageSettings = UsageSettings()  # where the GPUs are kept that root took out of use


def specification_text(inventory: Inventory, options: SpecificationOptions) -> str:
    """Return the text of the specification, after staging the driver's files. Raises: NotReadyError."""
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
        files = _files(inventory, options)
        _use(options.stage_dir / files.generation)
    except (DriverError, OSError) as error:
        if inventory.simulated:
            return None
        raise NotReadyError(fault_of(error)) from error
    if reason := lacking_library(options.capabilities, Node(number=1, inventory=inventory, driver=files)):
        raise NotReadyError(reason.sentence)
    tree = files.trees.get(options.capabilities)
    if tree is None and not inventory.simulated:
        raise NotReadyError(f"the driver on this node lacks files for {', '.join(sorted(options.capabilities))}")
    return tree


def _files(inventory: Inventory, options: SpecificationOptions) -> DriverFiles:
    """Stage the driver's files, unless complete staged files of the module's version serve better, as in the daemon.

    Raises: NotReadyError, DriverError.
    """
    if owner := owner_of(options.stage_dir):
        raise NotReadyError(
            f"stage folder {options.stage_dir} belongs to `nri-gpu run` with state folder {owner}, which removes "
            "files that none of its grants uses: give another --stage-dir"
        )
    version = "" if inventory.simulated else inventory.driver_version
    staged = staged_driver(options.stage_dir, version) if version else None
    try:
        found = scan(options.driver_root, library_dirs=options.library_dirs, module=inventory.driver_version)
    except DriverError:
        if staged is None:
            raise
        return staged
    if staged and why_unfit(planned(found, options.stage_dir), staged):
        return staged
    if version not in ("", found.version):
        raise NotReadyError(two_versions(found.version, version))
    return stage(found, options.stage_dir, wait_s=LOCK_WAIT_S)


def remove_old(options: SpecificationOptions, file: SpecFile, inventory: Inventory) -> tuple[str, ...]:
    """Remove files of old drivers, after `file` was written. Return their generations; none on a simulated node.

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
        raise DriverError(f"old driver files stay in {base}: {fault_of(error)}") from error


def _is_old(folder: Path, version: str) -> bool:
    """Return whether it is of another driver and was not used in this boot.

    A folder that names no boot joins this boot.
    """
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
