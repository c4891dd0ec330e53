"""The ledger held against what the kubelet lists: promises that we forgot, and those that it keeps no more. Pure.

A daemon that starts anew knows only containers; what was allocated and has none just now the kubelet knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Entry, Ledger
from nri_gpu.allocation.promises import is_promise, named, promise_id
from nri_gpu.domain.container import ContainerId, Pod
from nri_gpu.domain.kubelet import Handed

# Allocate comes before the kubelet lists what it allocated: a promise that is missing may be younger than the list.
SETTLED_S: Final = 5.0


class Named(Struct, frozen=True):
    """One device that the kubelet lists. pod: the sandbox that runs under that name, where it is known."""

    device: Handed
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
    found: dict[Handed, Named] = {}
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
