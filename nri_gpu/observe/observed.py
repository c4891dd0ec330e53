"""An observer's knowledge after a look: allocations, a ledger of them, and findings. Pure: it is given its memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.daemon.answers import AllocationStatus, ObservedFinding
from nri_gpu.domain.container import ContainerId, DeviceNumber, PodId
from nri_gpu.domain.fair_share import fair_share
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import shown
from nri_gpu.health.gpu_record import Moment
from nri_gpu.ledger.holders import ExternalAllocation
from nri_gpu.ledger.ledger import Ledger, Live
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.observe import node_findings, use_findings
from nri_gpu.observe.given import Given, PodContainer
from nri_gpu.observe.joined_node import JoinedNode, SeenIds, closed_containers, open_numbers
from nri_gpu.observe.looks import NodeLook, SeenContainer
from nri_gpu.observe.observed_allocations import NO_UNITS, PRIVILEGED, Allotment, allotments, owner_of, short_name
from nri_gpu.observe.usual_users import quiet_patterns
from nri_gpu.policy.model import Policy
from nri_gpu.stray.judge import Known, StrayUse, container_of, judge
from nri_gpu.stray.uses import Extent, Use

FINDINGS_MAX: Final = 512  # of a node where everything is wrong
LOOKS_MIN: Final = 2  # that saw nothing open, before that is a finding
_ROOTLESS: Final = "rootless"


class Tracked(Struct, frozen=True):
    """An allocation over time, on the clock. looks: at its container's processes, that could tell and saw it closed."""

    since: float
    last_opened: float | None = None
    looks: int = 0


TrackedKey = tuple[str, str]  # container, and UUID or device


class Memory(Struct, frozen=True, kw_only=True):
    """The facts that outlive a look. uses, extent: of the last look at processes, which began at `looked`."""

    tracked: Mapping[TrackedKey, Tracked] = {}
    first_found_s: Mapping[tuple[object, ...], float] = {}  # since the epoch
    uses: tuple[Use, ...] = ()
    extent: Extent | None = None
    looked: float | None = None


class Observed(Struct, frozen=True, kw_only=True):
    """The node, as it is known now. quiet: patterns of the users that are no finding. more: findings left out."""

    memory: Memory = Memory()
    ledger: Ledger = Ledger()
    containers: Mapping[ContainerId, ListedContainer] = {}
    allocations: tuple[AllocationStatus, ...] = ()
    findings: tuple[ObservedFinding, ...] = ()
    more: int = 0
    strays: tuple[StrayUse, ...] = ()
    quiet: tuple[str, ...] = ()


def observed_after(
    memory: Memory,
    look: NodeLook,
    given: Given,
    inventory: Inventory,
    policy: Policy,
    moment: Moment,
    xids: node_findings.Xids | None = None,
) -> Observed:
    """Return what is known after a look. xids: by GPU, each with when it came, seconds since the epoch."""
    fresh = look.extent is not None and look.at != memory.looked
    if look.extent is not None:
        memory = replace(memory, uses=look.uses, extent=look.extent, looked=look.at)
    everyone = sorted(look.containers, key=lambda each: each.id)
    containers = tuple(each for each in everyone if not each.user)
    uses = _of_others(memory, containers)
    open_ = open_numbers(containers, uses)
    node = JoinedNode(
        inventory=inventory,
        containers=containers,
        allotments=allotments(containers, given, inventory, open_),
        open_numbers=open_,
        closed=closed_containers(containers, memory.extent),
        quiet=quiet_patterns(policy),
    )
    strays = _strays(node, uses)
    users = {each.id: each for each in everyone if each.user}
    node = replace(node, allotments=_rows(node, _rootless(strays, users)))
    strays = tuple(
        replace(each, message=use_findings.stray_message(each, node))
        for each in strays
        if each.container_id not in users
    )
    tracked = {_key(each): _tracked(each, node, memory, moment, fresh=fresh) for each in node.allotments}
    every = _findings(node, strays, tracked, policy, moment, xids or {})
    found = fair_share(every, lambda each: (each.kind, each.namespace), FINDINGS_MAX)
    first = {each: memory.first_found_s.get(each, moment.wall_s) for each in map(use_findings.subject, found)}
    return Observed(
        memory=replace(memory, tracked=tracked, first_found_s=first),
        ledger=_ledger(node),
        containers={each.id: _named(each) for each in containers if not each.sandbox},
        allocations=_allocations(node, tracked, memory, moment),
        findings=tuple(replace(each, since_s=first[use_findings.subject(each)]) for each in found),
        more=len(every) - len(found),
        strays=strays,
        quiet=node.quiet.patterns,
    )


def _of_others(memory: Memory, containers: Iterable[SeenContainer]) -> tuple[Use, ...]:
    """Return the uses without those of the observer's own container, in an order of their own."""
    known, cgroups = SeenIds(frozenset(each.id for each in containers)), memory.extent.cgroups if memory.extent else ()
    ours = cgroups if container_of(cgroups, known) else None
    return tuple(sorted((use for use in memory.uses if use.cgroups != ours), key=lambda use: (use.pid, use.started)))


def _named(container: SeenContainer) -> ListedContainer:
    """Return a container as it is named beside its processes."""
    namespace, pod = short_name(container).split("/", 1)
    return ListedContainer(_pod_id(container), namespace, pod, container.name, container.privileged)


def _pod_id(container: SeenContainer) -> PodId:
    return PodId(container.pod_uid or container.id)


def _strays(node: JoinedNode, uses: tuple[Use, ...]) -> tuple[StrayUse, ...]:
    """Return who uses what nobody gave it."""
    given = defaultdict[PodContainer, list[Allotment]](list)
    for allotment in node.allotments:
        if allotment.by != PRIVILEGED:
            given[allotment.owner].append(allotment)
    live = {
        each.id: Live(each.id, each.name, _pod_id(each), each.pod, _covered(each, given[owner_of(each)], node))
        for each in node.containers
    }
    listed = {
        each.id: ListedContainer(_pod_id(each), each.namespace, each.pod, each.name, each.privileged)
        for each in node.containers
    }
    return judge(uses, Known(inventory=node.inventory, live=live, containers=listed), node.quiet)


def _rootless(strays: Iterable[StrayUse], users: Mapping[ContainerId, SeenContainer]) -> Iterator[Allotment]:
    """Yield what containers of users have open: who gave them that stands in their homes, which are not opened."""
    for each in strays:
        if container := users.get(ContainerId(each.container_id)):
            by = f"{_ROOTLESS}, user {container.user}"
            yield from (Allotment(container=container, by=by, uuid=GpuUuid(uuid)) for uuid in each.gpu_uuids)


def _covered(container: SeenContainer, given: list[Allotment], node: JoinedNode) -> frozenset[DeviceNumber]:
    """Return the numbers that a container may have open, by what it and its pod were given."""
    open_ = node.open_numbers.get(container.id, frozenset())
    if any(not each.uuid for each in given):
        return open_  # which GPUs these are is not known
    numbers = frozenset[DeviceNumber]().union(*(node.access.needed(each.uuid) for each in given))
    if given:
        numbers |= {each for each in open_ if not node.access.is_of_gpu(each)}
    return numbers if container.privileged else numbers.union(container.nodes)


def _rows(node: JoinedNode, rootless: Iterable[Allotment]) -> tuple[Allotment, ...]:
    """Return each allotment once, in the order of GPUs; what monitors open by themselves is none."""
    kept = [each for each in node.allotments if each.by != PRIVILEGED or not node.is_quiet(each.container)]
    place = {uuid: at for at, uuid in enumerate(node.access.units)}
    rows = {(_key(each), each.owner, each.container.name): each for each in reversed([*kept, *rootless])}
    return tuple(
        sorted(rows.values(), key=lambda each: (place.get(each.uuid, len(place)), *each.owner, each.container.name))
    )


def _key(allotment: Allotment) -> TrackedKey:
    return allotment.container.id or "/".join(allotment.owner), allotment.uuid or allotment.device


def _opened(allotment: Allotment, node: JoinedNode) -> bool | None:
    """Return whether a process of its container has it open; None where that is not seen."""
    if allotment.container.user:
        return True
    if not allotment.container.id:
        return None
    open_ = node.open_numbers.get(allotment.container.id, frozenset())
    if allotment.uuid:
        found = not node.access.needed(allotment.uuid).isdisjoint(open_)
    else:
        found = any(map(node.access.is_gpus_node, open_))
    return found or (None if allotment.container.id in node.closed else False)


def _tracked(allotment: Allotment, node: JoinedNode, memory: Memory, moment: Moment, *, fresh: bool) -> Tracked:
    before = memory.tracked.get(_key(allotment)) or Tracked(moment.clock_s)
    opened = _opened(allotment, node) if fresh else None
    if opened is None:
        return before
    return replace(before, last_opened=memory.looked) if opened else replace(before, looks=before.looks + 1)


def _findings(
    node: JoinedNode,
    strays: tuple[StrayUse, ...],
    tracked: Mapping[TrackedKey, Tracked],
    policy: Policy,
    moment: Moment,
    xids: node_findings.Xids,
) -> tuple[ObservedFinding, ...]:
    late = moment.clock_s - policy.observe.unopened_s
    never = {
        _key(each): tracked[_key(each)].looks
        for each in node.allotments
        if each.container.id and not node.is_quiet(each.container) and _is_unopened(tracked[_key(each)], late)
    }
    return (
        *use_findings.not_given(strays, node),
        *use_findings.privileged(strays, node),
        *use_findings.reachable(node),
        *use_findings.given_twice(node),
        *use_findings.unopened(node, never),
        *node_findings.lost_rules(node, moment),
        *node_findings.several_drivers(node),
        *node_findings.xid_findings(node, xids, moment),
    )


def _is_unopened(tracked: Tracked, late: float) -> bool:
    return tracked.last_opened is None and tracked.looks >= LOOKS_MIN and tracked.since <= late


def _ledger(node: JoinedNode) -> Ledger:
    """Return the allocations as external ones: what monitors have keeps nobody from a GPU."""
    by_holder = defaultdict[ContainerId, list[Allotment]](list)
    for each in node.allotments:
        if each.uuid:
            names = (each.by, each.container.namespace, each.container.pod, each.container.name)
            by_holder[each.container.id or ContainerId("/".join(names))].append(each)
    external: dict[ContainerId, ExternalAllocation] = {}
    for id_, found in by_holder.items():
        uuids, container = NO_UNITS.union(each.uuid for each in found), found[0].container
        watches = node.is_quiet(container) and all(each.claim for each in found)  # for administrators
        external[id_] = ExternalAllocation(
            id_,
            _pod_id(container),
            short_name(container),
            uuids,
            name=container.name,
            watched=uuids if watches else NO_UNITS,
            device="" if container.id else found[0].device,
            by=", ".join(dict.fromkeys(each.by for each in found)),
        )
    for container in node.containers:
        opened = node.access.opened(node.open_numbers.get(container.id, ()))
        if opened and container.id not in external and node.is_quiet(container):
            external[container.id] = ExternalAllocation(
                container.id, _pod_id(container), short_name(container), opened, name=container.name, watched=opened
            )
    return Ledger(external=external)


def _allocations(
    node: JoinedNode, tracked: Mapping[TrackedKey, Tracked], memory: Memory, moment: Moment
) -> tuple[AllocationStatus, ...]:
    replicas = Counter(each.uuid for each in node.allotments if each.replica)
    return tuple(_allocation(each, node, tracked[_key(each)], replicas, memory, moment) for each in node.allotments)


def _allocation(
    allotment: Allotment,
    node: JoinedNode,
    tracked: Tracked,
    replicas: Mapping[GpuUuid, int],
    memory: Memory,
    moment: Moment,
) -> AllocationStatus:
    container, ago = allotment.container, moment.wall_s - moment.clock_s
    return AllocationStatus(
        gpu_uuid=allotment.uuid,
        device=allotment.device,
        namespace=container.namespace,
        pod=container.pod,
        container=container.name,
        container_id=container.id,
        runtime=container.runtime,
        by=allotment.by,
        claim=allotment.claim,
        asked=shown(container.asked),
        shared=replicas[allotment.uuid] if allotment.replica else 0,
        opened=_opened(allotment, node),
        began_s=container.began_s,
        since_s=ago + tracked.since,
        last_opened_s=None if tracked.last_opened is None else ago + tracked.last_opened,
        unseen=allotment.unseen or container.fault,
    )
