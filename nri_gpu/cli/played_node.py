"""An empty node that takes a manifest's pods one after the other, made of the daemon's own parts.

The scheduler's part is in `played_claims`, the kubelet's is here: it admits a pod as a whole, gives the devices of an
init container that ends to the pod's later containers, and asks the device plugin which devices go well together
(kubernetes: pkg/kubelet/cm/devicemanager).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from nri_gpu.cli.played_claims import DeviceSpec, Offer, allocate, is_ours
from nri_gpu.cli.pod_manifest import TEMPLATE, ClaimObject, ClaimUse, Manifest, ManifestContainer
from nri_gpu.decision.claim_devices import NotPrepared, prepared
from nri_gpu.decision.decide import decide
from nri_gpu.domain.allocation import REQUIRED_DESTINATION, AllocatedDevice, ContainerDevices, PodDevices
from nri_gpu.domain.container import ContainerId, Pod
from nri_gpu.domain.decision import Code, Decision, Inject, Reason, Refuse
from nri_gpu.domain.node import Node
from nri_gpu.domain.resource_claim import AllocatedClaim, ClaimUid
from nri_gpu.domain.text import listed as listed_names
from nri_gpu.domain.text import shown
from nri_gpu.dra.markers import markers_of
from nri_gpu.dra.offered_devices import offer
from nri_gpu.dra.questions import PreparedName
from nri_gpu.kubelet.advertised import TAKEN, AdvertisedDevices
from nri_gpu.kubelet.allocations import KubeletPods, KubeletTokens
from nri_gpu.kubelet.read_listing import ExternalAllocations, is_gpu_resource
from nri_gpu.kubelet.required_device import RequiredDevice
from nri_gpu.ledger.apply import apply, cleared_for
from nri_gpu.ledger.events import ClaimPrepared, Created, DevicesAllocated, Gone, LedgerEvent, Rules
from nri_gpu.plugin.read_allocation import AllocationFacts, read_allocation
from nri_gpu.policy.dra_settings import dra_faults
from nri_gpu.policy.kubelet_settings import FailClosed, KubeletSettings, MigStrategy
from nri_gpu.policy.model import Policy
from nri_gpu.request.environment import VARIABLE
from nri_gpu.system.state import NodeState

_KEY: Final = bytes(32)  # only this process reads what it signs
_NOW: Final = 0.0  # everything happens at once
NVIDIA: Final = "nvidia.com/gpu"


def with_allocators(policy: Policy, manifest: Manifest) -> Policy:
    """Return the policy with the device plugin on where pods are limited to its resources, and DRA where it has claims.

    The chart leaves both to options of `run`. They may contradict each other: then it is as bad a policy as for `run`.
    """
    settings = replace(policy.kubelet, enabled=True)
    resources = {resource for pod in manifest.pods for listed in pod for resource in listed.resources}
    devices = [AllocatedDevice(resource, "") for resource in resources if not settings.inject_for.match(resource)]
    if not policy.dra.enabled and any(is_gpu_resource(device, settings) for device in devices):
        policy = replace(policy, kubelet=settings)
    if any(is_ours(spec, policy.dra.driver) for spec in manifest.claims.values()):
        policy = replace(policy, dra=replace(policy.dra, enabled=True))
    twice = next(dra_faults(policy.dra, policy.kubelet), None)
    return replace(policy, fault=": ".join(twice)) if twice else policy


class PlayedNode:
    """The node, and its daemon's knowledge of the pods so far. It is the NRI plugin for the device plugin's part."""

    def __init__(self, node: Node, policy: Policy, claims: Mapping[ClaimObject, DeviceSpec]) -> None:
        settings = policy.kubelet
        self._claims = {found: spec for found, spec in claims.items() if is_ours(spec, policy.dra.driver)}
        self._uids: dict[tuple[object, ...], ClaimUid] = {}
        self._settings = settings
        self._state = NodeState(node.inventory, policy=policy)
        self._state.node = node
        self._rules = Rules(created_grace_s=math.inf, inventory=node.inventory, waits=False)
        self.kubelet = KubeletTokens()
        self.kubelet.key = _KEY
        self._external = ExternalAllocations(self._state)
        if settings.podresources and (settings.enabled or settings.injects_external):
            self._external.pods = KubeletPods()
        required = RequiredDevice(settings)  # without a runtime it is never written
        self._ours = AdvertisedDevices(settings, self._state, self, required, connected=True)
        nvidia = KubeletSettings(resource=NVIDIA, mig_strategy=MigStrategy.MIXED)
        self._theirs = AdvertisedDevices(nvidia, self._state, self, required, connected=True)
        self._in_use: dict[str, set[str]] = defaultdict(set)  # ids, of each resource
        self._tokens: dict[ContainerId, dict[str, str]] = defaultdict(dict)  # that Allocate answered
        self._env: dict[ContainerId, dict[str, str]] = defaultdict(dict)  # likewise, by NVIDIA's device plugin

    def aged(self, node: Node) -> Node:
        """Return the node as it is: its inventory was just taken."""
        return node

    def reserve(self, devices: Iterable[AllocatedDevice], *, shared: bool) -> None:
        """Reserve devices that the kubelet allocated to a pod."""
        self._apply(DevicesAllocated(_NOW, tuple(devices), shared))

    def allocates(self, resource: str) -> bool:
        """Return whether kubelet or scheduler allocate this resource here, as far as it is played."""
        return self._plugin_of(resource) is not None or self._is_extended(resource)

    def claimed(self, use: ClaimUse) -> bool:
        """Return whether the scheduler's allocation of a claim is played."""
        return use.found in self._claims

    def admit(self, pod: Sequence[ManifestContainer]) -> Reason | None:
        """Allocate all that a pod claims and is limited to; return why it would not be admitted, or None."""
        ledger, in_use = self._state.ledger, {resource: set(ids) for resource, ids in self._in_use.items()}
        refused = self._prepare_all(pod) or self._allocate_all(pod)
        if refused:
            self._state.ledger, self._in_use = ledger, defaultdict(set, in_use)
        return refused

    def _prepare_all(self, pod: Sequence[ManifestContainer]) -> Reason | None:
        """Allocate and prepare the pod's claims; return why one cannot be."""
        for listed in pod:
            for use in self._uses(listed):
                claim = self._allocated(use, listed.container.pod)
                if isinstance(claim, Reason):
                    return claim
                found = prepared(claim, self._state.node, self._state.ledger, self._state.policy)
                if isinstance(found, NotPrepared):
                    return found.reason
                self._apply(ClaimPrepared(_NOW, found))
        return None

    def _uses(self, listed: ManifestContainer) -> Iterator[ClaimUse]:
        """Yield the claims of a container that are played, with those that the scheduler makes of its limits."""
        yield from filter(self.claimed, listed.claims)
        for resource, count in listed.resources.items():
            if self._is_extended(resource):
                found = (TEMPLATE, listed.container.pod.namespace, f"{resource} {count}")
                exactly = {"deviceClassName": self._state.policy.dra.driver, "count": count}
                self._claims[found] = {"requests": [{"name": "limits", "exactly": exactly}]}
                yield ClaimUse(found, listed.container.id, "")

    def _is_extended(self, resource: str) -> bool:
        """Return whether the scheduler makes a claim of this resource (DeviceClass: extendedResourceName)."""
        only_dra = self._state.policy.dra.enabled and not self._settings.enabled
        return only_dra and resource == self._settings.resource and not self._settings.inject_for.match(resource)

    def _allocated(self, use: ClaimUse, pod: Pod) -> AllocatedClaim | Reason:
        """Return a claim as it is allocated by now: also for this pod."""
        uid, (_, namespace, name) = self._uid(use, pod), use.found
        if known := self._state.ledger.claims.get(uid):
            pods = {**known.pods, pod.uid: pod.name}
            return AllocatedClaim(uid=uid, namespace=namespace, name=name, pods=pods, results=known.devices)
        policy, ledger = self._state.policy, self._state.ledger
        devices, _ = offer(self._state.node, ledger, policy, policy.dra)
        taken = Counter(each.device for claim in ledger.claims.values() for each in claim.devices if not each.admin)
        offered = Offer(policy.dra.driver, devices, policy.dra.replicas, taken)
        return allocate(self._claims[use.found], PreparedName(uid, namespace, name), pod, offered)

    def _uid(self, use: ClaimUse, pod: Pod) -> ClaimUid:
        """Return the UID of a claim; a template makes one for each pod and entry."""
        made = (use.found, pod.uid, use.entry) if use.found[0] == TEMPLATE else (use.found,)
        return self._uids.setdefault(made, ClaimUid(f"claim-{len(self._uids)}"))

    def _markers(self, listed: ManifestContainer) -> dict[str, str]:
        """Return the variables by which a container shows its devices of claims."""
        found: dict[str, str] = {}
        for use in self._uses(listed):
            claim = self._state.ledger.claims[self._uid(use, listed.container.pod)]
            requests = (each.request.partition("/")[0] for each in claim.devices)
            markers = zip(markers_of(claim, _KEY), requests, strict=True)
            found |= dict(marker for marker, request in markers if use.request in ("", request))
        return found

    def _allocate_all(self, pod: Sequence[ManifestContainer]) -> Reason | None:
        """Allocate what the pod's containers are limited to; return why the kubelet cannot."""
        reusable: dict[str, set[str]] = defaultdict(set)
        given: dict[str, tuple[AllocatedDevice, ...]] = {}
        for listed in pod:
            name = listed.container.name
            for resource, count in listed.resources.items():
                if (plugin := self._plugin_of(resource)) is None:
                    continue
                ids = self._allocate(plugin, resource, count, reusable[resource])
                if isinstance(ids, Reason):
                    return replace(ids, what=f"container {shown(name)} {ids.what}")
                reusable[resource] = (
                    reusable[resource].union(ids) if listed.ends else reusable[resource].difference(ids)
                )
                given[name] = (*given.get(name, ()), *(AllocatedDevice(resource, id_) for id_ in ids))
                if plugin is self._ours:
                    (answer,) = plugin.allocate(resource, [ids])
                    self._tokens[listed.container.id].update(answer.annotations)
                else:
                    self._env[listed.container.id][VARIABLE] = ",".join(ids)
        self._list(pod, given)
        return None

    def create(self, listed: ManifestContainer) -> Decision:
        """Decide about a container of a pod that was admitted, and remember what it was granted."""
        container, tokens, markers = listed.container, self._tokens[listed.container.id], self._markers(listed)
        if (tokens or markers) and self._settings.fail_closed is FailClosed.AUTO:
            container = replace(container, mounts=container.mounts | {REQUIRED_DESTINATION})
        env = {**self._env[container.id], **container.env}  # the pod's own goes before the kubelet's
        container = replace(container, annotations=tokens, markers=markers, env=env)
        facts = AllocationFacts(
            token_key=_KEY,
            marker_key=_KEY,
            claims=self._state.ledger.claims,
            named=None,
            listing=self._external.listing(container.pod),
            inventory=self._state.node.inventory,
            settings=self._settings,
        )
        container = read_allocation(container, facts)
        ledger = cleared_for(self._state.ledger, container, _NOW)
        decision = decide(container, self._state.node, ledger, self._state.policy)
        if not isinstance(decision, Refuse):
            self._apply(Created(_NOW, container, decision.grant if isinstance(decision, Inject) else None))
        if listed.ends:
            self._apply(Gone(_NOW, (container.id,)))
        return decision

    def _apply(self, event: LedgerEvent) -> None:
        self._state.commit(apply(self._state.ledger, event, self._rules))

    def _plugin_of(self, resource: str) -> AdvertisedDevices | None:
        """Return the device plugin of a resource, or None if none is known that we inject for."""
        if self._settings.inject_for.match(resource):
            return self._theirs if resource in self._theirs.resources() else None
        return self._ours if is_gpu_resource(AllocatedDevice(resource, ""), self._settings) else None

    def _allocate(
        self, plugin: AdvertisedDevices, resource: str, count: int, reusable: set[str]
    ) -> tuple[str, ...] | Reason:
        """Choose devices as the kubelet does, the reusable ones first, or return why it cannot."""
        devices = plugin.devices(resource)
        # NVIDIA's device plugin knows of no container that got a GPU past it.
        unhealthy = {each.id: each.why for each in devices if each.why and (plugin is self._ours or each.why != TAKEN)}
        kept = sorted(reusable)[:count]
        free = {each.id for each in devices} - unhealthy.keys() - self._in_use[resource]
        if len(kept) + len(free) < count:
            return _too_few(resource, count, len(free), len(devices), dict.fromkeys(unhealthy.values()))
        ids = plugin.preferred(resource, sorted(free.union(kept)), kept, count)
        self._in_use[resource].update(ids)
        return ids

    def _list(self, pod: Sequence[ManifestContainer], given: Mapping[str, tuple[AllocatedDevice, ...]]) -> None:
        """Have PodResources list a pod; it does not list init containers that end."""
        if self._external.pods is None or not pod:
            return
        sandbox = pod[0].container.pod
        names = [listed.container.name for listed in pod if not listed.ends]
        containers = tuple(ContainerDevices(name, given.get(name, ())) for name in names)
        told = PodDevices(sandbox.namespace, sandbox.name, containers)
        self._external.pods.add(sandbox)
        self._external.pods.put(sandbox, told)
        self._apply(self._external.reconciled((told,), _NOW))


def _too_few(resource: str, count: int, free: int, offered: int, why: Iterable[str]) -> Reason:
    """Return why the kubelet has too few devices of a resource. why: those it is offered and may not allocate."""
    what = f"asks for {count} {shown(resource)}, and {free} of the {offered} that this node offers can be allocated"
    code = Code.GPU_BUSY if count <= offered else Code.NO_SUCH_GPU
    return Reason(code, what, listed_names(why), "ask for fewer, or run the pod on another node")
