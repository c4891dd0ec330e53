"""The decision: what a container asks, whether it may, which GPUs it gets, what is added to it.

Pure and total: any request, node, ledger and policy give a Pass, an Inject or a Refuse, and nothing else happens.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.place import Asker, place, why_not
from nri_gpu.domain.claim import Claim, Everything, Mode, Nothing
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import NOT_ASKED, Code, Decision, Grant, Inject, Pass, Reason, Refuse
from nri_gpu.domain.edits import NO_EDITS, Edits
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import Capabilities, Capability, DriverFiles, Gpu, GpuUuid, Node, Unit, closure, whole
from nri_gpu.injection.devices import missing_capability_major, missing_modules, two_versions
from nri_gpu.injection.env import VISIBLE_DEVICES, disarmed
from nri_gpu.injection.plan import Share, plan
from nri_gpu.offer import Bidder, offered, over_limit
from nri_gpu.policy.model import Disarm, Policy, PrivilegedAction, VisibleDevices
from nri_gpu.policy.select import Allowed, Denied, Ignored, select
from nri_gpu.policy.stale import stale_fault
from nri_gpu.request.environment import VARIABLE, claim_of_environment
from nri_gpu.request.parse import parse_claim, select_annotation
from nri_gpu.requirements.check import unmet
from nri_gpu.requirements.facts import Facts, GpuFacts

NVIDIA: Final = "nvidia.com"  # vendors of CDI devices end in it
NAMES_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class BrokenPolicy:
    """No usable policy: every container that asks is refused. fault: what is wrong with the file."""

    fault: str


def decide(container: Container, node: Node, ledger: Ledger, policy: Policy | BrokenPolicy) -> Decision:
    """What to do with a container that is about to be created."""
    try:
        asked = select_annotation(container.pod.annotations, container.annotations, container.name)
        claim = parse_claim(*asked) if asked else _of_environment(container, policy)
        if claim is None:
            return _passed(container, node, policy, NOT_ASKED)
    except RequestError as error:
        return _refuse(Code.BAD_REQUEST, _ended(str(error)))
    if isinstance(claim.wanted, Nothing):
        return _nothing(container, node, policy)
    if isinstance(policy, BrokenPolicy):
        return _refuse(Code.BAD_POLICY, _ended(f"no GPU can be granted before the policy is mended: {policy.fault}"))
    match verdict := select(policy, container):
        case Denied():
            return _refuse(Code.NOT_ALLOWED, verdict.sentence)
        case Ignored():
            return _passed(container, node, policy, verdict.sentence)
    if sentence := _not_this(claim, container, policy):
        return _refuse(Code.NOT_ALLOWED, sentence)
    return _grant(claim, container, node, ledger, policy, verdict)


def _of_environment(container: Container, policy: Policy | BrokenPolicy) -> Claim | None:
    """What a container without an annotation asks by its environment, where policy lets it. Raises: RequestError."""
    value = container.env.get(VARIABLE)
    if not value or not isinstance(policy, Policy) or policy.environment.may_ask.first(container.pod.namespace) is None:
        return None
    return claim_of_environment(value)


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


def _grant(
    claim: Claim, container: Container, node: Node, ledger: Ledger, policy: Policy, allowed: Allowed
) -> Decision:
    terms = allowed.terms
    mode = claim.mode or terms.mode
    capabilities = closure(terms.capabilities if claim.capabilities is None else claim.capabilities)
    if sentence := terms.denied_mode(mode) or terms.denied_capabilities(capabilities):
        return _refuse(Code.NOT_ALLOWED, sentence)
    if reason := _other_hand(container, node):
        return Refuse(reason)
    if sentence := stale_fault(policy, node.inventory_age_s):
        return _refuse(Code.NODE_NOT_READY, sentence)
    if reason := _hindrance(capabilities, node):
        return Refuse(reason)
    ledger = ledger.without_predecessors(container.id, container.pod.uid, container.name)
    gpus: tuple[Unit, ...] | Reason
    if held := _held(container, node, ledger):
        gpus, mode = held
    else:
        bidder = Bidder(container, mode, node.inventory, ledger, terms)
        offer = offered(bidder, claim)
        gpus = place(claim, Asker(container.pod.uid, mode), offer.inventory, ledger)
        gpus = offer.explained(gpus) if isinstance(gpus, Reason) else over_limit(bidder, gpus) or gpus
    if isinstance(gpus, Reason):
        return Refuse(gpus)
    if reason := missing_capability_major(gpus, node.inventory.majors):
        return Refuse(reason)
    if reason := _requirement(container, gpus, node, policy):
        return Refuse(reason)
    share = Share(
        container=container,
        gpus=gpus,
        capabilities=capabilities,
        inventory=node.inventory,
        tree=node.driver.trees.get(capabilities) if node.driver else None,
        void=policy.environment.visible_devices is VisibleDevices.VOID,
    )
    grant = Grant.to(container, tuple(gpu.uuid for gpu in gpus), mode, node.generation)
    edits = plan(share)
    note = "; ".join(filter(None, (_unreached(container, edits), _seen_by_privileged(container, node, policy))))
    return Inject(edits, grant, allowed.rule, note=note)


def _seen_by_privileged(container: Container, node: Node, policy: Policy | BrokenPolicy) -> str:
    """What a privileged container can use past its grant, where policy wants to hear of it."""
    quiet = not isinstance(policy, Policy) or policy.privileged.action is PrivilegedAction.ALLOW
    if quiet or not container.privileged or not node.gpus:
        return ""
    return "it is privileged: it can use every GPU of this node, whatever is granted to it or to others"


def _unreached(container: Container, edits: Edits) -> str:
    """What of our environment the program will not see."""
    names = sorted(container.env_twice & edits.env.keys())
    return f"image and pod both set {', '.join(names)}: the pod's value stays, ours has no effect" if names else ""


def _other_hand(container: Container, node: Node) -> Reason | None:
    """Why a container that carries GPU nodes of others is not served, not even with `none`: they would go unseen."""
    held = "" if container.privileged else _nvidia_nodes(container, node)
    if not (held := held or _nvidia_names(container)):
        return None
    return Reason(
        Code.HELD_BY_OTHERS,
        f"the container already holds {held}, put there by a device plugin, CDI or another NRI plugin: two "
        "injectors never serve one container; drop its resource request or its gpu.nri.io annotation.",
    )


def _hindrance(capabilities: Capabilities, node: Node) -> Reason | None:
    """What makes any grant on this node impossible, whatever GPUs are free."""
    if node.inventory.fault:
        return Reason(Code.NODE_NOT_READY, _ended(f"this node cannot grant GPUs: {node.inventory.fault}"))
    if not node.inventory.gpus:
        return None  # place() says it better
    if reason := missing_modules(capabilities, node.inventory):
        return reason
    if node.driver is None:
        fault = node.driver_fault or "the driver's files are not found yet; try again"
        return Reason(Code.NODE_NOT_READY, _ended(f"this node cannot grant GPUs: {fault}"))
    if fault := _generation_fault(node.driver.version, node):
        return Reason(Code.NODE_NOT_READY, f"this node cannot grant GPUs: {fault}")
    if not node.inventory.simulated and capabilities not in node.driver.trees:
        return Reason(Code.NODE_NOT_READY, _not_staged(capabilities, node.driver))
    return None


def _not_staged(capabilities: Capabilities, driver: DriverFiles) -> str:
    known = frozenset[Capability]().union(*driver.trees)
    if lacking := [each for each in Capability if each in capabilities - known]:
        return (
            f"the driver on this node has no files for {', '.join(lacking)}: install that part of it, ask without, or "
            "run the pod where it is."
        )
    if capabilities == {Capability.COMPAT32}:
        return "compat32 means the 32-bit libraries of other capabilities: name them too."
    wanted = ", ".join(sorted(capabilities))
    return f"the driver's files for {wanted} are not staged on this node; try again."


def _generation_fault(files: str, node: Node) -> str:
    """Why libraries of this version would not work with the kernel module that is loaded; empty when they would."""
    if node.inventory.simulated:
        return ""
    if node.module_version == "":
        return (
            f"the nvidia kernel module was unloaded, and the driver's libraries are {files}: a driver is being "
            "replaced or was removed; once `modprobe nvidia` has loaded it, try again."
        )
    for kernel in filter(None, (node.module_version, node.inventory.driver_version)):
        if kernel != files:
            return f"{two_versions(files, kernel)}; containers created in between would not start properly."
    return ""


def _requirement(container: Container, gpus: tuple[Unit, ...], node: Node, policy: Policy) -> Reason | None:
    """What the image requires, and the node or one of the GPUs chosen for it is not."""
    if not policy.requirements.check:
        return None
    each = tuple(GpuFacts(gpu.arch, gpu.brand) for gpu in map(whole, gpus))
    facts = Facts(node.inventory.driver_version, node.inventory.cuda_version, each)
    failed = unmet(container.env, facts, may_disable=policy.requirements.may_disable)
    return Reason(Code.REQUIREMENT_NOT_MET, failed.sentence) if failed else None


def _held(container: Container, node: Node, ledger: Ledger) -> tuple[tuple[Unit, ...], Mode] | None:
    """What this very container was granted before, and how: asking twice gives the same."""
    entry = ledger.entries.get(container.id)
    if entry is None or not entry.holds or entry.grant.mode is None:
        return None
    gpus = tuple(unit for unit in node.inventory.units if unit.uuid in entry.grant.uuids and not why_not(unit))
    return (gpus, entry.grant.mode) if gpus and len(gpus) == len(entry.grant.uuids) else None


def needs_grant(container: Container, policy: Policy | BrokenPolicy) -> str:
    """The annotation key by which a container that exists already must hold a grant; empty when it need not."""
    try:
        asked = select_annotation(container.pod.annotations, {}, container.name)
        claim = parse_claim(*asked) if asked else _of_environment(container, policy)
    except RequestError as error:
        return error.key  # it should never have been created
    if claim is None or isinstance(claim.wanted, Nothing):
        return ""
    ignored = isinstance(policy, Policy) and isinstance(select(policy, container), Ignored)
    return "" if ignored else claim.key


def may_ask_by_environment(policy: Policy | BrokenPolicy) -> bool:
    """Whether NVIDIA_VISIBLE_DEVICES is anybody's request."""
    return isinstance(policy, Policy) and bool(policy.environment.may_ask.patterns)


def reads_environment(policy: Policy | BrokenPolicy) -> bool:
    """Whether a container with NVIDIA_VISIBLE_DEVICES needs a look although it asks for nothing else."""
    disarms = isinstance(policy, Policy) and policy.environment.disarm is Disarm.ALL
    return disarms or may_ask_by_environment(policy)


def foreign_uuids(container: Container, node: Node) -> frozenset[GpuUuid]:
    """GPUs and MIG devices whose nodes a container holds, by whoever's hand.

    With the node of a GPU in MIG mode, those of its MIG devices whose capability nodes it holds too, so that a device
    plugin's container is in the way of nobody else; all of them where it holds none, since we cannot tell.
    """
    majors = node.inventory.majors
    minors = {device.minor for device in container.devices if device.major == majors.nvidia}
    held = [gpu for gpu in node.gpus if gpu.minor_number in minors]
    if not any(gpu.mig for gpu in held):
        return frozenset(gpu.uuid for gpu in held)
    caps = {device.minor for device in container.devices if device.major == majors.nvidia_caps}
    return frozenset(uuid for gpu in held for uuid in (gpu.uuid, *_held_parts(gpu, caps)))


def _held_parts(gpu: Gpu, caps: Set[int]) -> frozenset[GpuUuid]:
    known = frozenset(device.uuid for device in gpu.mig if device.compute_instance_minor in caps)
    return known or frozenset(device.uuid for device in gpu.mig)


def _nvidia_nodes(container: Container, node: Node) -> str:
    uuids = foreign_uuids(container, node)
    return ", ".join(f"/dev/nvidia{gpu.minor_number}" for gpu in node.gpus if gpu.uuid in uuids)


def _nvidia_names(container: Container) -> str:
    """CDI names of NVIDIA's own, its device plugin's or its DRA drivers' devices.

    All their vendors end alike: `nvidia.com`, `k8s.device-plugin.nvidia.com`, `k8s.gpu.nvidia.com` and so on.
    """
    vendors = ((name, name.partition("/")[0]) for name in container.cdi_devices)
    named = [name for name, vendor in vendors if f".{vendor}".endswith(f".{NVIDIA}")]
    return ", ".join(named[:NAMES_SHOWN]) + (", ..." if len(named) > NAMES_SHOWN else "")


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


def _ended(sentence: str) -> str:
    """With its full stop, once."""
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."
