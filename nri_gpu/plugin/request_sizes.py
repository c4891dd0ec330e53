"""Refusals of pods and containers with which the runtime could no longer list the node's containers to us.

A runtime that cannot send its list at Synchronize drops the plugin each time it connects: every container then starts
without us. A pod pays for its own size: nothing is refused to a pod below its share. docs/list-size.md says which cases
remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId, PodId
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.text import listed, shown
from nri_gpu.nri.convert import Configured, is_privileged
from nri_gpu.nri.list_size import (
    FRAME_BYTES,
    GROWTH_BYTES,
    WHOLE_MAX,
    ContainerSize,
    ListedContainer,
    ListedObject,
    ListSize,
    PodSize,
    RequestSize,
    message_max,
    share_bytes,
    size_of,
)
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.decision_log import log_refusal
from nri_gpu.plugin.gone_pods import GonePods
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.system.runtime_cri import CriError, RuntimeCri

CHECKED_BYTES: Final = 64 << 10  # by which the list changes between two looks whether it can be sent
# What plugins may add to a container between its creation, where it was measured, and its start.
ADJUSTMENT_BYTES: Final = 64 << 10
ADDED_BYTES: Final = GROWTH_BYTES + 2 * FRAME_BYTES  # by the list to a request's pod and container, at most
NAMED: Final = 3  # pods in a refusal
NAMED_MAX: Final = 10  # pods in what an operator reads
NAME_MAX: Final = 317  # characters of `namespace/name`
REMEDY: Final = "set enableServiceLinks: false, or mount as a volume what comes by envFrom"
NO_PART: Final = (
    "the runtime does not finish listing the node's containers: it has sent no part of its list, and its own log says "
    "why (journalctl -u containerd | grep -i synchronize)"
)
TOO_LARGE: Final = "the list may be too large: remove the pods with the largest environments and annotations"


class Sizes:
    """The size of the runtime's next Synchronize, across connections.

    settings: of the policy in force. later: runs something once the reply is on its way. log: of refusals. counts:
    whether it sees all that is created and removed, and so knows the list at any time; the guard's does not. cri: tells
    what the list does not, or None. forgotten: told of each pod that is over, of which the runtime tells nothing.
    """

    def __init__(
        self,
        settings: Callable[[], PluginSettings],
        later: Callable[[Callable[[], None]], object],
        log: Callable[[Mapping[str, object], Reason, str], None] = log_refusal,
        *,
        counts: bool = True,
        cri: RuntimeCri | None = None,
        forgotten: Callable[[PodId], None] = lambda _: None,
    ) -> None:
        self.fault = ""  # why the runtime could not send its list now, or empty
        self._settings = settings
        self._later = later
        self._log = log
        self._counts = counts
        self._cri = cri
        self._gone = GonePods(cri, forgotten, self._check)
        self._listing = ListSize()
        self._splits = True
        self._checked_bytes = 0  # the list's size when `fault` was found

    def configured(self, configured: Configured) -> None:
        """Take from the runtime's introduction whether it splits a Synchronize (from NRI 0.7)."""
        self._splits = configured.from_nri_0_7
        self._gone.version = configured.version

    def refusal(self, payload: bytes) -> Reason | None:
        """Return why a pod or container is too large, for itself or for the runtime's list, or None. Log a refusal."""
        settings = self._settings()
        limit = settings.request_bytes
        if limit and len(payload) > limit:
            return self._refused(Code.REQUEST_TOO_LARGE, size_of(payload), _over(len(payload), limit))
        # As nearly always, whatever the request consists of: then it need not be taken apart before the reply.
        if not self._counts or self._listing.fits(len(payload) + ADDED_BYTES, splits=self._splits):
            return None
        return self._list_refusal(size_of(payload), settings.max_pods)

    def start_refusal(self, payload: bytes) -> Reason | None:
        """Return why a container must not start, or None: it was created while we were away, and is too large."""
        if len(payload) <= ADJUSTMENT_BYTES:  # before the limit, for which the guard reads the policy's files
            return None
        limit = self._settings().request_bytes
        if not limit or len(payload) <= limit + ADJUSTMENT_BYTES:
            return None
        return self._refused(Code.REQUEST_TOO_LARGE, size_of(payload), _over(len(payload), limit))

    def created(self, payload: bytes, added_bytes: int = 0) -> None:
        """Count a pod or container that is being created. added_bytes: of our reply."""
        if self._counts:
            self._later(lambda: self._add(_described(payload), added_bytes))

    def ended(self, payload: bytes, event: int) -> None:
        """Drop a container that ended, or a pod that was removed with all its containers: none is listed any more."""
        if self._counts:
            self._later(lambda: self._drop(size_of(payload), event))

    def containers(self) -> Mapping[ContainerId, ListedContainer]:
        """Return all live containers of the runtime, whether they asked for GPUs or not."""
        return self._listing.containers()

    def namespaces(self) -> frozenset[str]:
        """Return the namespaces of the runtime's pods."""
        return self._listing.namespaces()

    def synchronized(self, listing: ListSize) -> None:
        """Take the runtime's whole list, and warn of pods and containers over `plugin.request_bytes`."""
        self._listing = listing
        if not self._counts:
            return
        self._gone.listed(listing)
        limit = self._settings().request_bytes
        for holder in listing.over(limit) if limit else ():
            fault = f"{holder.name} has {holder.size_bytes} bytes, over plugin.request_bytes = {limit}: {REMEDY}"
            logger.bind(fault=fault).warning("container is too large to be created again")
        self._check()

    async def cut_short(self, listing: ListSize, announced_bytes: int = 0) -> str:
        """Return why a Synchronize did not end, as far as that is known; CRI is asked where no part of it came.

        listing: what was received of it. announced_bytes: of a message that cannot arrive whole; 0 where there is none.
        """
        known = listing if len(listing) > len(self._listing) else self._listing
        why = known.fault(splits=self._splits)
        if announced_bytes:
            why = f"the list has {announced_bytes} bytes, and this runtime sends at most {WHOLE_MAX}"
        if not (why or len(listing)):
            return f"{NO_PART}; {await self._not_utf8()}"
        pods = known.in_the_way(splits=self._splits) or known.largest_pods(NAMED)
        return (
            "the runtime does not finish listing the node's containers "
            f"({why or 'the size of the list is not known'}): remove the pods with the largest environments and "
            f"annotations{': ' if pods else ''}{_named(pods)}"
        )

    async def _not_utf8(self) -> str:
        """Return which pods have a text that NRI cannot send, by CRI."""
        if self._cri is None:
            return TOO_LARGE
        try:
            found = await self._cri.list()
        except CriError as error:
            return (
                "a text of a pod may not be UTF-8 (then `crictl pods` or `crictl ps -a` fails), and CRI, which would "
                f"tell of which pod, cannot be asked ({error}): docs/list-size.md says how to find it; or {TOO_LARGE}"
            )
        pods = ((found.pods.get(pod_id, "?"), pod_id) for pod_id in found.not_utf8)
        names = [f"{shown(name, NAME_MAX)} (sandbox {shown(pod_id, NAME_MAX)})" for name, pod_id in pods]
        if not names:
            return f"CRI has no label or annotation that is not UTF-8, so {TOO_LARGE}"
        return (
            f"a label or annotation of {listed(names, NAMED_MAX)} is not UTF-8, which NRI cannot send: delete that "
            "pod, or restart containerd, which replaces such texts"
        )

    def _list_refusal(self, request: RequestSize, max_pods: int) -> Reason | None:
        """Return a refusal of what brings a pod over its share, where the list could not be sent; else None."""
        more = _grown(request)
        pod_bytes, share = self._listing.of_pod(request.pod.id, more), share_bytes(max_pods, splits=self._splits)
        if pod_bytes <= share or not (why := self._unsendable(more, pod_bytes)):
            return None
        self._later(self._gone.look)
        # A refusal is clipped: what is to be done comes before what else is known.
        over = self._gone.advice()
        aside = over or f"{REMEDY}; the largest pods are {_named(self._listing.largest_pods(NAMED))}"
        sentence = (
            f"its pod comes to {pod_bytes} bytes, with which the runtime could not list the node's containers to "
            f"nri-gpu, and no GPU could be granted here ({why}): bring the pod below its share of {share} bytes "
            f"(plugin.max_pods = {max_pods}); {aside}."
        )
        return self._refused(Code.LIST_TOO_LARGE, request, sentence)

    def _unsendable(self, more: Sequence[PodSize | ContainerSize], pod_bytes: int) -> str:
        """Return why the runtime could not send the pod alone, the list as it is, or the list with `more`; or empty."""
        if pod_bytes > (most := message_max(splits=self._splits)):
            return f"a pod alone on its node has to go into one part of {most} bytes"
        return self._listing.fault(splits=self._splits) or self._listing.fault(splits=self._splits, more=more)

    def _add(self, request: RequestSize, added_bytes: int) -> None:
        self._gone.created(request)
        for size in _grown(request, added_bytes):
            self._listing.add(size)
        self._check_again()

    def _drop(self, request: RequestSize, event: int) -> None:
        if event == Event.REMOVE_POD_SANDBOX:
            self._listing.drop_pod(request.pod.id)
        elif request.container:
            self._listing.drop(request.container)
        if event == Event.REMOVE_CONTAINER:
            self._gone.removed(request)
        self._check_again()

    def _check_again(self) -> None:
        if abs(self._listing.total_bytes - self._checked_bytes) >= CHECKED_BYTES:
            self._check()

    def _check(self) -> None:
        """Set `fault` by whether the list can still be sent; log once when it cannot."""
        self._checked_bytes = self._listing.total_bytes
        before, self.fault = self.fault, ""
        if why := self._listing.fault(splits=self._splits):
            self.fault = (
                "the runtime could not list the node's containers to nri-gpu if it had to connect again "
                f"({why}): remove {_named(self._listing.in_the_way(splits=self._splits))}"
            )
            if not before:
                logger.bind(fault=self.fault).error("the list of containers is too large for the runtime")

    def _refused(self, code: Code, request: RequestSize, sentence: str) -> Reason:
        reason, container = Reason(code, sentence), request.container
        fields: dict[str, object] = {"namespace": request.pod.namespace, "pod_name": request.pod.name}
        if container:
            fields |= {"container_name": container.name, "container_id": container.id}
        self._later(lambda: self._log(fields, reason, "container refused" if container else "pod refused"))
        return reason


def _described(payload: bytes) -> RequestSize:
    """Return a request's sizes, and whether its container is privileged, which nothing on the request path needs."""
    request = size_of(payload)
    if request.container is None or not is_privileged(payload):
        return request
    return replace(request, container=replace(request.container, privileged=True))


def _grown(request: RequestSize, added_bytes: int = 0) -> tuple[PodSize | ContainerSize, ...]:
    """Return a request's pod, and its container, if it has one, with the size that it will have in the list."""
    if request.container is None:
        return (request.pod,)
    size_bytes = request.container.size_bytes + added_bytes + GROWTH_BYTES
    return request.pod, replace(request.container, size_bytes=size_bytes)


def _over(size_bytes: int, limit: int) -> str:
    return (
        f"the runtime describes it in {size_bytes} bytes, and plugin.request_bytes allows {limit} on this node: large "
        f"ones can keep the runtime from listing the node's containers to nri-gpu; {REMEDY}."
    )


def _named(pods: Sequence[ListedObject]) -> str:
    return listed((f"{each.name} ({each.size_bytes} bytes)" for each in pods), NAMED_MAX)
