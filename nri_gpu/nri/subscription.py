"""NRI's events: the mask that subscribes to them, and the events themselves, read from protobuf.

A bit that the runtime does not know makes it drop the plugin, so the mask depends on the runtime's version. The oldest
mask always works.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import Final

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId
from nri_gpu.nri.convert import MARKER_NEEDLE, NODE_NEEDLE, container_from_pb, our_annotations, pod_from_pb


class Event(IntEnum):
    """NRI's events; bit n-1 of the mask. Source: containerd/nri pkg/api/api.proto (Event)."""

    RUN_POD_SANDBOX = 1
    STOP_POD_SANDBOX = 2
    REMOVE_POD_SANDBOX = 3
    CREATE_CONTAINER = 4
    POST_CREATE_CONTAINER = 5
    START_CONTAINER = 6
    POST_START_CONTAINER = 7
    UPDATE_CONTAINER = 8
    POST_UPDATE_CONTAINER = 9
    STOP_CONTAINER = 10
    REMOVE_CONTAINER = 11
    UPDATE_POD_SANDBOX = 12  # NRI 0.10
    POST_UPDATE_POD_SANDBOX = 13  # NRI 0.10
    VALIDATE_CONTAINER_ADJUSTMENT = 14  # NRI 0.10


OLDEST_MASK: Final = 0x07FF
NEWER_MASK: Final = 0x3FFF
_NEWER_SINCE: Final = (0, 10)
# Runtimes with NRI 0.10 that do not tell: NRI sends its version from 0.12 on. By the go.mod of each release, since
# containerd 2.2.0 has 0.10.0, CRI-O 1.34.0 too, and Docker has NRI since 29.2.0, with 0.11.0.
_NEWER_RUNTIMES: Final = {"containerd": (2, 2), "cri-o": (1, 34), "docker": (29, 2)}
# Runtimes that heed an error answered to START_CONTAINER. CRI-O logs it and goes on, and sends no start of a container
# that it restores from a checkpoint (server/container_start.go); Docker sends none at all.
HEED_STARTS: Final = frozenset({"containerd"})
_CANDIDATE: Final = re.compile(r"[-~+.](?:alpha|beta|rc)", re.IGNORECASE)
_PLAIN: Final = re.compile(r"v?([0-9]{1,6})\.([0-9]{1,6})(?:[.+~-]|$)")
# containerd's releases before which a Synchronize waits for no CRI call, by minor version; from 2.1 on each waits.
_SYNCHRONIZES_BETWEEN: Final[Mapping[tuple[int, ...], int]] = {(1, 7): 26, (2, 0): 3}
_PATCH: Final = re.compile(r"v?[0-9]{1,6}\.[0-9]{1,6}\.([0-9]{1,6})(?:[.+~-]|$)")


def event_mask(events: Collection[Event], nri_version: str) -> int:
    """Return the mask to answer Configure with.

    nri_version: from the runtime. Only NRI 0.12 and later send one; any other text counts as old.

    Raises: ValueError for no events at all: to the runtime, 0 means all of them.
    """
    wanted = sum(1 << (event - 1) for event in set(events))
    mask = wanted & (NEWER_MASK if _parse(nri_version) >= _NEWER_SINCE else OLDEST_MASK)
    if not mask:
        raise ValueError("a plugin without events must not connect: mask 0 subscribes to everything")
    return mask


def holds_list_back(runtime: str, version: str) -> bool:
    """Return whether the runtime may keep a plugin that it took waiting for Synchronize.

    It does so while CRI calls are under way, such as the stop of a container (containerd: BlockPluginSync). A runtime
    whose version is not known may do so.
    """
    patch = _PATCH.match(version)
    return runtime != "containerd" or not patch or int(patch[1]) >= _SYNCHRONIZES_BETWEEN.get(_parse(version), 0)


class Subscription:
    """The mask for each connection.

    A runtime that ends the connection right after Configure may not know a bit, whatever we concluded from its
    version: the next connection uses the oldest mask, and the one after it tries again.
    """

    def __init__(self) -> None:
        self._cautious = self._daring = False
        self.last = 0  # the mask given last

    def mask(self, events: Collection[Event], runtime: str, version: str, nri_version: str) -> int:
        """Return the mask for a runtime that introduced itself with these."""
        known = nri_version or _nri_of(runtime, version)
        mask = event_mask(events, "" if self._cautious else known)
        self._daring = mask != event_mask(events, "")
        self.last = mask
        return mask

    @property
    def validates(self) -> bool:
        """Return whether the runtime asks us to validate each container before it is created."""
        return bool(self.last & 1 << (Event.VALIDATE_CONTAINER_ADJUSTMENT - 1))

    def ended(self, *, after_configure: bool) -> None:
        """Note that a connection ended. after_configure: right after it, before anything else came."""
        self._cautious = after_configure and self._daring
        self._daring = False


def _nri_of(runtime: str, version: str) -> str:
    """Return the NRI version that a runtime is known to have at least, or empty."""
    since = _NEWER_RUNTIMES.get(runtime)
    if since is None or _parse(version) < since or (_parse(version) == since and _CANDIDATE.search(version)):
        return ""
    return ".".join(map(str, _NEWER_SINCE))


def _parse(version: str) -> tuple[int, ...]:
    plain = _PLAIN.match(version)
    return (int(plain[1]), int(plain[2])) if plain else (0,)


class Lifecycle:
    """An event of a pod or a container. container_id: empty for a pod's event.

    Most events are of containers that do not concern us, as their ids show: the rest is read only where it is needed.
    """

    def __init__(self, payload: bytes, event: int = 0) -> None:
        """Read an event. Raises: DecodeError.

        event: NRI's number, if the event came by its own RPC: StopContainer always, all of them from NRI 0.12. Without
        it, the event came by StateChange, whose fields are numbered differently.
        """
        read = pb.StopContainerRequest.FromString if event else pb.StateChangeEvent.FromString
        self._message: pb.StopContainerRequest | pb.StateChangeEvent = read(payload)
        self.pod_id = PodId(self._message.pod.id)
        self.container_id = ContainerId(self._message.container.id)
        self._marked = MARKER_NEEDLE in payload
        self.shows_nodes = NODE_NEEDLE in payload  # of a GPU, perhaps

    @property
    def container(self) -> Container | None:
        """Return the container, or None for a pod's event."""
        return container_from_pb(self._message.container, self.pod) if self.container_id else None

    @property
    def created(self) -> bool:
        """Return whether the runtime has not started the container, as far as it knew when it made the message."""
        return bool(self._message.container.state == pb.CONTAINER_CREATED)

    @property
    def pod(self) -> Pod:
        return pod_from_pb(self._message.pod)

    @property
    def pid(self) -> int:
        """Return the pid of the container's process on the host, or 0 if the runtime does not tell."""
        return self._message.container.pid

    @property
    def asks(self) -> bool:
        """Return whether the pod or the container has an annotation of ours, or may have a ResourceClaim's devices."""
        return bool(
            self._marked
            or our_annotations(self._message.pod.annotations)
            or our_annotations(self._message.container.annotations)
        )
