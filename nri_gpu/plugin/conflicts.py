"""What is said of containers with GPUs of other components on which another pod counts alone."""

from __future__ import annotations

from collections.abc import Mapping

from loguru import logger

from nri_gpu.decision.overlaps import SEPARATE, conflict_sentence, conflicts
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.ledger import Ledger


class ConflictsSeen:
    """The containers that were seen to open GPUs which other pods have exclusively, with these GPUs."""

    def __init__(self) -> None:
        self._seen: Mapping[ContainerId, frozenset[GpuUuid]] = {}

    def tell(self, ledger: Ledger) -> None:
        """Log each such container once, however many GPUs it opens, until it ends or is a monitor."""
        seen = {
            id_: uuids - other.watched if (other := ledger.external.get(id_)) else uuids
            for id_, uuids in self._seen.items()
            if id_ in ledger.live or id_ in ledger.external  # it opens none while NVML describes none
        }
        for id_, each in conflicts(ledger).items():
            known = seen.get(id_, frozenset())
            seen[id_] = known.union(each.uuids)
            if seen[id_] != known:
                pod, name = each.other.pod, each.other.name
                namespace, _, pod_name = pod.partition("/")
                fields = {"namespace": namespace, "pod_name": pod_name, "container_name": name, "container_id": id_}
                fields |= {"gpu_uuid": ",".join(each.uuids), "holder": " and ".join(each.holders)}
                fault = f"{conflict_sentence(pod, name, each.uuids, each.holders)}: {SEPARATE}"
                logger.bind(**fields, fault=fault).error("container opens GPUs that another pod has exclusively")
        self._seen = seen
