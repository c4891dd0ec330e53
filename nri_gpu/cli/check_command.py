"""`nri-gpu check`: all faults of a policy file, or advice on what is valid but unwise, and on this node."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct, convert

from nri_gpu.cli.ask_daemon import daemon_status, overrides_of
from nri_gpu.cli.page import Line, Page, Tone, json_text
from nri_gpu.cli.render import lines, show
from nri_gpu.cli.status_page import fail_closed
from nri_gpu.daemon.answers import RuntimeConnection
from nri_gpu.daemon.metrics_findings import metrics_advice
from nri_gpu.domain.errors import CommandError, DriverError, Exit, Fault, InventoryError, PolicyError
from nri_gpu.domain.gpu import closure
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.dra.dra_findings import gate_advice
from nri_gpu.driver.driver_scan import scan
from nri_gpu.driver.stage_owner import stage_advice
from nri_gpu.host.components import node_advice
from nri_gpu.host.modules import module_version
from nri_gpu.inventory.topology_source import ask_once, source_of
from nri_gpu.kubelet.kubelet_findings import kubelet_advice
from nri_gpu.mps.mps_folders import mps_advice
from nri_gpu.plugin.guard_status import guard_advice
from nri_gpu.policy.findings import advise
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rule_findings import advise_for
from nri_gpu.records.policy_file import DEFAULT_PATH, LAST_GOOD, build, file_advice, read_policy
from nri_gpu.records.policy_memory import UNIT_FOLDER, PolicyMemory, unit_folder

Option = str | bool | int | float


class FaultLine(Struct, frozen=True):
    """One thing wrong in the file. line: the first is 1; null where unknown. key: dotted; empty for the whole file."""

    file: str
    line: int | None
    key: str
    message: str


class CheckDocument(Struct, frozen=True, tag_field="schema", tag="nri-gpu/check/v1"):
    """What is wrong with a policy file; and advice, where nothing is. options: of the running daemon's command line."""

    faults: tuple[FaultLine, ...]
    advice: tuple[str, ...]
    options: Mapping[str, Option]


def run(args: argparse.Namespace) -> int:
    """Print faults and advice. Returns 78 for faults, 1 where tables without a key are all that is wrong."""
    state_dir = Path(args.state_dir or DEFAULT_STATE)
    status = daemon_status(state_dir)
    options = overrides_of(status)
    memory = PolicyMemory(unit_folder() or UNIT_FOLDER)
    if args.forget:
        _forget(memory.file, state_dir / LAST_GOOD)
    args.gpus = args.gpus or (status.options.get("topology") if status else None)
    try:
        built = build(read_policy(args.file, in_force=bool(memory.source)), options)
    except PolicyError as error:
        return _faults(args, error.faults, options, Exit.CONFIGURATION)
    if built.empty_tables:
        return _faults(args, built.empty_tables, options, Exit.FINDING)
    policy = built.policy
    served = state_dir.exists()  # by nri-gpu, since this node booted
    advice = (
        *file_advice(Path(args.file or DEFAULT_PATH)),
        *advise(policy),
        *_of_gpus(policy, args.gpus),
        *(() if args.gpus else _of_driver(policy)),
        *stage_advice(policy.driver.stage_dir, state_dir),
        *node_advice(policy),
        *kubelet_advice(policy),
        *guard_advice(policy, served=served),
        *metrics_advice(policy.metrics),
        *(mps_advice(state_dir, enabled=policy.mps.enabled) if served else ()),
        *(_of_daemon(status.runtime) if status else ()),
        *((status.dra.fault,) if status and status.dra.fault else ()),
        *(gate_advice(status.dra.report) if status else ()),
    )
    page = [Line(f"{policy.source}: ok")]
    if options:
        shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in sorted(options.items()))
        page.append(Line(f"with the running daemon's options: {shown}"))
    if status and status.kubelet.enabled:
        page.append(Line(f"kubelet: {fail_closed(status)}"))
    page += lines((f"advice: {sentence}" for sentence in advice), Tone.WARN)
    _print(args, page, CheckDocument((), advice, options))
    return Exit.OK


def _faults(args: argparse.Namespace, found: tuple[Fault, ...], options: Mapping[str, Option], code: Exit) -> int:
    faults = convert(found, tuple[FaultLine, ...], from_attributes=True)
    told = (f"{found[0].file}: {len(faults)} fault{'s' * (len(faults) > 1)}", *map(str, found))
    _print(args, [*lines(told, Tone.BAD)], CheckDocument(faults, (), options))
    return code


def _forget(*files: Path | None) -> None:
    """Remove what says that a policy was in force. Raises: CommandError."""
    for file in filter(None, files):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise CommandError(Exit.of(error), f"{file} cannot be removed: {error.strerror}; be root") from None


def _of_gpus(policy: Policy, topology: str | None) -> tuple[str, ...]:
    """Advice on pools and limits for the GPUs of this node, or of a topology file. Raises: InventoryError, of that."""
    if not topology and not policy.pool.pools:
        return ()  # not worth waking the driver
    try:
        inventory = ask_once(source_of(topology, policy.driver.root, policy.driver.library_dirs))
    except InventoryError as error:
        if topology:
            raise
        return (f"the pools cannot be compared with this node's GPUs: {error}; --gpus FILE takes a topology file",)
    return advise_for(policy, inventory)


def _of_driver(policy: Policy) -> Iterator[str]:
    """Capabilities that containers have by default and that this node's driver, where there is one, cannot serve."""
    root = policy.driver.root
    try:
        found = scan(Path(root), library_dirs=policy.driver.library_dirs, module=module_version())
    except DriverError:
        return
    for each in sorted(found.lacks.keys() & closure(policy.defaults.capabilities)):
        yield f"the driver below {root} has no usable {found.lacks[each]}: who asks for {each} is refused: install it"


def _of_daemon(runtime: RuntimeConnection) -> Iterator[str]:
    """What keeps the running daemon from serving, or will when it has to connect again."""
    if not runtime.ready:
        yield f"nri-gpu is not connected to the runtime: {runtime.fault or 'connecting'}"
    if runtime.list_fault:
        yield runtime.list_fault


def _print(args: argparse.Namespace, page: Page, document: CheckDocument) -> None:
    if args.output == "json":
        print(json_text(document))
    else:
        show(page)
