"""Who had a GPU exclusively and is gone, while others may not have it yet."""

from __future__ import annotations

from msgspec import Struct

from nri_gpu.domain.container import PodUid


class Leaver(Struct, frozen=True):
    """The pod that left one GPU or MIG device.

    pod: its `namespace/name`. since: seconds on the shell's monotonic clock when its container ended.
    grace_s: seconds after which nothing is waited for any more. processes: how many a look after that found on it;
    None as long as none could tell.
    """

    pod_uid: PodUid
    pod: str
    since: float
    grace_s: float
    processes: int | None = None

    def blocks(self, pod_uid: PodUid) -> bool:
        """Whether a container of that pod must wait: exclusive is to the pod, so its own need not."""
        return pod_uid != self.pod_uid

    def __str__(self) -> str:
        """`ml/train: 2 processes still hold it`."""
        if self.processes is None:
            return f"{self.pod}: whether processes still hold it is not known yet"
        return f"{self.pod}: {self.processes} process{'es still hold' if self.processes > 1 else ' still holds'} it"
