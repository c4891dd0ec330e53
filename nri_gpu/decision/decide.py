"""The decision: what a container asks, whether it may, which GPUs it gets, what is added to it.

Pure and total: any request, node, ledger and policy give a Pass, an Inject or a Refuse, and nothing else happens.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from nri_gpu.allocation.external import beyond, completable, foreign_units, nvidia_names, nvidia_nodes, unknown_nodes
from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.placement import Asker, place, why_not
from nri_gpu.allocation.reservations import redeemed
from nri_gpu.decision.candidates import Bidder, keeps_nothing, offered, over_limit
from nri_gpu.decision.claim import claim_of
from nri_gpu.decision.eligibility import ended, hindrance
from nri_gpu.decision.kinds import Bid, Fitted, Kind, Kinds, key_of
from nri_gpu.decision.mps import not_one
from nri_gpu.decision.plan import plan_for
from nri_gpu.domain.claim import Claim, Everything, Mode, Nothing
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import NOT_ASKED, Code, Decision, Grant, Inject, Pass, Reason, Refuse
from nri_gpu.domain.edits import NO_EDITS, Edits
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import Capabilities, Unit, closure
from nri_gpu.domain.kubelet import REQUIRED_DESTINATION
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import Node
from nri_gpu.injection.devices import missing_capability_major
from nri_gpu.injection.env import VISIBLE_DEVICES, disarmed
from nri_gpu.injection.extras import ExtraRequest, extra_parts, kept_limits
from nri_gpu.injection.mps import client_hindrance
from nri_gpu.policy.model import BrokenPolicy as BrokenPolicy
from nri_gpu.policy.model import Complete, Disarm, Policy, PrivilegedAction
from nri_gpu.policy.select import Allowed, Denied, Ignored, Terms, select, stale_fault
from nri_gpu.request.environment import VARIABLE

KINDS: Final = Kinds()  # what is remembered decides nothing, only how soon it is known


def decide(container: Container, node: Node, ledger: Ledger, policy: Policy | BrokenPolicy) -> Decision:
    """What to do with a container that is about to be created."""
    key = key_of(container, policy)
    kind = KINDS.find(key, node, policy)
    if kind is None:
        bid = _bid(container, node, policy)
        if not isinstance(bid, Bid):
            return _held_back(bid, container)
        kind = Kind(bid)
        KINDS.keep(key, node, policy, kind)
    return _grant(kind, container, node, ledger)


def _bid(container: Container, node: Node, policy: Policy | BrokenPolicy) -> Bid | Decision:
    """What it competes for; or the decision, where what others hold has no part in it."""
    if container.kubelet is not None and container.kubelet.waits:
        return _refuse(Code.NODE_NOT_READY, ended(f"{container.kubelet.key}: {container.kubelet.fault}"))
    try:
        claim = claim_of(container, policy)
    except RequestError as error:
        return _refuse(Code.BAD_REQUEST, ended(str(error)))
    if claim is None:
        return _unasked(container, node, policy)
    if isinstance(claim.wanted, Nothing):
        return _nothing(container, node, policy)
    if isinstance(policy, BrokenPolicy):
        return _refuse(Code.BAD_POLICY, ended(f"no GPU can be granted before the policy is mended: {policy.fault}"))
    match verdict := select(policy, container):
        case Denied():
            return _refuse(Code.NOT_ALLOWED, verdict.sentence)
        case Ignored():
            return _passed(container, node, policy, verdict.sentence)
    if sentence := _not_this(claim, container, policy):
        return _refuse(Code.NOT_ALLOWED, sentence)
    return _on_terms(claim, container, node, policy, verdict)


def _held_back(decision: Decision, container: Container) -> Decision:
    """It could not start if it were let alone: better refused with our sentence than failed with the runtime's."""
    if not isinstance(decision, Pass) or REQUIRED_DESTINATION not in container.mounts:
        return decision
    why = decision.why.rstrip(".")
    return _refuse(
        Code.NOT_ALLOWED,
        f"the kubelet gave it GPUs, but {why}: have policy allow it, or take them out of its resources.limits.",
    )


def _not_this(claim: Claim, container: Container, policy: Policy) -> str:
    """What policy has against a request or its container, whoever may ask."""
    if claim.key == VARIABLE and isinstance(claim.wanted, Everything) and not policy.environment.may_ask_all:
        return (
            f"{VARIABLE}=all asks for every GPU, and every CUDA image says so without being asked: name GPUs in it, "
            "say void or use a gpu.nri.io annotation, or set environment.may_ask_all in the policy."
        )
    if container.privileged and policy.privileged.action is PrivilegedAction.DENY:
        return (
            "a privileged container can use every GPU of this node whatever it is granted, so privileged.action in the "
            "policy denies its request: make it unprivileged, or change that setting."
        )
    return ""


def _nothing(container: Container, node: Node, policy: Policy | BrokenPolicy) -> Decision:
    """`none` asks for nothing, so no policy is asked either; the mark says that somebody decided."""
    if reason := _other_hand(container, node):
        return Refuse(reason)
    passed = _passed(container, node, policy, NOT_ASKED)
    if isinstance(passed, Refuse):
        return passed
    return Inject(passed.edits, Grant.to(container, (), None, node.generation), note=passed.note)


def _unasked(container: Container, node: Node, policy: Policy | BrokenPolicy) -> Decision:
    """Let alone, unless policy completes what a device plugin gave."""
    wanted = isinstance(policy, Policy) and policy.foreign.complete is Complete.ALL and completable(container, node)
    if not isinstance(policy, Policy) or not wanted:
        return _passed(container, node, policy, NOT_ASKED)
    capabilities = closure(policy.defaults.capabilities)
    if sentence := Terms(policy=policy).denied_capabilities(capabilities):
        return _refuse(Code.NOT_ALLOWED, sentence)
    if reason := hindrance(capabilities, node):
        return Refuse(reason)
    odd = unknown_nodes(container, node)
    if odd or not foreign_units(container, node):
        return _passed(container, node, policy, f"not completed: {odd or 'what it holds'} is of no GPU known here")
    return _complete(container, capabilities, node, policy, "foreign.complete")


def _asked_of_others(claim: Claim, container: Container, capabilities: Capabilities, node: Node) -> Reason | None:
    """Why a container with GPUs of others' may not even shape what it holds."""
    if reason := hindrance(capabilities, node):
        return reason
    odd, held = unknown_nodes(container, node), foreign_units(container, node)
    if odd or not held:
        return Reason(
            Code.HELD_BY_OTHERS,
            f"the container already holds {odd or 'a GPU in MIG mode'} by others' hand, of no GPU or MIG device known "
            "on this node, so it cannot be completed: see `nri-gpu gpus` there, or drop its gpu.nri.io annotation.",
        )
    if more := beyond(claim, container, held, node.inventory):
        return Reason(
            Code.HELD_BY_OTHERS,
            f"the container already holds {nvidia_nodes(container, node)}, put there by a device plugin or another NRI "
            f"plugin, and {claim.key} asks for {more}: beside others it may only shape what they gave, so ask for no "
            "more than that.",
        )
    return None


def _on_terms(claim: Claim, container: Container, node: Node, policy: Policy, allowed: Allowed) -> Bid | Decision:
    terms = allowed.terms
    mode = claim.mode or terms.mode
    capabilities = closure(terms.capabilities if claim.capabilities is None else claim.capabilities)
    if sentence := terms.denied_mode(mode) or terms.denied_capabilities(capabilities):
        return _refuse(Code.NOT_ALLOWED, sentence)
    extras = claim.extras if claim.extras.asked else terms.extras
    if sentence := terms.denied_extras(extras.asked):
        return _refuse(Code.NOT_ALLOWED, sentence)
    seat = _seat(claim, container, mode, node, terms)
    if isinstance(seat, Reason):
        return Refuse(seat)
    if reason := _other_hand(container, node):
        if policy.foreign.complete is Complete.NONE or not completable(container, node):
            return Refuse(reason)
        if reason := _asked_of_others(claim, container, capabilities, node):
            return Refuse(reason)
        return _complete(container, capabilities, node, policy, allowed.rule)
    if sentence := stale_fault(policy, node.inventory_age_s):
        return _refuse(Code.NODE_NOT_READY, sentence)
    if reason := hindrance(capabilities, node):
        return Refuse(reason)
    free = seat is None and keeps_nothing(terms)
    return Bid(claim, terms, mode, capabilities, extras, allowed.rule, free=free, seat=seat)


def _grant(kind: Kind, container: Container, node: Node, ledger: Ledger) -> Decision:
    chosen = _chosen(kind.bid, container, node, ledger)
    if isinstance(chosen, Reason):
        return Refuse(chosen)
    gpus, mode, seat = chosen
    uuids = tuple([gpu.uuid for gpu in gpus])
    fitted = kind.fitted.get((uuids, seat))
    if fitted is None:
        made = _fitted(kind.bid, gpus, seat, container, node)
        if isinstance(made, Reason):
            return Refuse(made)
        kind.keep((uuids, seat), fitted := made)
    worn = fitted.outfit
    grant = Grant.to(container, uuids, mode, worn.generation, seat)
    return Inject(worn.edits, grant, kind.bid.rule, note=fitted.note, compat=worn.compat)


def _fitted(bid: Bid, gpus: tuple[Unit, ...], seat: Seat | None, container: Container, node: Node) -> Fitted | Reason:
    """All that comes with these GPUs, or what is in the way."""
    policy, extras = bid.terms.policy, bid.extras
    extra = extra_parts(ExtraRequest(extras, gpus, bid.capabilities, node, container))
    if isinstance(extra, Reason):
        return extra
    made = plan_for(container, gpus, bid.capabilities, node, policy, extra=extra, mps=seat)
    if isinstance(made, Reason):
        return made
    notes = (
        _unreached(container, made.edits),
        kept_limits(extras, container),
        _seen_by_privileged(container, node, policy),
    )
    return Fitted(made, "; ".join(filter(None, notes)))


Chosen = tuple[tuple[Unit, ...], Mode, Seat | None]


def _chosen(bid: Bid, container: Container, node: Node, ledger: Ledger) -> Chosen | Reason:
    """The GPUs and how they are held: those that this very container has already, or the best it may have."""
    ledger = redeemed(ledger, container)
    ledger = ledger.without_predecessors(container.id, container.pod.uid, container.name)
    if held := _held(container, node, ledger):
        return held
    mode, terms, seat = bid.mode, bid.terms, bid.seat
    asker = Asker(container.pod.uid, mode, terms.policy.placement.strategy)
    if bid.free:
        gpus = place(bid.claim, asker, node.inventory, ledger)
        return gpus if isinstance(gpus, Reason) else _nodes_missing(gpus, node) or (gpus, mode, seat)
    bidder = Bidder(container, mode, node.inventory, ledger, terms, seat)
    offer = offered(bidder, bid.claim)
    gpus = place(bid.claim, asker, offer.inventory, ledger)
    if isinstance(gpus, Reason):
        return offer.explained(gpus)
    seat = seat and replace(seat, folder=node.mps.folder(gpus[0].uuid))
    return over_limit(bidder, gpus) or _nodes_missing(gpus, node) or (gpus, mode, seat)


def _nodes_missing(gpus: tuple[Unit, ...], node: Node) -> Reason | None:
    return missing_capability_major(gpus, node.inventory.majors)


def _seat(claim: Claim, container: Container, mode: Mode, node: Node, terms: Terms) -> Seat | Reason | None:
    """What it would have of an MPS daemon, or why it cannot have one; None in other modes."""
    if mode is not Mode.MPS:
        return None
    mps = terms.policy.mps
    if sentence := mps.denied(claim.sharing, terms.source):
        return Reason(Code.NOT_ALLOWED, sentence)
    if node.mps.fault:
        return Reason(Code.NODE_NOT_READY, node.mps.fault)
    return not_one(claim) or client_hindrance(container) or mps.seat(claim.sharing, container.uid)


def _complete(container: Container, capabilities: Capabilities, node: Node, policy: Policy, rule: str) -> Decision:
    """What it lacks to use the GPUs that it holds already; a grant of nothing, since none of them is ours to grant."""
    held = foreign_units(container, node)
    made = plan_for(container, held, capabilities, node, policy, completes=True)
    if isinstance(made, Reason):
        return Refuse(made)
    grant, uuids = Grant.to(container, (), None, made.generation), tuple(unit.uuid for unit in held)
    note = _unreached(container, made.edits)
    return Inject(made.edits, grant, rule, note=note, compat=made.compat, completes=uuids)


def _seen_by_privileged(container: Container, node: Node, policy: Policy | BrokenPolicy) -> str:
    """What a container that is privileged, or nearly, can use past its grant, where policy wants to hear of it."""
    quiet = not isinstance(policy, Policy) or policy.privileged.action is PrivilegedAction.ALLOW
    if quiet or not (container.privileged or container.wildcard) or not node.gpus:
        return ""
    how = "is privileged" if container.privileged else "opens devices by a wildcard rule of its cgroup"
    return f"it {how}: it can use every GPU of this node, whatever is granted to it or to others"


def _unreached(container: Container, edits: Edits) -> str:
    """What of our environment the program will not see."""
    names = sorted(container.env_twice & edits.env.keys())
    return f"image and pod both set {', '.join(names)}: the pod's value stays, ours has no effect" if names else ""


def _other_hand(container: Container, node: Node) -> Reason | None:
    """Why a container that carries GPU nodes of others is not served, not even with `none`: they would go unseen."""
    if not (container.devices or container.opened or container.cdi_devices):
        return None
    # A node of no GPU known here counts too: the inventory may be new, or have lost one that a device plugin gave.
    held = "" if container.privileged else nvidia_nodes(container, node) or unknown_nodes(container, node)
    if not (held := held or nvidia_names(container)):
        return None
    return Reason(
        Code.HELD_BY_OTHERS,
        f"the container already holds {held}, put there by a device plugin, CDI or another NRI plugin: two "
        "injectors never serve one container; drop its resource request or its gpu.nri.io annotation.",
    )


def _held(container: Container, node: Node, ledger: Ledger) -> tuple[tuple[Unit, ...], Mode, Seat | None] | None:
    """What this very container was granted before, and how: asking twice gives the same."""
    entry = ledger.entries.get(container.id)
    if entry is None or not entry.holds or entry.grant.mode is None:
        return None
    gpus = tuple(unit for unit in node.inventory.units if unit.uuid in entry.grant.uuids and not why_not(unit))
    return (gpus, entry.grant.mode, entry.grant.seat) if gpus and len(gpus) == len(entry.grant.uuids) else None


def _passed(container: Container, node: Node, policy: Policy | BrokenPolicy, why: str) -> Pass | Refuse:
    edits = _disarm(container, policy)
    if edits.env and VISIBLE_DEVICES in container.env_twice:
        return _refuse(
            Code.NOT_ALLOWED,
            f"policy disarms {VISIBLE_DEVICES}, but image and pod both set it and NRI reaches only one of the two: "
            "leave it out of the pod's environment.",
        )
    return Pass(edits, why, _seen_by_privileged(container, node, policy))


def _disarm(container: Container, policy: Policy | BrokenPolicy) -> Edits:
    armed = isinstance(policy, Policy) and policy.environment.disarm is Disarm.ALL
    return Edits.of(env=disarmed(container.env)) if armed and container.env else NO_EDITS


def _refuse(code: Code, sentence: str) -> Refuse:
    return Refuse(Reason(code, sentence))
