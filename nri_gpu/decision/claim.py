"""What a container asks for that the kubelet gave GPUs to: those, shaped by what its pod's annotation says besides."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.claim import Claim, Count, Devices, Everything, Mode, Nothing
from nri_gpu.domain.container import Container
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.kubelet import KubeletAllocation, gpu_groups, kubelet_key
from nri_gpu.policy.model import BrokenPolicy, Disarm, Policy
from nri_gpu.policy.select import Ignored, select
from nri_gpu.request.environment import VARIABLE, claim_of_environment, named_devices
from nri_gpu.request.parse import parse_claim, select_annotation


def claim_of_kubelet(given: KubeletAllocation, said: Claim | None) -> Claim:
    """said: the annotation's claim, None where there is none.

    Raises:
        RequestError: what stands on the container does not hold, or the annotation asks for what was not given.

    """
    if given.fault:
        raise RequestError(given.key, given.fault)
    if not given.devices:
        return said or Claim(key=given.key, text="", wanted=Nothing())
    mode = Mode.SHARED if given.shared else Mode.EXCLUSIVE
    wanted = Devices(tuple(given.uuids))
    if said is None:
        return Claim(key=given.key, text=",".join(given.uuids), wanted=wanted, mode=mode, kubelet=True)
    if isinstance(said.wanted, Nothing):
        return said
    _check(given, said, mode)
    return replace(said, wanted=wanted, mode=mode, kubelet=True)


def _check(given: KubeletAllocation, said: Claim, mode: Mode) -> None:
    """It may only shape: how many and which is the kubelet's word, since the scheduler counts by it."""
    number = len(given.uuids)
    if isinstance(said.wanted, Count) and said.wanted.gpus > number:
        why = f"asks for {said.wanted.gpus} GPUs and the kubelet gave {number}: ask for as many in resources.limits"
        raise RequestError(said.key, why)
    if not isinstance(said.wanted, Count | Everything):
        why = "names GPUs, and which ones is the kubelet's to say here: write all, which means those that it gave"
        raise RequestError(said.key, why)
    if said.mode not in (None, mode):
        why = f"asks for mode={said.mode}, and the kubelet gave in {mode} mode: ask for another resource in its limits"
        raise RequestError(said.key, why)


# Longer ones are not worth keeping: they come from whoever made the pod.
CLAIM_KEPT: Final = 256  # characters
_kept_claim = lru_cache(maxsize=256)(parse_claim)  # most containers of a node ask in the same few words


def claim_of(container: Container, policy: Policy | BrokenPolicy) -> Claim | None:
    """The request of a container that is about to be created; None when it asks for nothing. Raises: RequestError."""
    return _claim(container, container.annotations, policy)


def needs_grant(container: Container, policy: Policy | BrokenPolicy, *, starts: bool = False) -> str:
    """The annotation key by which a container that exists already must hold a grant; empty when it need not.

    starts: it is about to; then also what a device plugin beside us said, where it is for us to inject. One that runs
    may have been served by NVIDIA's runtime before, which leaves no trace here.
    """
    try:
        claim = _claim(container, {}, policy)  # what is on the container itself by now, we or others wrote
    except RequestError as error:
        return error.key  # it should never have been created
    # What the kubelet gave is asked for by being there, whatever it is worth.
    key = kubelet_key(container.annotations) or (
        "" if claim is None or isinstance(claim.wanted, Nothing) else claim.key
    )
    if not key and starts and isinstance(policy, Policy) and _named_beside(container, policy):
        key = VARIABLE
    ignored = bool(key) and isinstance(policy, Policy) and isinstance(select(policy, container), Ignored)
    return "" if ignored else key


def may_ask_by_environment(policy: Policy | BrokenPolicy) -> bool:
    """Whether NVIDIA_VISIBLE_DEVICES is anybody's request, or may be a device plugin's word that we inject by."""
    return isinstance(policy, Policy) and bool(policy.environment.may_ask.patterns or policy.kubelet.injects_external)


def _named_beside(container: Container, policy: Policy) -> bool:
    """Whether its variable names devices that are for us to inject, and nobody has."""
    settings, pod = policy.kubelet, container.pod
    ours = settings.inject_for.patterns or (settings.reservations.patterns and gpu_groups(pod.labels))
    if not ours or not named_devices(container.env.get(VARIABLE, "")):
        return False
    return not (
        container.nvidia_hooks or container.cdi_devices or any("nvidia" in each.path for each in container.devices)
    )


def reads_environment(policy: Policy | BrokenPolicy) -> bool:
    """Whether a container with NVIDIA_VISIBLE_DEVICES needs a look although it asks for nothing else."""
    disarms = isinstance(policy, Policy) and policy.environment.disarm is Disarm.ALL
    return disarms or may_ask_by_environment(policy)


def _claim(container: Container, own: Mapping[str, str], policy: Policy | BrokenPolicy) -> Claim | None:
    said = _annotated(container, own)
    if container.kubelet is not None:
        return claim_of_kubelet(container.kubelet, said)
    return said or _of_environment(container, policy)


def _annotated(container: Container, own: Mapping[str, str]) -> Claim | None:
    if asked := select_annotation(container.pod.annotations, own, container.name):
        key, value = asked
        given = container.kubelet is not None and bool(container.kubelet.devices)
        parse = _kept_claim if len(value) <= CLAIM_KEPT else parse_claim
        return parse(key, value, given=given)
    return None


def _of_environment(container: Container, policy: Policy | BrokenPolicy) -> Claim | None:
    said = container.env.get(VARIABLE)
    if not said or not isinstance(policy, Policy) or policy.environment.may_ask.first(container.pod.namespace) is None:
        return None
    return claim_of_environment(said)
