"""The decision for one container: parse its request, check the policy, choose GPUs, plan the edits.

It is pure and total: any container, node, ledger and policy give a Pass, an Inject or a Refuse, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from nri_gpu.decision.asked import claim_of
from nri_gpu.decision.cordoned import in_use_for
from nri_gpu.decision.driver_parts import driver_parts
from nri_gpu.decision.eligible import Candidates, Eligible, Others, check_request, node_fault, over_limit
from nri_gpu.decision.foreign import only
from nri_gpu.decision.grant_plan import (
    NotCompleted,
    complete_asked,
    complete_unasked,
    held_elsewhere,
    plan_for,
    unreached_note,
)
from nri_gpu.decision.overlaps import kept_out
from nri_gpu.decision.placement import Asker, place
from nri_gpu.decision.refusals import in_rollout, why_not
from nri_gpu.decision.start_check import validate_restored, validate_runtime
from nri_gpu.domain.allocation import REQUIRED_DESTINATION, Allocated, AllocationPending, ClaimUid
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import NOT_ASKED, Code, Decision, Grant, Inject, Pass, Reason, Refuse
from nri_gpu.domain.edits import NO_EDITS, NO_EXTRAS, Edits
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import GpuUuid, Unit
from nri_gpu.domain.gpu_request import Claim, Count, MigProfiles, Mode, Nothing
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.injection.device_nodes import missing_capability_major
from nri_gpu.injection.extra_edits import ExtraRequest, extra_edits, extras_note
from nri_gpu.injection.inject import VISIBLE_DEVICES, disarmed
from nri_gpu.ledger.holders import Usage
from nri_gpu.ledger.ledger import Entry, Ledger
from nri_gpu.policy.model import Disarm, Policy, PrivilegedAction
from nri_gpu.policy.select import Denied, Ignored, select, stale_fault


def decide(container: Container, node: Node, ledger: Ledger, policy: Policy) -> Decision:
    """Decide on a container that is about to be created. ledger: as `cleared_for` that container."""
    asked = _check(container, node, policy)
    if isinstance(asked, Eligible):
        return _grant(asked, container, node, ledger)
    if not isinstance(asked, Refuse) and (reason := kept_out(container, node, ledger, policy)):
        return Refuse(reason)
    allocation = container.kubelet
    claimed = isinstance(allocation, Allocated) and allocation.claims
    if isinstance(asked, Pass) and (claimed or REQUIRED_DESTINATION in container.mounts):
        # The container could not start without our reply: our sentence explains more than the runtime's error.
        return _refuse(
            Code.NOT_ALLOWED,
            f"the kubelet allocated GPUs to it, but {asked.why.rstrip('.')}",
            cure="have policy allow it, or take "
            f"{'the claim out of its resources.claims' if claimed else 'them out of its resources.limits'}",
        )
    return asked


def _check(container: Container, node: Node, policy: Policy) -> Eligible | Decision:
    """Return the request if it is eligible for GPUs, else the decision, which then does not depend on the ledger."""
    if reason := validate_restored(container, policy):
        return Refuse(reason)
    if isinstance(container.kubelet, AllocationPending):
        return _refuse(Code.NODE_NOT_READY, f"{container.kubelet.key}: {container.kubelet.fault}")
    try:
        claim = claim_of(container, policy)
    except RequestError as error:
        return _refuse(Code.BAD_REQUEST, str(error))
    if claim is None:
        return _unasked(container, node, policy)
    if isinstance(claim.wanted, Nothing):
        return _granted_nothing(container, node, policy)
    if policy.fault:
        return _refuse(Code.BAD_POLICY, "no GPU can be granted until the policy is fixed", policy.fault)
    match verdict := select(policy, container):
        case Denied():
            return _refuse(Code.NOT_ALLOWED, verdict.sentence)
        case Ignored():
            passed = _passed(container, node, policy, verdict.sentence)
            return replace(passed, ignored=True) if isinstance(passed, Pass) else passed
    if (reason := validate_runtime(container, policy)) and held_elsewhere(container, node) is None:
        return Refuse(reason)
    parts = driver_parts(claim, container, verdict.terms, node)
    asked = check_request(replace(claim, capabilities=parts.capabilities), container, policy, verdict, node)
    if isinstance(asked, Reason):
        return Refuse(asked)
    asked = replace(asked, left_out=parts.left_out)
    if completed := complete_asked(asked, container, node):
        return Refuse(completed) if isinstance(completed, Reason) else completed
    if sentence := stale_fault(policy, node.inventory_age_s):
        return _refuse(Code.NODE_NOT_READY, sentence)
    if reason := node_fault(asked.capabilities, node):
        return Refuse(reason)
    return asked


def _unasked(container: Container, node: Node, policy: Policy) -> Decision:
    """Leave a container without a request as it is, unless policy completes what another component assigned."""
    match completed := complete_unasked(container, node, policy):
        case Reason():
            return Refuse(completed)
        case NotCompleted():
            return _passed(container, node, policy, completed.why or NOT_ASKED)
    return completed


def _granted_nothing(container: Container, node: Node, policy: Policy) -> Decision:
    """Grant `none`, which needs no permission: the signed grant shows that somebody decided."""
    if reason := held_elsewhere(container, node):
        return Refuse(reason)
    passed = _passed(container, node, policy, NOT_ASKED)
    if isinstance(passed, Refuse):
        return passed
    allocation, why = container.kubelet, ""
    if isinstance(allocation, Allocated) and allocation.elsewhere:
        why = f"{allocation.key} is for other containers of its pod, and the pod's annotation only shapes that"
    return Inject(passed.edits, Grant.to(container, (), None, node.generation), note=passed.note, why=why)


def _passed(container: Container, node: Node, policy: Policy, why: str) -> Pass | Refuse:
    armed = policy.environment.disarm is Disarm.ALL and container.env
    edits = Edits.of(env=disarmed(container.env)) if armed else NO_EDITS
    if edits.env and VISIBLE_DEVICES in container.env_twice:
        return _refuse(
            Code.NOT_ALLOWED,
            f"policy disarms {VISIBLE_DEVICES}, but image and pod both set it and NRI reaches only one of the two",
            cure="leave it out of the pod's environment",
        )
    return Pass(edits, why, _privileged_note(container, node, policy))


def _grant(asked: Eligible, container: Container, node: Node, ledger: Ledger) -> Decision:
    chosen = _choose(asked, container, node, ledger)
    if isinstance(chosen, Reason):
        return Refuse(chosen)
    gpus, mode, seat = chosen
    policy = asked.terms.policy
    extra: Edits | Reason = NO_EDITS
    extras = ""
    if asked.extras != NO_EXTRAS:
        extra = extra_edits(ExtraRequest(asked.extras, gpus, node, container))
        extras = extras_note(asked.extras, container)
    if isinstance(extra, Reason):
        return Refuse(extra)
    plan = plan_for(container, gpus, asked.capabilities, node, policy, extra=extra, mps=seat)
    if isinstance(plan, Reason):
        return Refuse(plan)
    notes = (unreached_note(container, plan.edits), plan.note, extras, _privileged_note(container, node, policy))
    grant = Grant.to(container, tuple(gpu.uuid for gpu in gpus), mode, plan.generation, seat)
    note = "; ".join(filter(None, notes))
    return Inject(plan.edits, grant, asked.rule, note=note, compat=plan.compat, left_out=asked.left_out)


ID_IN_USE: Final = Reason(
    Code.GPU_BUSY,
    "an earlier container with this id has ended, but its processes live on and hold GPUs",
    cure="end them (see `nri-gpu status`), or use another id",
)
Chosen = tuple[tuple[Unit, ...], Mode | None, Seat | None]  # no mode: for monitoring


def _choose(asked: Eligible, container: Container, node: Node, ledger: Ledger) -> Chosen | Reason:
    """Return the GPUs and how they are held: those that this container holds already, or the best that it may have."""
    before = ledger.entries.get(container.id)
    if before and before.lost:
        return ID_IN_USE
    inventory = in_use_for(container, node.inventory)
    if held := _held(container, inventory, ledger):
        return held
    admin, allocation = asked.claim.admin, container.kubelet
    usage = ledger.usage()
    others = Others.of(container, ledger, usage)
    candidates = Candidates.of(asked, container, inventory, others.usage)
    claims = frozenset(allocation.claims) if isinstance(allocation, Allocated) else frozenset[ClaimUid]()
    asker = Asker(container.pod.uid, asked.mode, asked.terms.policy.placement.strategy, claims)
    if admin:  # beside whoever holds them
        gpus = place(asked.claim, asker, candidates.inventory, {})
    else:
        gpus = _place(asked.claim, asker, candidates.inventory, usage, others.lost)
    if isinstance(gpus, Reason):
        return candidates.explained(in_rollout(gpus, container.pod, usage.values()))
    if not admin and (reason := over_limit(asked, container, node.inventory, others, gpus)):
        return reason
    if reason := missing_capability_major(gpus, node.inventory.majors):
        return reason
    return gpus, None if admin else asked.mode, asked.seat and replace(asked.seat, folder=node.mps.folder(gpus[0].uuid))


def _place(
    claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage], lost: Mapping[ContainerId, Entry]
) -> tuple[Unit, ...] | Reason:
    """Return the GPUs of a lost attempt at this container, whose processes may be on them, else the best there are."""
    uuids = {uuid for entry in lost.values() for uuid in entry.grant.uuids}
    if uuids and isinstance(claim.wanted, Count | MigProfiles):
        held = tuple(each for each in inventory.units if each.uuid in uuids)
        again = place(claim, asker, only(held, inventory), usage)
        if not isinstance(again, Reason):
            return again
    return place(claim, asker, inventory, usage)


def _held(container: Container, inventory: Inventory, ledger: Ledger) -> Chosen | None:
    """Return what this very container was granted before, and how, so that a repeated request gets the same answer."""
    entry = ledger.entries.get(container.id)
    if entry is None or not entry.holds or entry.grant.mode is None:
        return None
    gpus = tuple(unit for unit in inventory.units if unit.uuid in entry.grant.uuids and not why_not(unit))
    return (gpus, entry.grant.mode, entry.grant.seat) if gpus and len(gpus) == len(entry.grant.uuids) else None


def _privileged_note(container: Container, node: Node, policy: Policy) -> str:
    """Return what a privileged, or nearly privileged, container can use beyond its grant, or empty.

    It is empty too where policy does not audit such containers.
    """
    quiet = policy.privileged.action is PrivilegedAction.ALLOW
    if quiet or not (container.privileged or container.wildcard) or not node.gpus:
        return ""
    how = "is privileged" if container.privileged else "opens devices by a wildcard rule of its cgroup"
    return f"it {how}: it can use every GPU of this node, whatever is granted to it or to others"


def _refuse(code: Code, what: str, why: str = "", cure: str = "") -> Refuse:
    return Refuse(Reason(code, what, why, cure))
