"""The GPUs that several pods can use although a pod among them has its GPU exclusively, and who keeps from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Final

from msgspec import Struct

from nri_gpu.decision.foreign import external_uuids
from nri_gpu.decision.refusals import HOLDERS_SHOWN, called, named_few, number_of, opener
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Node
from nri_gpu.domain.text import counted
from nri_gpu.ledger.holders import UNUSED, ExternalAllocation
from nri_gpu.ledger.ledger import GrantPhase, Ledger, without
from nri_gpu.policy.model import OnConflict, Policy

# What to do about a container with GPUs of another component: most that open GPUs of others only watch.
SEPARATE: Final = (
    "list this container's pod in foreign.monitors if it only watches, else keep that component from GPUs that nri-gpu "
    "grants (docs/foreign.md)"
)


class Conflict(Struct, frozen=True):
    """A container that can use GPUs which another component gave it, and which other pods have exclusively."""

    other: ExternalAllocation
    uuids: tuple[GpuUuid, ...]
    holders: tuple[str, ...]  # those pods, and claims without a container


def conflict_sentence(pod: str, container: str, uuids: tuple[str, ...], holders: tuple[str, ...]) -> str:
    """Return what is wrong about a conflict; SEPARATE says what to do."""
    name = f", container {container}," if container else ""
    which = f"GPU {uuids[0]}" if len(uuids) == 1 else number_of(uuids)
    return f"{pod} (not through nri-gpu){name} has {which}, held exclusively by {' and '.join(holders)}"


def conflicts(ledger: Ledger) -> Mapping[ContainerId, Conflict]:
    """Return the containers with GPUs of another component that other pods have exclusively.

    Monitors are none of them: they hold nothing.
    """
    if not any(each.held for each in ledger.external.values()):
        return {}
    usage = ledger.usage()
    found: dict[ContainerId, Conflict] = {}
    for id_, other in ledger.external.items():
        alone = {uuid: usage[uuid].held_alone(other.pod) for uuid in sorted(other.held) if not other.container}
        if uuids := tuple(uuid for uuid, holders in alone.items() if holders):
            found[id_] = Conflict(other, uuids, tuple(sorted(set(chain.from_iterable(alone.values())))))
    return found


def granted_twice(ledger: Ledger) -> Mapping[GpuUuid, tuple[str, ...]]:
    """Return GPUs that pods were granted beside each other, one exclusively and by no common claim, with the pods.

    A container that started while nri-gpu was away may have caused it, or a driver that gave the GPUs each other's
    device numbers.
    """
    found: dict[GpuUuid, tuple[str, ...]] = {}
    for uuid, use in ledger.usage().items():
        # Of a container that is being looked for and not listed, an old file may be all that is left.
        old = {
            id_ for id_ in ledger.unsought.keys() & use.grants if ledger.entries[id_].phase is not GrantPhase.RUNNING
        }
        grants = without(use.grants, old).values()
        pods = {each.pod_uid: each.pod for each in grants}
        exclusive = any(each.mode is Mode.EXCLUSIVE for each in grants)
        joined = any(pods.keys() <= each.claim.pods.keys() for each in use.claims.values())
        shifted = (each for each in use.external.values() if each.container and each.pod not in pods.values())
        beside = {opener(each) for each in shifted}
        if exclusive and (beside or (len(pods) > 1 and not joined)):
            found[uuid] = tuple(sorted({*pods.values(), *beside}))
    return found


def overlaps(ledger: Ledger) -> Mapping[GpuUuid, tuple[str, ...]]:
    """Return the GPUs of `granted_twice` and of `conflicts`, with all these pods. Nobody else is granted such a GPU."""
    found = defaultdict[GpuUuid, set[str]](set, {uuid: set(pods) for uuid, pods in granted_twice(ledger).items()})
    for each in conflicts(ledger).values():
        for uuid in each.uuids:
            found[uuid] |= {opener(each.other), *each.holders}
    return {uuid: tuple(sorted(pods)) for uuid, pods in found.items()}


def kept_out(container: Container, node: Node, ledger: Ledger, policy: Policy) -> Reason | None:
    """Return why policy keeps out a container with GPUs of another component that other pods have exclusively, or None.

    Monitors and privileged containers are let pass: the former hold nothing, the latter open every device anyway.
    """
    exempt = container.privileged or policy.foreign.monitors.match(container.pod.full_name)
    if policy.foreign.conflict is OnConflict.REPORT or exempt or not (opened := external_uuids(container, node)):
        return None
    usage, pod = ledger.usage(), container.pod
    units = [unit for unit in node.inventory.units if unit.uuid in opened]
    alone = {unit.uuid: usage.get(unit.uuid, UNUSED).held_alone(pod.full_name, pod.uid) for unit in units}
    if not (held := [unit for unit in units if alone[unit.uuid]]):
        return None
    which = called(held[0]) + (f" and {counted(len(held) - 1, 'other')}" if len(held) > 1 else "")
    holders = named_few(sorted(set(chain.from_iterable(alone.values()))), HOLDERS_SHOWN)
    return Reason(
        Code.GPU_BUSY,
        f"a device plugin, CDI or another NRI plugin gave it {which}, held exclusively by {holders}",
        'the policy says foreign.conflict = "refuse"',
        f"wait until the holder ends, or {SEPARATE}",
    )
