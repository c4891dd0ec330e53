"""The answer of `nri-gpu verify` beside an observer: what the kernel lets containers open, and what they were given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from nri_gpu.daemon.answers import AllocationStatus, ObserverStatus
from nri_gpu.decision.refusals import called
from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import listed, shown
from nri_gpu.injection.device_numbers import Owner, device_numbers
from nri_gpu.observe.looks import NodeLook, SeenContainer
from nri_gpu.observe.node_findings import lost_numbers
from nri_gpu.observe.observed_allocations import HOOK, NO_UNITS, NOT_KNOWN, PRIVILEGED, short_name
from nri_gpu.observe.unit_access import UnitAccess
from nri_gpu.observe.use_findings import way_in
from nri_gpu.stray.judge import usual_node
from nri_gpu.system.node_name import this_node
from nri_gpu.verify.container_report import OBSERVER, ContainerReport, OpenNumber, Report, Verdict

# What opens a GPU and names nobody: a node that is in the spec, a variable of the image, a privileged container.
_NAMES_NOBODY: Final = (HOOK, NOT_KNOWN, PRIVILEGED)
_HIDDEN: Final = "which devices the kernel lets it open is not seen here"
_WHICH: Final = "it was given {}, and which GPU that is, is not known here"
_LATE: Final = "it began after the observer last looked at containers, or asked the kubelet: run this again in 10 s"


def allocation_report(look: NodeLook, known: ObserverStatus, inventory: Inventory) -> Report:
    """Return the report on the containers of a look. known: the observer's answer, from right before the look."""
    of_container = defaultdict[str, list[AllocationStatus]](list)
    for each in known.allocations:
        if each.container_id and each.by not in _NAMES_NOBODY:
            of_container[each.container_id].append(each)
    access, owners, asked_s = UnitAccess(inventory), device_numbers(inventory), known.looked_s or 0.0
    if known.kubelet:
        asked_s = min(asked_s, known.kubelet_s or 0.0)
    found = [
        _verified(each, of_container[each.id], access, owners, inventory, asked_s)
        for each in look.containers
        if not each.sandbox and not each.user
    ]
    found.sort(key=lambda each: (each.pod, each.container, each.id))
    unseen = tuple(each.sentence for each in look.unseen)
    return Report(node=this_node(), numbers_from=OBSERVER, containers=tuple(found), unseen=unseen)


def _verified(
    container: SeenContainer,
    given: list[AllocationStatus],
    access: UnitAccess,
    owners: Mapping[DeviceNumber, Owner],
    inventory: Inventory,
    asked_s: float,
) -> ContainerReport:
    """Return the report on a container. asked_s: what was given after that is not known, seconds since the epoch."""
    uuids = NO_UNITS.union(GpuUuid(each.gpu_uuid) for each in given if each.gpu_uuid)
    opens = container.opens or ()
    unknown = [each.device or each.by for each in given if not each.gpu_uuid]
    unseen = ""
    if not container.privileged:
        late = (container.began_s or 0.0) > asked_s and not given
        reasons = (
            (container.opens is None, container.fault or _HIDDEN),
            (bool(unknown), _WHICH.format(listed(map(shown, unknown)))),
            (late, _LATE),
        )
        unseen = next((why for holds, why in reasons if holds), "")
    clauses = () if unseen or container.privileged else (*_clauses(container, uuids, access, inventory),)
    verdict = _verdict(container, uuids, access, lost=bool(clauses)) if not unseen else Verdict.UNSEEN
    return ContainerReport(
        id=container.id,
        pod=short_name(container),
        container=container.name,
        verdict=verdict,
        gpu_uuids=tuple(sorted(uuids)),
        privileged=container.privileged,
        opens=tuple(OpenNumber(owners[each].path, *each) for each in opens if each in owners),
        differences=clauses,
        unseen=unseen,
        by=", ".join(dict.fromkeys(each.by for each in given)),
    )


def _verdict(container: SeenContainer, given: frozenset[GpuUuid], access: UnitAccess, *, lost: bool) -> Verdict:
    if container.privileged:
        return Verdict.PRIVILEGED
    if access.opened(container.opens or ()) - given:
        return Verdict.WIDENED if given else Verdict.NOT_ALLOCATED
    if lost:
        return Verdict.DIFFERS
    return Verdict.ALLOCATED if given else Verdict.NO_GPU


def _clauses(
    container: SeenContainer, given: frozenset[GpuUuid], access: UnitAccess, inventory: Inventory
) -> Iterator[str]:
    """Yield how what it can open differs from what it was given, each a clause that follows its name."""
    if beyond := access.opened(container.opens or ()) - given:
        names = listed(called(unit) for uuid, unit in access.units.items() if uuid in beyond)
        way = way_in(container, access.numbers(beyond))
        yield f"can open {names}, and neither the kubelet, a claim, CDI nor Docker gave it that: {way}"
    if lost := lost_numbers(container, given, access):
        nodes = listed(usual_node(number, inventory.majors) for number in sorted(lost))
        yield f"cannot open {nodes} any more, which it was given: create it again"
