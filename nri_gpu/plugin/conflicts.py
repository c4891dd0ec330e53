"""The log of containers that have GPUs of other components beside a pod that counts alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from loguru import logger

from nri_gpu.decision.overlaps import SEPARATE, conflict_sentence, conflicts
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.ledger import Ledger

Named = tuple[str, str]  # a pod, `namespace/name`, and its container


class ConflictsSeen:
    """The containers that were seen to open GPUs which other pods have exclusively, with these GPUs.

    By name: what NVIDIA's DRA driver prepared for a container is the same conflict before the container is there,
    between its attempts and after them.
    """

    def __init__(self) -> None:
        self._seen: Mapping[Named, frozenset[GpuUuid]] = {}

    def tell(self, ledger: Ledger) -> None:
        """Log each such container once, however many GPUs it opens, until it ends or is a monitor."""
        found = conflicts(ledger)
        if not found and not self._seen:
            return
        there = {(each.pod, each.container) for each in ledger.live.values()}  # it opens none while NVML describes none
        watched: defaultdict[Named, frozenset[GpuUuid]] = defaultdict(frozenset)
        for other in ledger.external.values():
            watched[other.pod, other.name] |= other.watched
        seen = {of: uuids - watched[of] for of, uuids in self._seen.items() if of in there or of in watched}
        for each in found.values():
            of = pod, name = each.other.pod, each.other.name
            known = seen.get(of, frozenset())
            seen[of] = known.union(each.uuids)
            if seen[of] != known:
                namespace, _, pod_name = pod.partition("/")
                fields = {"namespace": namespace, "pod_name": pod_name, "container_name": name}
                fields |= {"container_id": each.other.container_id, "gpu_uuid": ",".join(each.uuids)}
                fields |= {"holder": " and ".join(each.holders)}
                fault = f"{conflict_sentence(pod, name, each.uuids, each.holders)}: {SEPARATE}"
                logger.bind(**fields, fault=fault).error("container opens GPUs that another pod has exclusively")
        self._seen = seen
