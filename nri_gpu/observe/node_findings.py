"""Findings about what became of GPUs and containers: driver files, device rules, XIDs; each with what to do. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from nri_gpu.daemon.answers import ObservedFinding
from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.finding_kind import FindingKind
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.text import counted, listed, shown
from nri_gpu.health.gpu_record import Moment
from nri_gpu.health.xids import ActionClass, class_of, xid_name
from nri_gpu.observe.joined_node import JoinedNode
from nri_gpu.observe.looks import SeenContainer
from nri_gpu.observe.observed_allocations import LEGACY_HOOK, short_name, who
from nri_gpu.observe.unit_access import UnitAccess
from nri_gpu.observe.use_findings import NAMED_MAX, finding
from nri_gpu.stray.judge import usual_node
from nri_gpu.verify.oci_bundles import STARTING_S

XID_S: Final = 86_400.0  # so long an XID is a finding
_OUGHT: Final[Mapping[ActionClass, str]] = {
    ActionClass.RESTART: "a program caused it, or met it: see what their logs say, and create them again if they hang",
    ActionClass.RESET: "move them elsewhere, and reset the GPU (`nvidia-smi --gpu-reset`) or reboot",
    ActionClass.UNCLEAR: "see what `dmesg | grep NVRM` says and NVIDIA's catalogue of XIDs advises",
    ActionClass.UNKNOWN: "see what `dmesg | grep NVRM` says; NVIDIA's catalogue does not have it",
}
Xids = Mapping[GpuUuid, Sequence[tuple[int, float]]]  # XIDs by GPU, each with when it came, seconds since the epoch


def several_drivers(node: JoinedNode) -> Iterator[ObservedFinding]:
    """Yield that containers have driver files of another version than the kernel's module, or than one another.

    A container with a compatibility package has files of two versions, and one of them is the others'.
    """
    loaded = node.inventory.driver_version
    by_version = defaultdict[str, list[SeenContainer]](list)
    for each in node.containers:
        if each.driver_versions and not node.is_quiet(each) and loaded not in each.driver_versions:
            by_version[max(each.driver_versions)].append(each)
    if len(by_version) + bool(loaded) < 2 or not by_version:
        return
    parts = [
        f"{shown(version)} in {listed(sorted(set(map(short_name, found))), NAMED_MAX)}"
        for version, found in sorted(by_version.items())
    ]
    more = f"; and of {counted(len(parts) - NAMED_MAX, 'more version')}" if len(parts) > NAMED_MAX else ""
    kernel = f", and the kernel's module is {shown(loaded)}" if loaded else ""
    message = (
        f"containers have driver files of {'; of '.join(parts[:NAMED_MAX])}{more}{kernel}: CUDA fails where "
        "the two differ, so delete these and have them made again"
    )
    yield finding(FindingKind.DRIVERS, message)


def lost_rules(node: JoinedNode, moment: Moment) -> Iterator[ObservedFinding]:
    """Yield each container that the kernel does not let open any more what it was given."""
    for container in node.containers:
        # Where the clock was set back, a container of tomorrow is not young for a day.
        young = container.began_s is not None and abs(moment.wall_s - container.began_s) < STARTING_S
        if container.opens is None or container.privileged or container.sandbox or young:
            continue
        if lost := lost_numbers(container, node.given(container), node.access):
            nodes = listed((usual_node(number, node.inventory.majors) for number in sorted(lost)), NAMED_MAX)
            message = (
                f"{who(container)} cannot open {nodes} any more, which it was given: its device rules were changed "
                "after it was created, as `systemctl daemon-reload` does where /dev/char has no link; create it again "
                "(`nri-gpu prepare` makes the links)"
            )
            yield finding(FindingKind.LOST_RULES, message, node.access.opened(lost), container)


def lost_numbers(container: SeenContainer, given: frozenset[GpuUuid], access: UnitAccess) -> frozenset[DeviceNumber]:
    """Return what the kernel does not let a container open, although its spec, or the hook by what was given, did."""
    wanted = frozenset(container.nodes) & frozenset(container.allowed)
    if LEGACY_HOOK in container.hooks:
        wanted = wanted.union(*map(access.needed, given))
    return wanted.difference(container.opens or ())


def xid_findings(node: JoinedNode, xids: Xids, moment: Moment) -> Iterator[ObservedFinding]:
    """Yield each kind of XID that came on a GPU within a day, with the pods that had the GPU then."""
    for gpu in node.inventory.gpus:
        recent = [(xid, at_s) for xid, at_s in xids.get(gpu.uuid, ()) if moment.wall_s - at_s < XID_S]
        counts, last = Counter(xid for xid, _ in recent), dict(sorted(recent, key=lambda each: each[1]))
        for xid, count in counts.items():
            if (action := class_of(xid)) is ActionClass.NOTHING:
                continue
            had = sorted({short_name(each) for each in _on(node, gpu.uuid) if (each.began_s or 0.0) <= last[xid]})
            whom = f"given to {listed(had, NAMED_MAX)}" if had else "given to nobody that is seen now"
            often = f", {counted(count, 'time')} in a day" if count > 1 else ""
            message = f"{node.names([gpu.uuid])} had {xid_name(xid)}{often}; it is {whom}: {_OUGHT[action]}"
            yield finding(FindingKind.XID, message, [gpu.uuid])


def _on(node: JoinedNode, gpu: GpuUuid) -> Iterator[SeenContainer]:
    """Yield the containers that were given a GPU, or a part of it."""
    parts = {part.uuid for part in node.inventory.parts if part.gpu.uuid == gpu}
    yield from (each.container for uuid in {gpu, *parts} for each in node.of_unit.get(uuid, ()))
