"""An NRI session as a table, and its Synchronize. Pure: knows no socket and no clock.

    REGISTERING -> CONFIGURED -> (SYNCHRONIZING ->) READY

Configure may overtake the reply to RegisterPlugin, so that reply moves nothing. A plugin that containerd 1.7 started
itself never gets Synchronize; its events arrive in CONFIGURED.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.errors import RemoteProtocolError
from nri_gpu.nri.convert import MARKER_NEEDLE, VISIBLE_NEEDLE, container_from_pb, pod_from_pb
from nri_gpu.nri.list_size import ContainerSize, ListSize, PodSize, fields


class Phase(StrEnum):
    REGISTERING = "registering"
    CONFIGURED = "configured"
    SYNCHRONIZING = "synchronizing"
    READY = "ready"


class Step(StrEnum):
    CONFIGURE = "Configure"
    PART = "Synchronize, more to come"
    LAST = "Synchronize"
    EVENT = "event"


TRANSITIONS: Final[Mapping[Phase, Mapping[Step, Phase]]] = {
    Phase.REGISTERING: {Step.CONFIGURE: Phase.CONFIGURED},
    Phase.CONFIGURED: {Step.PART: Phase.SYNCHRONIZING, Step.LAST: Phase.READY, Step.EVENT: Phase.CONFIGURED},
    Phase.SYNCHRONIZING: {Step.PART: Phase.SYNCHRONIZING, Step.LAST: Phase.READY},
    Phase.READY: {Step.EVENT: Phase.READY},
}


_UNKNOWN: Final = "?"  # name of a pod that the runtime has not listed
_PODS, _CONTAINERS, _MORE = 1, 2, 3  # fields of SynchronizeRequest


class Listed(Struct, frozen=True):
    """A container in Synchronize. created: not started yet; otherwise it runs. pid: on the host, or 0 if unknown."""

    container: Container
    created: bool
    pid: int = 0


class Parts:
    """The parts of one Synchronize: a container's pod may come in another part than the container.

    A runtime may list hundreds of MiB: each object is read as it comes, and its bytes are not kept.
    listing: the sizes of the objects. stage_dir: see `container_from_pb`.
    """

    def __init__(self, stage_dir: str = "") -> None:
        self.listing = ListSize()
        self._stage_dir = stage_dir
        self._pods: dict[PodId, Pod] = {}
        self._containers: list[tuple[int, Listed]] = []  # with their times of creation, in ns

    def add(self, payload: bytes) -> bool:
        """Take a SynchronizeRequest. Return whether more follow. Keep nothing of it when it raises DecodeError."""
        pods: dict[PodId, Pod] = {}
        containers: list[tuple[int, Listed]] = []
        sizes: list[PodSize | ContainerSize] = []
        more = False
        for field in fields(payload):
            data = payload[field.start : field.end]
            if field.number == _PODS:
                pod = pod_from_pb(pb.PodSandbox.FromString(data))
                pods[pod.id] = pod
                sizes.append(PodSize(pod.id, pod.name, pod.namespace, len(data)))
            elif field.number == _CONTAINERS:
                container = pb.Container.FromString(data)
                id_ = PodId(container.pod_sandbox_id)
                pod = pods.get(id_) or self._pods.get(id_) or _unknown_pod(container)
                if pod.name == _UNKNOWN:
                    sizes.append(_labelled_pod(container))
                listed = _listed_from_pb(container, pod, data, self._stage_dir)
                containers.append((container.created_at, listed))
                privileged = listed.container.privileged
                sizes.append(ContainerSize(ContainerId(container.id), id_, container.name, len(data), privileged))
            elif field.number == _MORE:
                more = bool(field.value)
        self._pods |= pods
        self._containers += containers
        for size in sizes:
            self.listing.add(size)
        return more

    def listed(self) -> tuple[Listed, ...]:
        """Return all containers, each with its pod, the newest first if the runtime tells (NRI 0.10). Forget them.

        The ledger is rebuilt in this order: of two created containers with the same GPUs, the older has lapsed.
        """
        self._containers.sort(key=lambda each: -each[0])
        listed = tuple([self._with_pod(each) for _, each in self._containers])
        self._pods, self._containers = {}, []
        return listed

    def _with_pod(self, listed: Listed) -> Listed:
        """Add its pod to a container, if the pod came in a later part."""
        container = listed.container
        if container.pod.name != _UNKNOWN or (pod := self._pods.get(container.pod.id)) is None:
            return listed
        return replace(listed, container=replace(container, pod=pod))


def _listed_from_pb(container: pb.Container, pod: Pod, data: bytes, stage_dir: str) -> Listed:
    """Convert a listed container. data: its bytes; searching these is faster than searching each variable and mount."""
    staged = stage_dir if stage_dir.encode() in data else ""
    armed = VISIBLE_NEEDLE in data or MARKER_NEEDLE in data
    read = container_from_pb(container, pod, exists=True, armed=armed, stage_dir=staged)
    return Listed(read, created=container.state == pb.CONTAINER_CREATED, pid=container.pid)


def _unknown_pod(container: pb.Container) -> Pod:
    return Pod(
        id=PodId(container.pod_sandbox_id), uid=PodUid(container.pod_sandbox_id), name=_UNKNOWN, namespace=_UNKNOWN
    )


def _labelled_pod(container: pb.Container) -> PodSize:
    """Return the pod of a container by the kubelet's labels: a list that never ends may lack its pods."""
    name, namespace = (container.labels.get(f"io.kubernetes.pod.{key}", _UNKNOWN) for key in ("name", "namespace"))
    return PodSize(PodId(container.pod_sandbox_id), name, namespace, 0)


class Session:
    """The state of one connection, and the parts of its Synchronize so far. stage_dir: see `Parts`."""

    def __init__(self, stage_dir: str = "") -> None:
        self.phase = Phase.REGISTERING
        self._parts = Parts(stage_dir)

    @property
    def listing(self) -> ListSize:
        """Return the sizes of the objects in the parts of Synchronize so far."""
        return self._parts.listing

    @property
    def cut_short(self) -> bool:
        """Return whether the session is between Configure and the end of Synchronize."""
        return self.phase in (Phase.CONFIGURED, Phase.SYNCHRONIZING)

    def step(self, step: Step) -> None:
        """Move on. Raises: RemoteProtocolError when the runtime may not do that now."""
        self.phase = self._check(step)

    def synchronize(self, payload: bytes) -> tuple[Listed, ...] | None:
        """Take one part. Return all containers after the last part, None while more is to come.

        An empty part is no end: some runtimes send thousands of them (containerd/nri pkg/adaptation/plugin.go).

        Raises: RemoteProtocolError when the runtime may not do that now; nothing of the part is kept then.
        """
        self._check(Step.LAST)  # more or not: both may come in the same phases
        more = self._parts.add(payload)
        self.step(Step.PART if more else Step.LAST)
        return None if more else self._parts.listed()

    def _check(self, step: Step) -> Phase:
        after = TRANSITIONS[self.phase].get(step)
        if after is None:
            raise RemoteProtocolError(f"{step} came while the session was {self.phase}")
        return after
