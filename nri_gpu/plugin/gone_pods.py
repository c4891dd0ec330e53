"""Pods that came by the runtime's list and are over, of which the runtime told nothing.

containerd tells of no sandbox's end that it had before its restart. Such a pod counts for the size of the next list and
keeps what the kubelet allocated to it. It goes when another sandbox of its name comes, when CRI does not list it any
more, or, where CRI cannot be asked, with its last container; never by its age. The next request that names it counts it
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from loguru import logger

from nri_gpu.domain.container import ContainerId, PodId
from nri_gpu.domain.text import listed
from nri_gpu.nri.list_size import ListSize, RequestSize
from nri_gpu.system.cri_list import CriList
from nri_gpu.system.runtime_cri import CriError, RuntimeCri

ASK_EVERY_S: Final = 60.0
NAMED: Final = 2  # pods in a refusal
OTHER: Final = "CRI's socket is another runtime's"


class GonePods:
    """The pods that the newest list brought.

    forgotten: told of each that is over. counted: called when CRI has told, and the count may be another one. cri: None
    where there is none to ask.
    """

    def __init__(self, cri: RuntimeCri | None, forgotten: Callable[[PodId], None], counted: Callable[[], None]) -> None:
        self.version = ""  # the runtime's, by NRI
        self.fault = ""  # why CRI cannot tell, or empty
        self._cri = cri
        self._forgotten = forgotten
        self._counted = counted
        self._listing = ListSize()
        self._containers: dict[PodId, set[ContainerId]] = {}  # of each, those that are not removed, as far as known
        self._listed: frozenset[ContainerId] = frozenset()
        self._emptied: set[PodId] = set()  # whose last container was removed
        self._due = 0.0  # when CRI may be asked again, by the loop's clock
        self._asking: asyncio.Task[None] | None = None

    def listed(self, listing: ListSize) -> None:
        """Take the runtime's whole list. It is changed as pods go."""
        self._listing = listing
        self._containers = {pod_id: set() for pod_id in listing.pods}
        containers = listing.containers()
        for container_id, each in containers.items():
            self._containers.setdefault(each.pod_id, set()).add(container_id)
        self._listed = frozenset(containers)
        self._emptied = set()
        self.fault = self._cri.hindrance() if self._cri else "it is not asked"

    def created(self, request: RequestSize) -> None:
        """Note a container, or a sandbox that takes the place of those of its name."""
        pod, container = request.pod, request.container
        if container and pod.id in self._containers:
            self._containers[pod.id].add(container.id)
            self._emptied.discard(pod.id)
        elif not container:
            counted = self._containers.keys() & self._listing.pods.keys() - {pod.id}
            for id_ in [each for each in counted if self._listing.pods[each].full_name == pod.full_name]:
                self._over(id_)

    def removed(self, request: RequestSize) -> None:
        """Note the removal of a container."""
        known = self._containers.get(request.pod.id)
        if known is None or request.container is None:
            return
        known.discard(request.container.id)
        if not known and self.fault:
            self._over(request.pod.id)
        elif not known:
            self._emptied.add(request.pod.id)

    def advice(self) -> str:
        """Return what a refusal says of pods that may be over, or empty where CRI is asked which are."""
        pods = [each for each in self._listing.largest_pods(len(self._listing.pods)) if each.pod_id in self._containers]
        if not pods or not self.fault:
            return ""
        names = listed((each.name for each in pods), NAMED)
        return (
            f"pods of the runtime's list that are over may be counted, such as {names}: a restart of nri-gpu counts "
            f"anew (CRI does not tell: {self.fault})"
        )

    def look(self) -> None:
        """Ask CRI which of them are over, unless it was asked just now."""
        if self._cri is None or self._containers.keys().isdisjoint(self._listing.pods):
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due:
            self._due = loop.time() + ASK_EVERY_S
            self._asking = loop.create_task(self._ask(self._cri))

    async def _ask(self, cri: RuntimeCri) -> None:
        listing, pods, containers = self._listing, frozenset(self._listing.pods), frozenset(self._listing.containers())
        try:
            found = await cri.list()
            self.fault = "" if self._is_ours(found) else OTHER
        except CriError as error:
            self.fault = str(error)
        if listing is not self._listing:  # the runtime has listed its containers anew meanwhile
            return
        if self.fault:
            logger.bind(fault=self.fault).warning("CRI does not tell which pods are over")
            gone = frozenset(self._emptied)
        else:
            gone = pods & self._containers.keys() - found.pods.keys() - frozenset(found.containers.values())
            for container_id in containers & self._listed - (found.containers.keys() - found.ended):
                listing.drop_container(container_id)
        for pod_id in gone:
            self._over(pod_id)
        logger.bind(pods=len(gone)).info("counted pods without those that are over")
        self._counted()

    def _is_ours(self, found: CriList) -> bool:
        """Return whether a list is that of the runtime whose plugin we are: another one may serve that socket."""
        return found.version == self.version and not (found.pods and found.pods.keys().isdisjoint(self._listing.pods))

    def _over(self, pod_id: PodId) -> None:
        self._listing.drop_pod(pod_id)
        self._emptied.discard(pod_id)
        self._forgotten(pod_id)
