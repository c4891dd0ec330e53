"""A container's request: its pod's annotation, what the kubelet allocated, or NVIDIA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from nri_gpu.decision.mps_seats import MPS_IN_CLUSTER
from nri_gpu.domain.allocation import Allocated, KubeletAllocation, gpu_groups
from nri_gpu.domain.container import Container
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import Capability
from nri_gpu.domain.gpu_request import Claim, Count, Devices, Everything, Mode, Nothing
from nri_gpu.domain.text import counted
from nri_gpu.policy.model import Disarm, Otherwise, Policy
from nri_gpu.policy.select import Ignored, select
from nri_gpu.request.annotation import POD_WIDE, kubelet_key, our_keys, parse_claim, select_annotation
from nri_gpu.request.environment import VARIABLE, claim_of_environment, is_unit_name, named_devices

MONITORING: Final = frozenset({Capability.UTILITY})  # what a container with admin access gets of the driver


def claim_of(container: Container, policy: Policy) -> Claim | None:
    """Return the request of a container that is about to be created, or None. Raises: RequestError."""
    return _claim(container, container.annotations, policy)


def asked_for_pod(container: Container) -> Claim | None:
    """Return the request for GPUs that an annotation of the whole pod makes for this container too, or None."""
    try:
        asked = select_annotation(container.pod.annotations, container.annotations, container.name)
        claim = parse_claim(*asked, given=True) if asked and asked[0] in POD_WIDE else None
    except RequestError:  # the decision refuses it
        return None
    return None if claim is None or isinstance(claim.wanted, Nothing) else claim


def needs_grant(container: Container, policy: Policy, *, starts: bool = False) -> str:
    """Return the annotation or variable that obliges an existing container to hold a grant, or empty.

    starts: the container is about to start. Then a device plugin's NVIDIA_VISIBLE_DEVICES counts too, if nri-gpu
    injects for that plugin, or serves a resource that was that plugin's. A running container may have been served by
    NVIDIA's runtime, which leaves no trace here.
    """
    if container.markers:
        return next(iter(container.markers))
    try:
        claim = _claim(container, {}, policy)  # its own annotations may be ours or another plugin's
    except RequestError as error:
        return error.key  # it should never have been created
    key = kubelet_key(container.annotations)  # an allocation of the kubelet is a request, whether it is valid or not
    if not key and claim is not None and not isinstance(claim.wanted, Nothing):
        key = claim.key
    if not key and starts and _named_by_device_plugin(container, policy):
        key = VARIABLE
    return "" if key and is_ignored(container, policy) else key


def asks_in_pod(container: Container, policy: Policy) -> str:
    """Return the key or variable by which this container or its pod asks for GPUs, or for none of them; else empty."""
    keys = [*our_keys(container.pod.annotations), *container.markers, kubelet_key(container.annotations)]
    if container.kubelet:
        keys.append(container.kubelet.key)
    if container.env.get(VARIABLE) and policy.environment.may_ask.match(container.pod.namespace):
        keys.append(VARIABLE)
    return next(filter(None, keys), "")


def is_ignored(container: Container, policy: Policy) -> bool:
    """Return whether policy ignores what this container asks for: only rules that ignore are matched first."""
    ignores = policy.namespaces.otherwise is Otherwise.IGNORE
    ignores = ignores or any(
        each.otherwise is Otherwise.IGNORE and each.matches(container) for each in policy.rule.rules
    )
    return ignores and isinstance(select(policy, container), Ignored)


def may_ask_by_environment(policy: Policy) -> bool:
    """Return whether NVIDIA_VISIBLE_DEVICES may be a request, or name devices that are allocated for us to inject."""
    return bool(policy.environment.may_ask.patterns or policy.kubelet.reads_variable)


def reads_environment(policy: Policy) -> bool:
    """Return whether NVIDIA_VISIBLE_DEVICES matters in a container that asks for nothing else."""
    return policy.environment.disarm is Disarm.ALL or may_ask_by_environment(policy)


def _claim(container: Container, own: Mapping[str, str], policy: Policy) -> Claim | None:
    annotated, allocation = None, container.kubelet
    allocated = allocation if isinstance(allocation, Allocated) else Allocated()
    asked = select_annotation(container.pod.annotations, own, container.name)
    if asked and not allocated.elsewhere:
        annotated = parse_claim(*asked, given=bool(allocated.devices), container=container.name)
    if allocation is not None:
        return claim_of_kubelet(allocation, annotated)
    value = container.env.get(VARIABLE)
    if annotated or not value or not policy.environment.may_ask.match(container.pod.namespace):
        return annotated
    return claim_of_environment(value)


def claim_of_kubelet(allocation: KubeletAllocation, annotated: Claim | None) -> Claim:
    """Return the request for what the kubelet allocated, shaped by the annotation's request if there is one.

    Raises: RequestError: the allocation is not valid, or the annotation asks for something else.
    """
    if not isinstance(allocation, Allocated):
        raise RequestError(allocation.key, allocation.fault)
    if not allocation.devices:
        return annotated or Claim(key=allocation.key, text="", wanted=Nothing())
    if annotated is not None and isinstance(annotated.wanted, Nothing):
        return annotated
    given = _given(allocation)
    if annotated is None:
        return given
    if allocation.request or allocation.admin:
        why = "is for monitoring" if allocation.admin else "has configuration of its own"
        raise RequestError(
            annotated.key, f"adds a request to that of {allocation.key}, which {why}: drop the annotation"
        )
    mode = given.mode or Mode.EXCLUSIVE
    if fault := _beyond_allocation(annotated, len(allocation.uuids), mode, claimed=bool(allocation.claims)):
        raise RequestError(annotated.key, fault)
    return replace(annotated, wanted=given.wanted, mode=mode, kubelet=True)


def _given(allocation: Allocated) -> Claim:
    """Return the request for exactly what was allocated, as the configuration of its ResourceClaims shapes it."""
    text = allocation.request
    asked = parse_claim(allocation.key, text, given=True) if text else None
    plain = Claim(key=allocation.key, text=",".join(allocation.uuids), wanted=Devices(allocation.uuids))
    claim = replace(asked, wanted=plain.wanted) if asked else plain
    if allocation.admin:
        claim = replace(claim, capabilities=MONITORING, admin=True)
    return replace(claim, mode=claim.mode or (Mode.SHARED if allocation.shared else Mode.EXCLUSIVE), kubelet=True)


def _beyond_allocation(annotated: Claim, number: int, mode: Mode, *, claimed: bool) -> str:
    """Return what an annotation asks for beyond the GPUs that the kubelet allocated, or empty if it only shapes these.

    claimed: ResourceClaims hold the GPUs.
    """
    wanted = annotated.wanted
    if isinstance(wanted, Count) and wanted.gpus > number:
        where = "the ResourceClaim" if claimed else "resources.limits"
        asks = f"asks for {counted(wanted.gpus, 'GPU')}, but the kubelet allocated {number}"
        return f"{asks}: ask for the same number in {where}"
    if not isinstance(wanted, Count | Everything):
        return "names GPUs, but here the kubelet chooses them: write all, which means those that it allocated"
    if annotated.mode not in (None, mode):
        cure = "ask for another resource in its limits"
        if claimed:
            cure = "set the mode in the ResourceClaim's configuration"
        elif annotated.mode is Mode.MPS:
            cure = f"take the resource out of its limits, and {MPS_IN_CLUSTER}"
        return f"asks for mode={annotated.mode}, but the kubelet allocated in {mode} mode: {cure}"
    return ""


def _named_by_device_plugin(container: Container, policy: Policy) -> bool:
    """Return whether the variable names devices for us to inject and no other component has injected any."""
    settings, pod = policy.kubelet, container.pod
    names = named_devices(container.env.get(VARIABLE, ""))
    theirs = settings.inject_for.patterns or (settings.reservations.patterns and gpu_groups(pod.labels))
    before_us = settings.reads_variable and settings.enabled and any(map(is_unit_name, names))
    if not names or not (theirs or before_us):
        return False
    return not (
        container.nvidia_hooks or container.cdi_devices or any("nvidia" in each.path for each in container.devices)
    )
