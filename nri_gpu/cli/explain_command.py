"""`nri-gpu explain`: the GPUs that each container of a manifest would get on this node, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from nri_gpu.cli.ask_daemon import daemon_status, with_cordons
from nri_gpu.cli.follow_daemon import follow, followed_policy
from nri_gpu.cli.page import Line, Tone
from nri_gpu.cli.played_node import PlayedNode, with_allocators
from nri_gpu.cli.pod_manifest import Manifest, ManifestContainer, Name, read_pods
from nri_gpu.cli.render import answer, lines, titled
from nri_gpu.decision.topology import links_among
from nri_gpu.domain.container import Container, Pod
from nri_gpu.domain.decision import Code, Decision, Inject, Pass, Refuse
from nri_gpu.domain.edits import UNLIMITED, Edits, Mount, Rlimit
from nri_gpu.domain.errors import CommandError, DriverError, Exit, fault_of
from nri_gpu.domain.gpu import GpuUuid, closed_sets
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.domain.node import CompatPackage, DriverFiles, DriverTree, Node
from nri_gpu.domain.text import quoted
from nri_gpu.driver.compat_packages import scan_compat
from nri_gpu.driver.driver_scan import scan
from nri_gpu.driver.manifest import staged_driver, why_unfit
from nri_gpu.driver.trees import planned, tree_name
from nri_gpu.inventory.topology_source import ask_once, source_of
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import Disarm, Policy
from nri_gpu.system.cpu import why_no_hwcaps
from nri_gpu.system.node_name import NamedNode, this_node
from nri_gpu.system.storage import open_input
from nri_gpu.system.yaml_documents import BYTES_MAX, too_large


class Explained(Struct, frozen=True):
    """The decision about a container. links: `NV18`, `PIX` and so on -> pairs of its GPUs, the best first."""

    container: Container
    decision: Decision
    links: Mapping[str, int]
    notes: tuple[str, ...]


class DeviceLine(Struct, frozen=True):
    """A device node. permissions: of the container's device rule."""

    path: str
    major: int
    minor: int
    mode: Annotated[str, Meta(pattern="^[0-7]{4}$", description="permission bits, octal")]
    permissions: Literal["rw"] = "rw"


class EditsLine(Struct, frozen=True):
    """The additions to a container. cpuset_cpus, cpuset_mems: in the kernel's list syntax; empty: as they are."""

    devices: tuple[DeviceLine, ...]
    mounts: tuple[Mount, ...]
    env: Mapping[str, str]
    rlimits: tuple[Rlimit, ...]
    cpuset_cpus: str
    cpuset_mems: str


class ContainerLine(Struct, frozen=True, kw_only=True):
    """A container and its decision. inject: it gets GPUs, or none as it asked. pass: it does not ask.

    Of inject: rule of the policy, gpu_uuids, mode (`none` without GPUs, or for monitoring), compat, edits, and links:
    pairs of its GPUs by their connection, the best first. Of refuse: code, reason. Of pass: reason, edits.
    notes: what else to know, as on what a manifest does not show.
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
    notes: tuple[str, ...]


class ExplainDocument(Struct, frozen=True, tag_field="schema", tag="nri-gpu/explain/v1"):
    """The decisions about the containers, in their order. notes: on documents without a pod."""

    node: NamedNode
    containers: tuple[ContainerLine, ...]
    notes: tuple[str, ...]


def run(args: argparse.Namespace) -> int:
    """Print what each container would get. Return 1 if one would be refused."""
    policy = followed_policy(args, follow(args), all_options=True)
    try:
        manifest = read_pods(_text(args.file), args.file, args.namespace or "default")
    except OSError as error:
        raise CommandError(Exit.of_input(error), fault_of(error)) from None
    node = node_snapshot(args.gpus, policy)
    if not args.gpus:
        inventory = with_cordons(node.inventory, daemon_status(DEFAULT_STATE), policy.usage)
        node = replace(node, inventory=inventory)
    explained = decide_all(manifest, node, policy)
    answer(
        args,
        ExplainDocument(this_node(), tuple(map(_container_line, explained)), manifest.notes),
        explained_page(explained, node, args.file, manifest.notes),
    )
    return Exit.FINDING if any(isinstance(each.decision, Refuse) for each in explained) else Exit.OK


def decide_all(manifest: Manifest, node: Node, policy: Policy) -> tuple[Explained, ...]:
    """Decide about all containers in order, on one node. An init container that has ended holds nothing in it."""
    played, explained = PlayedNode(node, with_allocators(policy, manifest), manifest.claims), []
    released: dict[GpuUuid, Pod] = {}  # by an init container that held it exclusively
    for pod in manifest.pods:
        not_admitted = played.admit(pod)
        for listed in pod:
            container = listed.container
            decision = Refuse(not_admitted) if not_admitted else played.create(listed)
            uuids = decision.grant.uuids if isinstance(decision, Inject) else ()
            units = [unit for unit in node.inventory.units if unit.uuid in uuids]
            waits = policy.handover.wait and any(released.get(uuid, container.pod) != container.pod for uuid in uuids)
            notes = (*_allocation_notes(listed, played, policy), *_notes(listed, decision, policy, waits=waits))
            explained.append(Explained(container, decision, links_among(units, node.inventory), notes))
            if listed.ends and isinstance(decision, Inject) and decision.grant.mode is Mode.EXCLUSIVE:
                released |= dict.fromkeys(uuids, container.pod)
    return tuple(explained)


def _allocation_notes(listed: ManifestContainer, played: PlayedNode, policy: Policy) -> Iterator[str]:
    """Yield notes on what device plugins and claims bring to a container."""
    settings = policy.kubelet
    allocated = [key for key in listed.resources if played.allocates(key)]
    if not (settings.enabled or policy.dra.enabled) and any(not settings.inject_for.match(key) for key in allocated):
        yield "policy leaves the kubelet's device plugin off (kubelet.enabled): this is the answer of `run --kubelet`"
    unknown = [key for key in listed.resources if key not in allocated and _is_of_gpus(key, policy)]
    for resources, played_here in ((allocated, "; played here on an empty node"), (unknown, "")):
        if resources:
            named = ", ".join(resources)
            yield f"a manifest does not show which GPUs the kubelet allocates to it ({named}){played_here}"
    if not listed.claims:
        return
    known = all(map(played.claimed, listed.claims))
    if known and not policy.dra.enabled:
        yield "policy leaves DRA off (dra.enabled): this is the answer of `run --dra`"
    how = "; played here on an empty node, without selectors and constraints" if known else ""
    yield f"a manifest does not show which devices its ResourceClaims bring{how}"


def _notes(listed: ManifestContainer, decision: Decision, policy: Policy, *, waits: bool) -> Iterator[str]:
    """Yield notes on a decision, above all on what the real container may have and a manifest does not show."""
    if not isinstance(decision, Refuse) and decision.note:
        yield decision.note
    if isinstance(decision, Inject) and decision.left_out:
        yield decision.left_out
    yield from listed.notes
    granted = isinstance(decision, Inject) and bool(decision.grant.uuids)
    environment = policy.environment
    if granted or environment.disarm is Disarm.ALL or environment.may_ask.match(listed.container.pod.namespace):
        yield "a manifest does not show the variables of its image, such as NVIDIA_REQUIRE_CUDA, which count too"
    asked = granted or isinstance(decision, Refuse) or (isinstance(decision, Pass) and decision.ignored)
    if asked and (rule := _guessed_rule(listed.container, listed.name, policy)):
        yield f"{rule} depends on a part of the pod's name that is made up here, so on a node it may decide differently"
    handler = listed.container.pod.runtime_handler
    if handler and (granted or (isinstance(decision, Refuse) and decision.reason.code is Code.BAD_RUNTIME)):
        yield f"a manifest does not show the handler of RuntimeClass {quoted(handler)}: that name is taken for it here"
    if waits:
        yield "an init container of another pod had that GPU: until its processes are gone, this container has to wait"


def _is_of_gpus(resource: str, policy: Policy) -> bool:
    kubelet = policy.kubelet
    known = ("nvidia.com", *(name.partition("/")[0] for name in kubelet.names))
    return resource.partition("/")[0] in known or kubelet.inject_for.match(resource)


def _guessed_rule(container: Container, name: Name, policy: Policy) -> str:
    """Return the first rule asked that depends on the unknown part of the pod's name; mostly there is none."""
    for index, rule in enumerate(policy.rule.rules):
        if rule.pod and replace(rule, pod=None).matches(container) and _is_guess(rule.pod, name):
            return policy.rule.called(index)
        if rule.matches(container):
            break
    return ""


def _is_guess(patterns: Globs, name: Name) -> bool:
    """Return whether some names with these known characters match, and others do not."""
    known, rest = name.text[: name.known], name.text[name.known :]
    if not rest or all(map(patterns.match, (f"{known}\0", known + "\0" * len(rest)))):
        return False
    starts = (pattern[:end] for pattern in patterns.patterns for end in range(len(pattern) + 1))
    return any(fnmatchcase(known, start) for start in starts)


def node_snapshot(topology: str | None, policy: Policy) -> Node:
    """Return a snapshot as `run` would have it, without staging any file. Raises: InventoryError."""
    driver = policy.driver
    inventory = ask_once(source_of(topology, driver.root, driver.library_dirs, stage_dir=driver.stage_dir))
    node = Node(
        number=1,
        inventory=inventory,
        compat=_packages(policy),
        hwcaps=not why_no_hwcaps(),
    )
    version, stage_dir = inventory.driver_version, Path(driver.stage_dir)
    staged = None if inventory.simulated else staged_driver(stage_dir, version)
    try:
        found = scan(Path(driver.root), library_dirs=driver.library_dirs, module=version)
    except DriverError as error:
        if inventory.simulated:
            return replace(node, driver=_imagined(policy, version))
        return replace(node, driver=staged, driver_fault="" if staged else f"{error}.")
    files = planned(found, stage_dir / found.generation)
    return replace(node, driver=staged if staged and why_unfit(files, staged) else files)


def _packages(policy: Policy) -> tuple[CompatPackage, ...]:
    """Return the CUDA compatibility packages where staging would put them, or none if the folder cannot be read."""
    if not policy.compat.dir:
        return ()
    try:
        found = scan_compat(Path(policy.compat.dir)).packages
    except DriverError:
        return ()
    return tuple(each.at(Path(policy.driver.stage_dir, each.generation)) for each in found)


def _imagined(policy: Policy, version: str) -> DriverFiles:
    """Return a driver's files where staging would put them, for a simulated node on a machine without a driver."""
    base = f"{policy.driver.stage_dir}/{version}-simulated"
    trees = {some: DriverTree(f"{base}/{tree_name(some)}") for some in closed_sets()}
    return DriverFiles(version, f"{version}-simulated", trees, {})


def _text(file: str) -> str:
    """Return the text of a file, or of standard input for `-`. Raises: CommandError, OSError."""
    try:
        if file == "-":
            return sys.stdin.read(BYTES_MAX + 1)
        with open_input(file) as opened:
            content = opened.read(BYTES_MAX + 1)
        if len(content) > BYTES_MAX:
            raise too_large(file)
        return content.decode()
    except UnicodeDecodeError as error:
        raise CommandError(Exit.CONFIGURATION, f"{file} is not UTF-8: {error.reason}") from None


def _container_line(each: Explained) -> ContainerLine:
    pod = each.container.pod
    line = ContainerLine(
        namespace=pod.namespace, pod=pod.name, container=each.container.name, decision="pass", notes=each.notes
    )
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


def explained_page(explained: tuple[Explained, ...], node: Node, file: str, notes: tuple[str, ...]) -> Iterator[Line]:
    """Yield a paragraph for each container, and one for notes on the whole file. Terminal commands are escaped."""
    if node.inventory.simulated:
        yield from (Line(titled("decided for the node of a topology file", simulated=True), Tone.HEAD), Line(""))
    of_file = [[Line(file, Tone.HEAD), *_notes_below(notes)]] if notes else []
    for number, paragraph in enumerate((*(_lines(each, node) for each in explained), *of_file)):
        if number:
            yield Line("")
        yield from (replace(line, text=_printable(line.text)) for line in paragraph)


def _printable(line: str) -> str:
    return line if line.isprintable() else ascii(line)[1:-1]


def _lines(each: Explained, node: Node) -> Iterator[Line]:
    pod = each.container.pod
    yield Line(f"{pod.namespace}/{pod.name} container {each.container.name}", Tone.HEAD)
    match each.decision:
        case Pass(edits, why):
            yield Line(f"  passes untouched: {why}" if not edits.env else f"  passes, disarmed: {why}")
        case Refuse(reason):
            yield Line(f"  REFUSED {reason}", Tone.BAD)
        case Inject(_, grant, rule):
            units = [unit for unit in node.inventory.units if unit.uuid in grant.uuids]
            places = ", ".join(unit.place for unit in units)
            how = grant.mode or "for monitoring"
            none = f"no GPU: {each.decision.why}" if each.decision.why else "no GPU, as it asked"
            what = f"GPU {places}, {how} (by {rule})" if grant.uuids else none
            yield Line(f"  granted {what}", Tone.GOOD)
            yield from lines(_granted(each.links, each.decision), Tone.PLAIN)
    yield from _notes_below(each.notes)


def _granted(links: Mapping[str, int], granted: Inject) -> Iterator[str]:
    """Yield how the container's GPUs are connected, and what is added to it."""
    edits = granted.edits
    if links:
        yield f"  links   {', '.join(f'{word} x{pairs}' for word, pairs in links.items())}"
    if granted.compat:
        yield f"  compat  {granted.compat}"
    yield from (f"  device  c {d.major}:{d.minor} rw  {d.path}" for d in edits.devices.values())
    yield from (f"  mount   {m.destination}  from {m.source}" for m in edits.mounts.values())
    yield from (f"  env     {key}={value}" for key, value in edits.env.items())
    for limit in edits.rlimits.values():
        soft = "unlimited" if limit.soft == UNLIMITED else str(limit.soft)
        yield f"  rlimit  {limit.type}={soft}"
    for name, value in (("cpus", edits.cpuset_cpus), ("mems", edits.cpuset_mems)):
        if value:
            yield f"  cpuset  {name} {value}"


def _notes_below(notes: tuple[str, ...]) -> Iterator[Line]:
    return lines((f"  note    {note}" for note in notes), Tone.WARN)
