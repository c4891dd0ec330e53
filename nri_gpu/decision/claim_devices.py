"""The check of a ResourceClaim before it is prepared: its devices are here and free, and policy allows its namespace.

Policy is asked again for each container. Here it decides as far as it can: a rule that matches by labels or by the
container's name decides about containers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from nri_gpu.decision.asked import MONITORING
from nri_gpu.decision.cordoned import in_use
from nri_gpu.decision.eligible import Others, check_request, node_fault, over_limit
from nri_gpu.decision.refusals import busy, called, cannot, no_share, why_not
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import GpuUuid, Unit
from nri_gpu.domain.gpu_request import Claim, Devices, Everything, Mode
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, ClaimedDevice, PreparedClaim, device_name
from nri_gpu.domain.text import clipped, quoted, shown
from nri_gpu.ledger.holders import UNUSED, Usage
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.policy.select import Allowed, Verdict, select, stale_fault
from nri_gpu.request.annotation import parse_claim

_ANEW: Final = "delete the pods that use the claim, so that the scheduler allocates it again."
_NAMES_SHOWN_MAX: Final = 200  # characters


class NotPrepared(Struct, frozen=True):
    """A refusal to prepare a claim."""

    reason: Reason
    released: bool = False  # its GPU was just released, and may be free in a moment
    # The claims that alone hold its GPU: the API server may know that they are ending.
    holders: tuple[PreparedClaim, ...] = ()
    uuid: str = ""  # of the GPU or MIG device that it cannot have, or empty

    @property
    def passing(self) -> bool:
        """Return whether the cause is transient, such as a daemon or driver that has not scanned the node yet."""
        return self.released or self.reason.code is Code.NODE_NOT_READY


class _Found(Struct, frozen=True):
    """The device of one result on this node. request: what the result's configuration asks for."""

    device: ClaimedDevice
    unit: Unit
    request: Claim


def prepared(claim: AllocatedClaim, node: Node, ledger: Ledger, policy: Policy) -> PreparedClaim | NotPrepared:
    """Return the claim with its devices found, or why it cannot be prepared.

    A claim that is prepared already keeps its devices, and the pods that came by a group. Its other pods are those that
    it is reserved for now.
    """
    if (known := ledger.claims.get(claim.uid)) is not None:
        return _again(known, claim)
    if policy.fault:
        return _not(Code.BAD_POLICY, f"no GPU can be granted until the policy is fixed: {policy.fault}")
    if stale := stale_fault(policy, node.inventory_age_s):
        return _not(Code.NODE_NOT_READY, stale)
    inventory = in_use(node.inventory, {claim.uid})  # after a boot it is prepared again
    units = {device_name(unit): unit for unit in inventory.units}
    all_found: list[_Found] = []
    for result in claim.results:
        found = _find(result, units.get(result.device), inventory, policy)
        if isinstance(found, Reason):
            uuid = units[result.device].uuid if result.device in units else ""
            return NotPrepared(replace(found, what=f"{shown(result.device)}: {found.what}"), uuid=uuid)
        all_found.append(found)
    whole = PreparedClaim(
        uid=claim.uid,
        namespace=claim.namespace,
        name=claim.name,
        pods=claim.pods,
        devices=tuple(each.device for each in all_found),
        owned=claim.owned,
        groups=claim.groups,
    )
    others = Others(ledger, ledger.usage())  # a claim that is to be prepared has no container yet
    held = _held_by_others(whole, all_found, others.usage, policy.dra.replicas)
    return held or _denied(whole, all_found, node, others, policy) or whole


def _not(code: Code, sentence: str) -> NotPrepared:
    return NotPrepared(Reason(code, sentence))


def _again(known: PreparedClaim, claim: AllocatedClaim) -> PreparedClaim | NotPrepared:
    if [each.identity for each in known.devices] == [each.identity for each in claim.results]:
        members = {uid: others for uid, others in known.members.items() if uid not in claim.pods}
        pods = {**claim.pods, **{uid: known.pods[uid] for uid in members}}
        return replace(known, pods=pods, owned=claim.owned, groups=claim.groups, members=members)
    had = ", ".join(dict.fromkeys(each.device for each in known.devices))
    return _not(
        Code.BAD_REQUEST, f"{known.called} is prepared with {had}, and its allocation names other devices now: {_ANEW}"
    )


def _find(result: AllocatedResult, unit: Unit | None, inventory: Inventory, policy: Policy) -> _Found | Reason:
    """Return the device of one result, or why no claim can have it."""
    if unit is None:
        return _unknown(inventory)
    if not policy.pool.offers(unit, pool := policy.dra.pool):
        why = (
            f"{called(unit)} is not in pool {quoted(pool)}, from which alone claims get GPUs on this node (dra.pool): "
            f"{_ANEW}"
        )
        return Reason(Code.NOT_ALLOWED, why)
    if why := why_not(unit, admin=result.admin):
        return cannot(called(unit), why, kubelet=True)
    request = _request(result, unit, policy.dra.replicas)
    if isinstance(request, Reason):
        return request
    as_allocated = asdict(replace(result, text=request.text))
    return _Found(ClaimedDevice(**as_allocated, uuid=unit.uuid, mode=request.mode or Mode.SHARED), unit, request)


def _unknown(inventory: Inventory) -> Reason:
    if inventory.fault:
        return Reason(Code.NODE_NOT_READY, "the GPUs of this node are not known", inventory.fault)
    has = clipped(", ".join(map(device_name, inventory.units)) or "none", _NAMES_SHOWN_MAX)
    return Reason(Code.NO_SUCH_GPU, f"this node has no such device, it has {has}: {_ANEW}")


def _request(result: AllocatedResult, unit: Unit, replicas: int) -> Claim | Reason:
    """Return what the result's configuration asks for, with its mode.

    A result for monitoring ignores its configuration.
    """
    given = Claim(key="configuration", text="", wanted=Devices((unit.uuid,)), kubelet=True)
    if result.admin:
        return replace(given, mode=Mode.SHARED, capabilities=MONITORING, admin=True)
    default = Mode.SHARED if replicas > 1 else Mode.EXCLUSIVE
    if not result.text:
        return replace(given, mode=default)
    try:
        asked = parse_claim(given.key, result.text, given=True)
    except RequestError as error:
        return Reason(Code.BAD_REQUEST, str(error))
    if asked.selectors or asked.wanted != Everything():
        return Reason(Code.BAD_REQUEST, "its configuration names GPUs, and the scheduler chooses them: leave that out.")
    if asked.mode is Mode.EXCLUSIVE and replicas > 1:
        return Reason(
            Code.BAD_REQUEST,
            f"its configuration asks for mode=exclusive, and {replicas} claims share each GPU of this node "
            "(dra.replicas)",
            cure="leave the mode out, or select devices of other nodes",
        )
    return replace(asked, wanted=given.wanted, mode=asked.mode or default, kubelet=True)


def _held_by_others(
    claim: PreparedClaim, all_found: Sequence[_Found], usage: Mapping[GpuUuid, Usage], replicas: int
) -> NotPrepared | None:
    """Return why the claim's GPUs are not free for it, or None."""
    for found in all_found:
        device, use = found.device, usage.get(found.device.uuid, UNUSED)
        if device.admin:
            continue
        if claim.holds[device.uuid] is not device.mode:
            return _not(Code.BAD_REQUEST, f"the claim has {device.device} in two modes at once: configure one.")
        held = use.held_from_claim(claim, device.mode)
        if not held and 1 < replicas <= use.shares - len(use.others & claim.pods.keys()):
            reason = no_share(found.unit, replicas, use)
            full = replace(reason, what=f"{device.device}: {reason.what}")
            return NotPrepared(full, holders=_only_claims(use), uuid=device.uuid)
        if held or (use.releasing is not None and use.releasing.pod_uid not in claim.pods):
            reason = busy(found.unit, PodUid(""), device.mode, use)
            said = replace(reason, what=f"{device.device}: {reason.what}", cure=f"wait until it is free, or {_ANEW}")
            return NotPrepared(said, released=not held, holders=_only_claims(use), uuid=device.uuid)
    return None


def _only_claims(use: Usage) -> tuple[PreparedClaim, ...]:
    """Return the claims on a GPU, or nothing if anyone but their pods holds it too."""
    return () if use.external or use.others else tuple(each.claim for each in use.claims.values())


def _denied(
    claim: PreparedClaim, all_found: Sequence[_Found], node: Node, others: Others, policy: Policy
) -> NotPrepared | None:
    """Return why policy lets no pod of the claim have its devices.

    None if one pod may, or if only its containers will tell. A group's pods are known by their namespace alone.
    """
    reason: Reason | None = None
    for uid, name in (*claim.pods.items(), *([(PodUid(""), "")] if claim.groups else [])):
        pod = Pod(id=PodId(""), uid=uid, name=name, namespace=claim.namespace)
        container = Container(id=ContainerId(""), name="", pod=pod)  # stands for the pod's containers
        verdict = _verdict(policy, container)
        if isinstance(verdict, Allowed):
            reason = _denied_pod(container, verdict, all_found, node, others)
        else:
            reason = Reason(Code.NOT_ALLOWED, verdict.sentence) if verdict else None
        if reason is None:
            return None
    return NotPrepared(reason) if reason else None


def _verdict(policy: Policy, container: Container) -> Verdict | None:
    """Return policy's verdict if the name of the pod or namespace alone settles it, or None."""
    for rule in policy.rule.rules:
        wide = replace(rule, container=None, runtime_handler=None, labels=None, qos=None)
        wide = wide if container.pod.name else replace(wide, pod=None)
        if wide.matches(container):
            return select(policy, container) if wide == rule else None
    return select(policy, container)


def _denied_pod(
    container: Container, allowed: Allowed, all_found: Sequence[_Found], node: Node, others: Others
) -> Reason | None:
    policy = allowed.terms.policy
    for text, admin in dict.fromkeys((each.request.text, each.request.admin) for each in all_found):
        alike = [each for each in all_found if (each.request.text, each.request.admin) == (text, admin)]
        asked = check_request(alike[0].request, container, policy, allowed, node)
        if isinstance(asked, Reason):
            return asked
        if reason := node_fault(asked.capabilities, node):
            return reason
        units = tuple(each.unit for each in alike)
        if not admin and (reason := over_limit(asked, container, node.inventory, others, units, claim=True)):
            return reason
    return None
