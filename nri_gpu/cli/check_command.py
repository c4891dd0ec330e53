"""`nri-gpu check`: all faults of a policy file, or advice on what is valid but unwise, and on this node."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, convert
from msgspec.structs import replace

from nri_gpu.cli.ask_daemon import daemon_status, overrides_of
from nri_gpu.cli.follow_daemon import topology_of
from nri_gpu.cli.installed import findings_here
from nri_gpu.cli.page import Line, Tone
from nri_gpu.cli.render import answer, lines, titled
from nri_gpu.cli.status_page import fail_closed
from nri_gpu.decision.offered import kubelet_offer
from nri_gpu.doctor.daemon_checks import cordon_findings, guard_finding, policy_findings, registration_findings
from nri_gpu.doctor.driver_checks import lacking
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.host_checks import loader_findings
from nri_gpu.doctor.kubelet_checks import claim_findings
from nri_gpu.domain.errors import CommandError, DriverError, Exit, Fault, InventoryError, PolicyError, cause_of
from nri_gpu.domain.finding import Finding, Level, in_policy
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.domain.text import counted
from nri_gpu.driver.driver_scan import scan
from nri_gpu.host.components import node_advice
from nri_gpu.host.modules import module_version
from nri_gpu.inventory.topology_source import ask_once, source_of
from nri_gpu.kubelet.kubelet_findings import kubelet_advice
from nri_gpu.plugin.guard_status import in_pod
from nri_gpu.policy.document import options_in
from nri_gpu.policy.lines import key_lines, line_of
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rule_findings import advise_for
from nri_gpu.records.policy_file import (
    DEFAULT_PATH,
    LAST_GOOD,
    UNIT_FOLDER,
    PolicyMemory,
    PolicyText,
    build_policy,
    file_advice,
    read_policy,
    unit_folder,
)
from nri_gpu.system.node_name import NamedNode, this_node

Option = str | bool | int | float
Said = TypeVar("Said", Finding, Fault)


class FaultLine(Struct, frozen=True):
    """A fault of the file. line: the first is 1; null where unknown. key: dotted; empty for the whole file."""

    file: str
    line: int | None
    key: str
    message: str


class TopologyAdvice(Struct, frozen=True):
    """A topology file, and the advice for the node that it stands for, which `advice` has too."""

    file: str
    advice: tuple[str, ...]


class CheckDocument(Struct, frozen=True, tag_field="schema", tag="nri-gpu/check/v1"):
    """The faults of a policy file; and advice, where there are none. notes: what else to know, as of a wide policy.

    options: over the file, of the command line and of the running daemon's. topologies: where files stand for the node.
    """

    node: NamedNode
    faults: tuple[FaultLine, ...]
    advice: tuple[str, ...]
    options: Mapping[str, Option]
    notes: tuple[str, ...] = ()
    topologies: tuple[TopologyAdvice, ...] = ()


def run(args: argparse.Namespace) -> int:
    """Print faults and advice. Return 78 for faults, or 1 if tables without a key are all that is wrong."""
    state_dir = Path(args.state_dir or DEFAULT_STATE)
    status = daemon_status(state_dir)
    given = options_in(vars(args))
    options = overrides_of(status) | given
    memory = PolicyMemory(unit_folder() or UNIT_FOLDER)
    if args.forget:
        _forget(memory.file, state_dir / LAST_GOOD)
    topologies = args.gpus or [each for each in [topology_of(status)] if each]
    try:
        source = read_policy(args.file, in_force=bool(memory.source))
        policy = build_policy(source, options)
        _compare_name(policy, args.require_plugin, source)
    except PolicyError as error:
        denied = Exit.of_faults(error.faults) is Exit.PERMISSION
        return _faults(args, error.faults, options, Exit.PERMISSION if denied else Exit.CONFIGURATION)
    if policy.empty_tables:
        return _faults(args, policy.empty_tables, options, Exit.FINDING)
    try:
        of_nodes = _of_nodes(policy, topologies)
    except PolicyError as error:
        return _faults(args, error.faults, options, Exit.CONFIGURATION)
    seen = Examined(policy=policy, status=status, state_dir=state_dir, in_pod=in_pod())
    found = (
        *file_advice(Path(args.file or DEFAULT_PATH)),
        *policy_findings(seen),
        *(replace(each, meaning=f"{where}{each.meaning}") for where, each in _apart(of_nodes)),
        *(() if topologies else (*_of_driver(policy), *cordon_findings(seen))),
        *loader_findings(seen),
        *node_advice(policy),
        *kubelet_advice(policy),
        # Before nri-gpu has served the node there is nothing to guard, nor where it joins no runtime.
        *((guard_finding(seen),) if state_dir.exists() and not (status and not status.runtime.joined) else ()),
        *(registration_findings(status.runtime) if status else ()),
        *claim_findings(seen),
    )
    found = findings_here(found)
    advice = _advice(found)
    notes = tuple(each.meaning for each in found if each.level is Level.NOTE)
    page = [Line(titled(f"{policy.source}: ok", simulated=bool(topologies)))]
    for whose, those in (("these", given), ("the running daemon's", options.keys() - given.keys())):
        if shown := ", ".join(f"{key} = {json.dumps(options[key])}" for key in sorted(those)):
            page.append(Line(f"with {whose} options: {shown}"))
    if status and status.kubelet.enabled:
        page.append(Line(f"kubelet: {fail_closed(status)}"))
    page += lines((f"advice: {sentence}" for sentence in advice), Tone.WARN)
    page += lines((f"note: {sentence}" for sentence in notes), Tone.PLAIN)
    answer(args, CheckDocument(this_node(), (), advice, options, notes, _by_file(of_nodes)), page)
    return Exit.OK


def _faults(args: argparse.Namespace, found: tuple[Fault, ...], options: Mapping[str, Option], code: Exit) -> int:
    faults = convert(found, tuple[FaultLine, ...], from_attributes=True)
    told = (f"{found[0].file}: {counted(len(faults), 'fault')}", *map(str, found))
    answer(args, CheckDocument(this_node(), faults, (), options), lines(told, Tone.BAD))
    return code


def _compare_name(policy: Policy, required: str | None, source: PolicyText | None) -> None:
    """Compare the names of plugin and guard with the one that pods require, if any. Raises: PolicyError."""
    name, guard = policy.plugin.name, policy.guard
    if not required:
        return
    if name != required:
        key = "plugin.name"
        message = (
            f'must be "{required}", the name that pods require, not "{name}": no such pod would start; change it here, '
            f"or set the chart's value pluginName to {name}"
        )
    elif required in (guard.name, f"{guard.index}-{guard.name}"):
        key = "guard.name"
        message = (
            f'is "{guard.name}", and pods require "{required}": they would start while only the guard is connected; '
            "give the guard a name of its own"
        )
    else:
        return
    line = line_of(key_lines(source.text), key) if source else None
    raise PolicyError((Fault(policy.source, key, message, line),))


def _forget(*files: Path | None) -> None:
    """Remove the files that say that a policy was in force. Raises: CommandError."""
    for file in filter(None, files):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            root = "; be root" * isinstance(error, PermissionError)
            raise CommandError(Exit.of(error), f"{file} cannot be removed: {cause_of(error)}{root}") from None


def _advice(found: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(each.meaning for each in found if each.level in (Level.WARNING, Level.ERROR))


def _by_file(of_nodes: Mapping[str, tuple[Finding, ...]]) -> tuple[TopologyAdvice, ...]:
    return tuple(TopologyAdvice(file, _advice(found)) for file, found in of_nodes.items() if file)


def _apart(of_nodes: Mapping[str, tuple[Said, ...]]) -> Iterator[tuple[str, Said]]:
    """Yield what is said of nodes, each once, behind the files of those that it is said of; empty: of every one."""
    for each in dict.fromkeys(chain.from_iterable(of_nodes.values())):
        files = [file for file, said in of_nodes.items() if each in said]
        yield "" if len(files) == len(of_nodes) else f"{', '.join(files)}: ", each


def _of_nodes(policy: Policy, topologies: Sequence[str]) -> Mapping[str, tuple[Finding, ...]]:
    """Return advice on pools and limits by topology file, each held against the policy alone; "" is this node.

    Raises: InventoryError, of a file; PolicyError: resources of the kubelet do not go with the GPUs of some.
    """
    found: dict[str, tuple[Finding, ...]] = {}
    faults: dict[str, tuple[Fault, ...]] = {}
    for file in topologies or ("",):
        faults[file] = ()
        try:
            found[file] = _of_gpus(policy, file)
        except PolicyError as error:
            faults[file] = error.faults
    if any(faults.values()):
        raise PolicyError(tuple(replace(each, message=f"{where}{each.message}") for where, each in _apart(faults)))
    return found


def _of_gpus(policy: Policy, topology: str) -> tuple[Finding, ...]:
    """Return advice on pools and limits for the GPUs of this node or file.

    Raises: InventoryError, of the file; PolicyError: resources of the kubelet do not go with these GPUs.
    """
    if not topology and not policy.pool.pools:
        return ()  # not worth waking the driver
    try:
        driver = policy.driver
        inventory = ask_once(source_of(topology or None, driver.root, driver.library_dirs, stage_dir=driver.stage_dir))
    except InventoryError as error:
        if topology:
            raise
        return (
            in_policy(
                f"the pools cannot be compared with this node's GPUs: {error}; --gpus FILE takes a topology file",
                "the pools",
            ),
        )
    if fault := kubelet_offer(inventory, policy.kubelet, policy.pool).fault:
        raise PolicyError((Fault(policy.source, "kubelet.resources", fault),))
    return (*_former(topology), *advise_for(policy, inventory))


def _former(topology: str) -> tuple[Finding, ...]:
    if not topology:
        return ()
    from nri_gpu.inventory.topology_file import former_tables  # a real node does without it

    return tuple(former_tables(topology))


def _of_driver(policy: Policy) -> Iterator[Finding]:
    """Yield what this node's driver, if there is one, cannot serve."""
    with suppress(DriverError):
        driver = scan(Path(policy.driver.root), library_dirs=policy.driver.library_dirs, module=module_version())
        yield from lacking(driver, policy)
