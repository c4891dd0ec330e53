"""Promises: GPUs that the kubelet has given to a pod of which no container is here, or none just now.

They stand in the ledger like grants, so that everything else reads them without knowing: annotations cannot have those
GPUs, and refusals name who has. One for each device id, so that the kubelet's next word about an id replaces its last.

    Allocate --open, for OPEN_S--> (lapses)         --its container is created--> a grant, and no promise any more
    that container ends --bound to its pod--> until its sandbox is gone, or the kubelet gives the id to another
    it never starts, or its sandbox is gone --bound to its pod, for OPEN_S--> (lapses)

The last, because the kubelet makes a pod a sandbox anew and gives it what it had, without asking; whether that comes or
the pod is over nobody tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Entry, GrantPhase, Ledger
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.kubelet import AllocatedDevice, KubeletAllocation
from nri_gpu.domain.names import KUBELET_KEY

# An image of tens of gigabytes is pulled between Allocate and CreateContainer, and nobody tells when a pod is given up.
OPEN_S: Final = 900.0
_SPACE: Final = "kubelet/"  # of container ids: no runtime makes one with a slash
_NOBODY: Final = PodUid("kubelet")
_FOR_LIFE: Final = math.inf  # as the time until which it holds


def is_promise(container_id: ContainerId) -> bool:
    """Whether an entry of the ledger is one."""
    return container_id.startswith(_SPACE)


def promised(ledger: Ledger, devices: Iterable[AllocatedDevice], now: float, *, shared: bool) -> Ledger:
    """With these given to a pod that nobody has named yet. now: seconds on the shell's monotonic clock."""
    for each in devices:
        entry = named(each, "kubelet", each.resource, None, now, shared=shared)
        ledger = ledger.with_entry(replace(entry, until=now + OPEN_S))
    return ledger


def redeemed(ledger: Ledger, container: Container) -> Ledger:
    """Without the promises that a container comes for; one bound to another pod stays in its way.

    Not where the kubelet itself has just told whose they are now (PodResources): a token may be an old one.
    """
    given = container.kubelet
    if given is None:
        return ledger
    return _released(ledger, given, (_NOBODY, container.pod.uid) if given.key == KUBELET_KEY else None)


def resumed(ledger: Ledger, pod_uid: PodUid, given: KubeletAllocation) -> Ledger:
    """Without what was kept for the pod of a container that runs."""
    return _released(ledger, given, (pod_uid,))


def bound(ledger: Ledger, grant: Grant, given: KubeletAllocation, now: float, *, for_life: bool = False) -> Ledger:
    """With what a container had kept for its pod: the kubelet starts it anew with the same.

    for_life: as long as the pod is there, else for OPEN_S. What the kubelet has given to another since is the other's.
    """
    until = _FOR_LIFE if for_life else now + OPEN_S
    for each in given.devices:
        if each.uuid not in grant.uuids:
            continue
        kept = ledger.entries.get(promise_id(each))
        if kept is None or not kept.holds or kept.grant.pod_uid == grant.pod_uid:
            entry = replace(grant, container_id=promise_id(each), uuids=(each.uuid,), generation="-")
            ledger = ledger.with_entry(Entry(entry, GrantPhase.CREATED, now, until))
    return ledger


def outlived(before: Ledger, after: Ledger, now: float) -> Ledger:
    """`after` a sandbox is gone, with what was kept for its pod kept for a while longer."""
    for id_, entry in before.entries.items():
        if is_promise(id_) and entry.holds and id_ not in after.entries:
            after = after.with_entry(_for_a_while(entry, now))
    return after


def carried(ledger: Ledger, now: float) -> tuple[Entry, ...]:
    """Promises for a ledger that is rebuilt. Whose pods went meanwhile is not known, so none is for life any more."""
    kept = (entry for id_, entry in ledger.entries.items() if is_promise(id_) and entry.holds)
    return tuple(_for_a_while(entry, now) for entry in kept)


def _for_a_while(entry: Entry, now: float) -> Entry:
    end = now + OPEN_S
    return replace(entry, until=end if entry.until is None else min(entry.until, end))


def _released(ledger: Ledger, given: KubeletAllocation, pods: Sequence[PodUid] | None) -> Ledger:
    """Without the promises of these devices to one of those pods; None: to whomever."""
    for each in given.devices:
        entry = ledger.entries.get(promise_id(each))
        if entry is not None and (pods is None or entry.grant.pod_uid in pods):
            ledger = ledger.released(entry.grant.container_id)
    return ledger


def promised_device(container_id: ContainerId) -> AllocatedDevice | None:
    """What an entry of the ledger promises; None where it is none."""
    if not is_promise(container_id):
        return None
    resource, _, id_ = container_id.removeprefix(_SPACE).partition("=")
    return AllocatedDevice(resource, id_)


def had_a_pod(entry: Entry) -> bool:
    """Whether a promise is to a pod that was here, so that its programs may be on the GPU still."""
    return entry.grant.pod_uid != _NOBODY


def named(device: AllocatedDevice, namespace: str, name: str, pod: Pod | None, now: float, *, shared: bool) -> Entry:
    """A promise to a pod that the kubelet names, kept as long as it does. pod: its sandbox, where that is known."""
    grant = Grant(
        container_id=promise_id(device),
        container_name="-",
        pod_id=pod.id if pod else PodId(_SPACE),
        pod_uid=pod.uid if pod else _NOBODY,
        pod_name=name,
        namespace=namespace,
        uuids=(device.uuid,),
        mode=Mode.SHARED if shared else Mode.EXCLUSIVE,
        generation="-",
    )
    return Entry(grant, GrantPhase.CREATED, now, _FOR_LIFE)


def promise_id(device: AllocatedDevice) -> ContainerId:
    """Under which its promise stands in the ledger."""
    return ContainerId(f"{_SPACE}{device.resource}={device.id}")


# Allocate comes before the kubelet lists what it allocated: a promise that is missing may be younger than the list.
SETTLED_S: Final = 5.0


class Named(Struct, frozen=True):
    """One device that the kubelet lists. pod: the sandbox that runs under that name, where it is known."""

    device: AllocatedDevice
    namespace: str
    name: str
    container: str
    shared: bool
    pod: Pod | None = None


class Missing(Struct, frozen=True):
    """Promises that the kubelet did not list when it was last asked, and since when."""

    since: Mapping[ContainerId, float] = {}


def reconciled(
    ledger: Ledger, listed: Iterable[Named], about: Iterable[ContainerId], missing: Missing, now: float
) -> tuple[Ledger, Missing]:
    """about: the promises that the list could have told of; the others stay as they are. now: monotonic seconds."""
    here: set[ContainerId] = set()
    for each in _one_each(listed):
        here.add(id_ := promise_id(each.device))
        if _is_held(ledger, each):
            continue
        fresh = named(each.device, each.namespace, each.name, each.pod, now, shared=each.shared)
        if not _same(ledger.entries.get(id_), fresh, each.pod):
            ledger = ledger.with_entry(fresh)
    gone = {id_: missing.since.get(id_, now) for id_ in about if id_ not in here and id_ in ledger.entries}
    for id_, since in gone.items():
        if now - since >= SETTLED_S:
            ledger = ledger.released(id_)
    return ledger, Missing({id_: since for id_, since in gone.items() if id_ in ledger.entries})


def _one_each(listed: Iterable[Named]) -> Iterable[Named]:
    """One for each device. Kubelets before 1.34 list pods that are over, too: whose sandbox is here has it.

    Where that does not tell either, it is nobody's in particular, and whoever comes for it has it.
    """
    found: dict[AllocatedDevice, Named] = {}
    for each in listed:
        other = found.get(each.device)
        if other is None or (other.pod is None and each.pod is not None):
            found[each.device] = each
        elif each.pod is not None and other.pod is not None and each.pod.id != other.pod.id:
            found[each.device] = replace(other, pod=None)
    return found.values()


def holders(ledger: Ledger, each: Named) -> tuple[ContainerId, ...]:
    """Containers of that name in that pod which hold the device."""
    return tuple(
        id_
        for id_, entry in ledger.entries.items()
        if not is_promise(id_) and _of_its_pod(entry, each) and entry.grant.container_name == each.container
    )


def _is_held(ledger: Ledger, each: Named) -> bool:
    """By any container of the pod: while one has it, nothing need be promised."""
    return any(not is_promise(id_) and _of_its_pod(entry, each) for id_, entry in ledger.entries.items())


def _of_its_pod(entry: Entry, each: Named) -> bool:
    grant = entry.grant
    return (
        entry.holds
        and (grant.namespace, grant.pod_name) == (each.namespace, each.name)
        and each.device.uuid in grant.uuids
    )


def _same(old: Entry | None, fresh: Entry, pod: Pod | None) -> bool:
    """Whether a promise says already what the kubelet says. One that is bound to a sandbox knows more."""
    if old is None or not old.holds or old.until != fresh.until:
        return False
    was, now = old.grant, fresh.grant
    if (was.namespace, was.pod_name, was.mode) != (now.namespace, now.pod_name, now.mode):
        return False
    return pod is None or was.pod_uid == pod.uid
