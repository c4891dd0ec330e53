"""The GPUs that several pods hold although a pod among them was granted its GPU alone."""

from __future__ import annotations

from collections.abc import Mapping

from nri_gpu.decision.refusals import opener
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.ledger import Ledger


def overlaps(ledger: Ledger) -> Mapping[GpuUuid, tuple[str, ...]]:
    """Return GPUs that pods were granted beside each other, one exclusively and by no common claim, with the pods.

    A container that started while nri-gpu was away may have caused it, a container that is a monitor no more and holds
    again what another pod was granted meanwhile, or a driver that gave the GPUs each other's device numbers. Nobody
    else is granted such a GPU.
    """
    found: dict[GpuUuid, tuple[str, ...]] = {}
    for uuid, use in ledger.usage().items():
        pods = {each.pod_uid: each.pod for each in use.grants.values()}
        exclusive = any(each.mode is Mode.EXCLUSIVE for each in use.grants.values())
        joined = any(pods.keys() <= each.claim.pods.keys() for each in use.claims.values())
        beside = {
            opener(each)
            for each in use.external.values()
            if (uuid in each.regained or each.container) and each.pod not in pods.values()
        }
        if exclusive and (beside or (len(pods) > 1 and not joined)):
            found[uuid] = tuple(sorted({*pods.values(), *beside}))
    return found
