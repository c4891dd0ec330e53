"""`nri-gpu explain`: what each container of a manifest would get on this node, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.topology import links_among
from nri_gpu.cli.manifest import read_pods
from nri_gpu.cli.page import Tone, json_text
from nri_gpu.cli.render import show_text
from nri_gpu.daemon.policy_file import load_policy
from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Decision, Inject, Pass, Refuse
from nri_gpu.domain.edits import UNLIMITED, Edits, Mount, Rlimit
from nri_gpu.domain.errors import CommandError, DriverError, Exit
from nri_gpu.domain.gpu import closed_sets
from nri_gpu.domain.node import CompatPackage, DriverFiles, DriverTree, Node
from nri_gpu.driver.compat import scan_compat
from nri_gpu.driver.profiles import planned_profiles
from nri_gpu.driver.scan import scan
from nri_gpu.driver.trees import planned, tree_name
from nri_gpu.policy.model import Policy
from nri_gpu.simulation.source import ask_once, source_of

TONES: Final = {"  REFUSED": Tone.BAD, "  granted": Tone.GOOD, "  note": Tone.WARN, "  ": Tone.PLAIN, "": Tone.HEAD}


class Explained(Struct, frozen=True):
    """One container's decision. links: `NV18`, `PIX` and so on -> pairs of its GPUs, the best first."""

    container: Container
    decision: Decision
    links: Mapping[str, int]


class DeviceLine(Struct, frozen=True):
    """A device node. permissions: of the container's device rule."""

    path: str
    major: int
    minor: int
    mode: Annotated[str, Meta(pattern="^[0-7]{4}$", description="permission bits, octal")]
    permissions: Literal["rw"] = "rw"


class EditsLine(Struct, frozen=True):
    """What is added to a container. cpuset_cpus, cpuset_mems: in the kernel's list syntax; empty: as they are."""

    devices: tuple[DeviceLine, ...]
    mounts: tuple[Mount, ...]
    env: Mapping[str, str]
    rlimits: tuple[Rlimit, ...]
    cpuset_cpus: str
    cpuset_mems: str


class ContainerLine(Struct, frozen=True, kw_only=True):
    """A container and its decision. inject: it gets GPUs, or none as it asked. pass: it does not ask.

    Of inject: rule of the policy, gpu_uuids, mode (`none` without GPUs), compat, edits, and links: pairs of its GPUs by
    their connection, the best first. Of refuse: code, reason. Of pass: reason, edits.
    """

    namespace: str
    pod: str
    container: str
    decision: Literal["pass", "inject", "refuse"]
    rule: str | UnsetType = UNSET
    gpu_uuids: tuple[str, ...] | UnsetType = UNSET
    mode: str | UnsetType = UNSET
    links: Mapping[str, int] | UnsetType = UNSET
    compat: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    edits: EditsLine | UnsetType = UNSET


class ExplainDocument(Struct, frozen=True, tag_field="schema", tag="nri-gpu/explain/v1"):
    """What each container would get, in the order of the decisions."""

    containers: tuple[ContainerLine, ...]


def run(args: argparse.Namespace) -> int:
    """Print what each container would get. Returns 1 when one would be refused."""
    policy = load_policy(args.policy, {"driver.root": args.driver_root})
    try:
        pods = tuple(read_pods(_text(args.file), args.file))
    except OSError as error:
        raise CommandError(Exit.USAGE, error) from None
    node = node_snapshot(args.gpus, policy)
    explained = decide_all(pods, node, policy)
    if args.output == "json":
        print(json_text(ExplainDocument(tuple(map(_container_line, explained)))))
    else:
        show_text(to_text(explained, node), TONES)
    return Exit.FINDING if any(isinstance(each.decision, Refuse) for each in explained) else Exit.OK


def decide_all(pods: tuple[tuple[Container, ...], ...], node: Node, policy: Policy) -> tuple[Explained, ...]:
    """Decide about all containers in order, with one ledger."""
    ledger, explained = Ledger(), []
    for container in (container for pod in pods for container in pod):
        decision = decide(container, node, ledger, policy)
        ledger = ledger.after(decision, 0.0)
        uuids = decision.grant.uuids if isinstance(decision, Inject) else ()
        units = [unit for unit in node.inventory.units if unit.uuid in uuids]
        explained.append(Explained(container, decision, links_among(units, node.inventory)))
    return tuple(explained)


def node_snapshot(topology: str | None, policy: Policy) -> Node:
    """A snapshot as `run` would have it, without staging any file. Raises: InventoryError."""
    inventory = ask_once(source_of(topology, policy.driver.root, policy.driver.library_dirs))
    node = Node(
        number=1,
        inventory=inventory,
        compat=_packages(policy),
        profiles=planned_profiles(Path(policy.driver.stage_dir), (gpu.minor_number for gpu in inventory.gpus)),
    )
    try:
        version = inventory.driver_version
        found = scan(Path(policy.driver.root), library_dirs=policy.driver.library_dirs, module=version)
    except DriverError as error:
        if not inventory.simulated:
            return replace(node, driver_fault=f"{error}.")
        return replace(node, driver=_imagined(policy, inventory.driver_version))
    folder = Path(policy.driver.stage_dir, found.generation)
    return replace(node, driver=planned(found, folder))


def _packages(policy: Policy) -> tuple[CompatPackage, ...]:
    """CUDA compatibility packages where staging would put them; none where the folder cannot be read."""
    if not policy.compat.dir:
        return ()
    try:
        found = scan_compat(Path(policy.compat.dir)).packages
    except DriverError:
        return ()
    return tuple(each.at(Path(policy.driver.stage_dir, each.generation)) for each in found)


def _imagined(policy: Policy, version: str) -> DriverFiles:
    """A driver's files where staging would put them, for a simulated node on a machine without a driver."""
    base = f"{policy.driver.stage_dir}/{version}-simulated"
    trees = {some: DriverTree(f"{base}/{tree_name(some)}") for some in closed_sets()}
    return DriverFiles(version, f"{version}-simulated", trees, {})


def _text(file: str) -> str:
    """Raises: CommandError, OSError."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(Exit.USAGE, f"{file} is not UTF-8: {error.reason}") from None


def _container_line(each: Explained) -> ContainerLine:
    pod = each.container.pod
    line = ContainerLine(namespace=pod.namespace, pod=pod.name, container=each.container.name, decision="pass")
    match each.decision:
        case Pass(edits, why):
            return replace(line, reason=why, edits=_edits_line(edits))
        case Refuse(reason):
            return replace(line, decision="refuse", code=reason.code.value, reason=str(reason))
        case Inject(edits, grant, rule, _, compat):
            return replace(
                line,
                decision="inject",
                rule=rule,
                gpu_uuids=grant.uuids,
                mode=grant.mode or "none",
                links=each.links,
                compat=compat,
                edits=_edits_line(edits),
            )


def _edits_line(edits: Edits) -> EditsLine:
    return EditsLine(
        tuple(DeviceLine(d.path, d.major, d.minor, f"{d.mode:04o}") for d in edits.devices.values()),
        tuple(edits.mounts.values()),
        edits.env,
        tuple(edits.rlimits.values()),
        edits.cpuset_cpus,
        edits.cpuset_mems,
    )


def to_text(explained: tuple[Explained, ...], node: Node) -> str:
    """One paragraph a container."""
    return "\n\n".join("\n".join(_lines(each, node)) for each in explained)


def _lines(each: Explained, node: Node) -> Iterator[str]:
    pod = each.container.pod
    yield f"{pod.namespace}/{pod.name} container {each.container.name}"
    match each.decision:
        case Pass(edits, why, note):
            yield f"  passes untouched: {why}" if not edits.env else f"  passes, disarmed: {why}"
            yield from _note(note)
        case Refuse(reason):
            yield f"  REFUSED {reason}"
        case Inject(edits, grant, rule, note, compat):
            units = [unit for unit in node.inventory.units if unit.uuid in grant.uuids]
            places = ", ".join(unit.place for unit in units)
            what = f"GPU {places}, {grant.mode}" if grant.mode else "no GPU, as it asked"
            yield f"  granted {what} (by {rule})"
            if each.links:
                yield f"  links   {', '.join(f'{word} x{pairs}' for word, pairs in each.links.items())}"
            if compat:
                yield f"  compat  {compat}"
            yield from (f"  device  c {d.major}:{d.minor} rw  {d.path}" for d in edits.devices.values())
            yield from (f"  mount   {m.destination}  from {m.source}" for m in edits.mounts.values())
            yield from (f"  env     {key}={value}" for key, value in edits.env.items())
            for limit in edits.rlimits.values():
                soft = "unlimited" if limit.soft == UNLIMITED else str(limit.soft)
                yield f"  rlimit  {limit.type}={soft}"
            for name, value in (("cpus", edits.cpuset_cpus), ("mems", edits.cpuset_mems)):
                if value:
                    yield f"  cpuset  {name} {value}"
            yield from _note(note)


def _note(note: str) -> Iterator[str]:
    if note:
        yield f"  note    {note}"
