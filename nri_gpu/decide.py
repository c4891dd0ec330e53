"""The decision: what a container asks, whether it may, which GPUs it gets, what is added to it.

Pure and total: any request, node, ledger and policy give a Pass, an Inject or a Refuse, and nothing else happens.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.place import Asker, place, why_not
from nri_gpu.domain.claim import Claim, Mode, Nothing
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import NOT_ASKED, Code, Decision, Grant, Inject, Pass, Reason, Refuse
from nri_gpu.domain.edits import NO_EDITS, Edits
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import (
    Capabilities,
    Capability,
    DriverFiles,
    Gpu,
    GpuUuid,
    Inventory,
    Node,
    Unit,
    closure,
    whole,
)
from nri_gpu.injection.devices import missing_capability_major, missing_modules, two_versions
from nri_gpu.injection.env import VISIBLE_DEVICES, disarmed
from nri_gpu.injection.plan import Share, plan
from nri_gpu.policy.model import Disarm, Policy, VisibleDevices
from nri_gpu.policy.select import Denied, Ignored, denied_capabilities, select
from nri_gpu.request.parse import parse_claim, select_annotation
from nri_gpu.requirements.check import stated_in, unmet
from nri_gpu.requirements.facts import Facts, GpuFacts

NVIDIA: Final = "nvidia.com"  # vendors of CDI devices end in it
NAMES_SHOWN: Final = 3
# Longer ones are not worth keeping: they come from whoever made the pod.
CLAIM_KEPT: Final = 256  # characters
REQUIREMENT_KEPT: Final = 4096  # characters; CUDA images have up to 2.2 kB of them


@dataclass(frozen=True, slots=True)
class BrokenPolicy:
    """No usable policy: every container that asks is refused. fault: what is wrong with the file."""

    fault: str


def decide(container: Container, node: Node, ledger: Ledger, policy: Policy | BrokenPolicy) -> Decision:
    """What to do with a container that is about to be created."""
    try:
        asked = select_annotation(container.pod.annotations, container.annotations, container.name)
        if asked is None:
            return _passed(container, policy, NOT_ASKED)
        claim = _claim(*asked)
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
            return _passed(container, policy, verdict.sentence)
    return _grant(claim, container, node, ledger, policy, verdict.rule)


def _claim(key: str, value: str) -> Claim:
    """What is asked. Most containers of a node ask in the same few words, so these are parsed once."""
    return _kept_claim(key, value) if len(value) <= CLAIM_KEPT else parse_claim(key, value)


_kept_claim = lru_cache(maxsize=256)(parse_claim)


def _nothing(container: Container, node: Node, policy: Policy | BrokenPolicy) -> Decision:
    """`none` asks for nothing, so no policy is asked either; the mark says that somebody decided."""
    if reason := _other_hand(container, node):
        return Refuse(reason)
    passed = _passed(container, policy, NOT_ASKED)
    return Inject(passed.edits, Grant.to(container, (), None, node.generation)) if isinstance(passed, Pass) else passed


def _grant(claim: Claim, container: Container, node: Node, ledger: Ledger, policy: Policy, rule: str) -> Decision:
    mode = claim.mode or policy.defaults.mode
    capabilities = closure(policy.defaults.capabilities if claim.capabilities is None else claim.capabilities)
    if sentence := denied_capabilities(policy, capabilities):
        return _refuse(Code.NOT_ALLOWED, sentence)
    if reason := _other_hand(container, node):
        return Refuse(reason)
    if reason := _hindrance(capabilities, node):
        return Refuse(reason)
    ledger = ledger.without_predecessors(container.id, container.pod.uid, container.name)
    gpus: tuple[Unit, ...] | Reason
    if held := _held(container, node, ledger):
        gpus, mode = held
    else:
        gpus = place(claim, Asker(container.pod.uid, mode), node.inventory, ledger)
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
    grant = Grant.to(container, tuple([gpu.uuid for gpu in gpus]), mode, node.generation)
    edits = plan(share)
    return Inject(edits, grant, rule, note=_unreached(container, edits))


def _unreached(container: Container, edits: Edits) -> str:
    """What of our environment the program will not see."""
    names = sorted(container.env_twice & edits.env.keys())
    return f"image and pod both set {', '.join(names)}: the pod's value stays, ours has no effect" if names else ""


def _other_hand(container: Container, node: Node) -> Reason | None:
    """Why a container that carries GPU nodes of others is not served, not even with `none`: they would go unseen."""
    if not (container.devices or container.cdi_devices):
        return None
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
    stated = stated_in(container.env) if policy.requirements.check else ()
    if not stated:
        return None
    short = sum(len(value) for _, value in stated) <= REQUIREMENT_KEPT
    judge = _kept_judgement if short else _judgement
    return judge(stated, gpus, node.inventory, policy.requirements.may_disable)


def _judgement(
    stated: tuple[tuple[str, str], ...], gpus: tuple[Unit, ...], inventory: Inventory, may_disable: bool
) -> Reason | None:
    each = tuple(GpuFacts(gpu.arch, gpu.brand) for gpu in map(whole, gpus))
    facts = Facts(inventory.driver_version, inventory.cuda_version, each)
    failed = unmet(dict(stated), facts, may_disable=may_disable)
    return Reason(Code.REQUIREMENT_NOT_MET, failed.sentence) if failed else None


# Images are few, and what one requires costs more to check than all the rest of a decision.
_kept_judgement = lru_cache(maxsize=64)(_judgement)


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
        claim = parse_claim(*asked) if asked else None
    except RequestError as error:
        return error.key  # it should never have been created
    if claim is None or isinstance(claim.wanted, Nothing):
        return ""
    ignored = isinstance(policy, Policy) and isinstance(select(policy, container), Ignored)
    return "" if ignored else claim.key


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


def _passed(container: Container, policy: Policy | BrokenPolicy, why: str) -> Pass | Refuse:
    edits = _disarm(container, policy)
    if edits.env and VISIBLE_DEVICES in container.env_twice:
        return _refuse(
            Code.NOT_ALLOWED,
            f"policy disarms {VISIBLE_DEVICES}, but image and pod both set it and NRI reaches only one of the two: "
            "leave it out of the pod's environment.",
        )
    return Pass(edits, why)


def _disarm(container: Container, policy: Policy | BrokenPolicy) -> Edits:
    armed = isinstance(policy, Policy) and policy.environment.disarm is Disarm.ALL
    return Edits.of(env=disarmed(container.env)) if armed and container.env else NO_EDITS


def _refuse(code: Code, sentence: str) -> Refuse:
    return Refuse(Reason(code, sentence))


def _ended(sentence: str) -> str:
    """With its full stop, once."""
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."
