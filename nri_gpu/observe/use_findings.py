"""Findings about who uses, or can use, which GPU: each is a sentence with what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from nri_gpu.daemon.answers import ObservedFinding
from nri_gpu.domain.container import ContainerId, DeviceNumber
from nri_gpu.domain.finding_kind import FindingKind
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.text import counted, listed, quoted, shown
from nri_gpu.observe.joined_node import JoinedNode
from nri_gpu.observe.looks import SeenContainer
from nri_gpu.observe.observed_allocations import LEGACY_HOOK, NOT_KNOWN, PRIVILEGED, Allotment, short_name, who
from nri_gpu.stray.judge import Kind, StrayUse

NAMED_MAX: Final = 4  # pods, nodes or processes in a sentence
TEXT_MAX: Final = 120  # characters of a path in a sentence
_EXCEPT: Final = "or list {} in the policy's stray.exceptions if it may"
_HOST: Final = "it runs outside containers, where no allocator gives GPUs: end it, " + _EXCEPT.format("its program")
_UNKNOWN: Final = (
    "its runtime keeps its containers where this observer does not look (chart: observe.runtimes), or another "
    "container passed it an open node, so who gave it that is not known: see to it there, "
    + _EXCEPT.format("its cgroup")
)
_MONITOR: Final = "; or list its pod in the policy's foreign.monitors if it only watches"
_NUMBERS: Final = re.compile("[0-9]+")  # of processes, and of how often
_PRIVILEGED: Final = (
    "a privileged container can open every GPU: make it unprivileged and have it request a GPU, or list it in the "
    "policy's foreign.monitors if it only watches"
)


def finding(
    kind: FindingKind,
    message: str,
    uuids: Iterable[str] = (),
    container: SeenContainer | None = None,
) -> ObservedFinding:
    """Return a finding about a container, or about none alone."""
    return ObservedFinding(
        kind=kind,
        message=message,
        gpu_uuids=tuple(sorted(uuids)),
        namespace=container.namespace if container else "",
        pod=container.pod if container else "",
        container=container.name if container else "",
    )


def subject(found: ObservedFinding) -> tuple[object, ...]:
    """Return what a finding is about, by which it is known again: its container, else its sentence without numbers."""
    whose = (found.namespace, found.pod, found.container)
    return (found.kind, *whose, found.gpu_uuids) if any(whose) else (found.kind, _NUMBERS.sub("", found.message))


def stray_message(use: StrayUse, node: JoinedNode) -> str:
    """Return who has what open that nobody gave it, and what to do."""
    container, nodes, running = node.seen.get(ContainerId(use.container_id)), listed(use.nodes, NAMED_MAX), _run([use])
    if use.kind == Kind.HOST:
        return _host_message([use])
    if container is None:
        cgroup = shown(use.cgroup, TEXT_MAX)
        return f"container {use.container_id[:12]} (cgroup {cgroup}; {running}) has {nodes} open: {_UNKNOWN}"
    has = f"{who(container)} ({running}) has {nodes} open"
    if use.kind == Kind.PRIVILEGED:
        return f"{has}: {_PRIVILEGED}"
    given = "other GPUs" if node.of_container.get(container.id) else "no GPU"
    name = short_name(container) if container.pod else "its cgroup"
    return f"{has} and was given {given}: have it request a GPU from what allocates them here, {_EXCEPT.format(name)}"


def not_given(strays: Iterable[StrayUse], node: JoinedNode) -> Iterator[ObservedFinding]:
    """Yield who has what open that nobody gave it; all processes of one program of the host are one finding."""
    programs = dict[str, list[StrayUse]]()
    for use in strays:
        if use.kind == Kind.HOST:
            programs.setdefault(use.processes[0].program, []).append(use)
        elif use.kind != Kind.PRIVILEGED:
            container = node.seen.get(ContainerId(use.container_id))
            yield finding(FindingKind.NOT_GIVEN, stray_message(use, node), use.gpu_uuids, container)
    for uses in programs.values():
        uuids = {uuid for use in uses for uuid in use.gpu_uuids}
        yield finding(FindingKind.NOT_GIVEN, _host_message(uses), uuids)


def _host_message(uses: Iterable[StrayUse]) -> str:
    found = tuple(uses)
    nodes = dict.fromkeys(node for use in found for node in use.nodes)
    return f"host process {_run(found)} has {listed(nodes, NAMED_MAX)} open: {_HOST}"


def _run(uses: Iterable[StrayUse]) -> str:
    processes = (each for use in uses for each in use.processes)
    return listed((f"pid {each.pid} {shown(each.program, TEXT_MAX)}" for each in processes), NAMED_MAX)


def privileged(strays: Iterable[StrayUse], node: JoinedNode) -> Iterator[ObservedFinding]:
    """Yield one finding for all privileged containers that have a GPU open which nobody gave them."""
    found = dict[str, set[str]]()
    for use in strays:
        container = node.seen.get(ContainerId(use.container_id))
        if container and use.kind == Kind.PRIVILEGED and use.gpu_uuids:
            found.setdefault(short_name(container), set()).update(use.gpu_uuids)
    if found:
        names = listed((f"{name} ({counted(len(found[name]), 'GPU')})" for name in sorted(found)), NAMED_MAX)
        message = f"privileged, with GPUs open that nobody gave them: {names}; {_PRIVILEGED}"
        yield finding(FindingKind.PRIVILEGED, message, set().union(*found.values()))


def can_open(container: SeenContainer) -> frozenset[DeviceNumber]:
    """Return the numbers that the kernel lets a container open; where that is not seen, those that its spec does."""
    return frozenset((*container.allowed, *container.nodes) if container.opens is None else container.opens)


def reachable(node: JoinedNode) -> Iterator[ObservedFinding]:
    """Yield each container that can open GPUs which were given to others and not to it."""
    for container in node.containers:
        if container.sandbox or container.privileged or node.is_quiet(container):
            continue
        mine = node.of_container.get(container.id, ())
        if any(not each.uuid for each in mine):
            continue  # which GPU is its own is not known
        can = node.access.opened(can_open(container))
        holders = {uuid: found for uuid in sorted(can) if (found := _kept_from(uuid, mine, node))}
        if holders:
            others = sorted({_holder(each) for found in holders.values() for each in found})
            message = (
                f"{who(container)} can open {node.names(holders)}, given to {listed(others, NAMED_MAX)}: "
                f"{way_in(container, node.access.numbers(holders))}{_MONITOR * bool(container.pod)}"
            )
            yield finding(FindingKind.REACHABLE, message, holders, container)


def _kept_from(uuid: GpuUuid, mine: tuple[Allotment, ...], node: JoinedNode) -> tuple[Allotment, ...]:
    """Return the other holders of a unit, of whom one should have it without this container.

    What Docker, CDI or a hook gave to several was given to each of them; what the kubelet gave was not given to those.
    """
    own = [each for each in mine if each.uuid == uuid]
    if any(each.kubelet for each in own):
        return ()
    owners = {each.owner for each in mine}
    others = (each for each in node.of_unit.get(uuid, ()) if each.by != PRIVILEGED and each.owner not in owners)
    return tuple(each for each in others if each.kubelet or not own)


def _holder(allotment: Allotment) -> str:
    return f"{short_name(allotment.container)} ({allotment.by})"


def way_in(container: SeenContainer, numbers: frozenset[DeviceNumber]) -> str:
    """Return by what a container can open what it was not given, and what to do about it."""
    if not numbers.isdisjoint(container.nodes):
        return (
            "its spec has the nodes, from CDI, --device or another plugin than the kubelet asked: create it without, "
            "and have it request a GPU"
        )
    if LEGACY_HOOK in container.hooks:
        return (
            f"its image or pod sets NVIDIA_VISIBLE_DEVICES={quoted(container.asked)}, and NVIDIA's runtime obeys: set "
            "accept-nvidia-visible-devices-envvar-when-unprivileged = false in its config.toml"
        )
    if not numbers.isdisjoint(container.allowed):
        return "a device rule of its spec lets it: create it without that rule"
    return "its device rules were widened after it was created: stop it, and find out who did that"


def given_twice(node: JoinedNode) -> Iterator[ObservedFinding]:
    """Yield each unit that two allocators gave to two pods, to one of them whole.

    One allocator that does so means to: by replicas, by a claim that pods share, or by a claim for administrators.
    """
    for uuid, found in node.of_unit.items():
        listed_ = [each for each in found if each.kubelet and each.container.id]
        whole = [each for each in listed_ if not each.replica]
        pairs = ((one, two) for one in whole for two in listed_ if one.by != two.by and one.owner != two.owner)
        if pair := next(pairs, None):
            names = " and to ".join(_holder(each) for each in pair)
            message = (
                f"{node.names([uuid])} was given to {names}: two allocators offer the same GPU, and neither knows of "
                "the other; delete one of the pods, and have one of the two leave that GPU alone"
            )
            yield finding(FindingKind.TWICE, message, [uuid])


def unopened(node: JoinedNode, looks: Mapping[tuple[str, str], int]) -> Iterator[ObservedFinding]:
    """Yield what was given long ago and never opened. looks: how many saw that, by container and unit."""
    for each in node.allotments:
        if count := looks.get((each.container.id, each.uuid or each.device)):
            unit = node.names([each.uuid]) if each.uuid else shown(each.device)
            has = f"has {unit}" if each.by == NOT_KNOWN else f"was given {unit} by {each.by}"
            message = (
                f"{who(each.container)} {has}, and none of its processes had that open in {counted(count, 'look')}: "
                f"ask whose it is, and delete the {'pod' if each.container.pod else 'container'} if nobody needs it"
            )
            yield finding(FindingKind.UNOPENED, message, [each.uuid] * bool(each.uuid), each.container)
