"""Events of pods and containers: START_CONTAINER, STOP_CONTAINER and the others, read from protobuf."""

from __future__ import annotations

from typing import Any, ClassVar

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId
from nri_gpu.domain.value import Value
from nri_gpu.nri.convert import container_from_pb, our_annotations, pod_from_pb


class Lifecycle(Value, frozen=True):
    """An event. event: NRI's number, `pb.Event`. container_id: empty for a pod's event.

    Most events are of containers that do not concern us, as their ids show: the rest is read only where it is needed.
    """

    aside: ClassVar = ("_message",)

    event: int
    pod_id: PodId
    container_id: ContainerId
    _message: Any  # one of the generated classes with `pod` and `container`

    @property
    def container(self) -> Container | None:
        """The container; None for a pod's event."""
        return container_from_pb(self._message.container, pod_from_pb(self._message.pod)) if self.container_id else None

    @property
    def pod(self) -> Pod:
        """The pod."""
        return pod_from_pb(self._message.pod)

    @property
    def pid(self) -> int:
        """The pid of the container's process on the host; 0 where the runtime does not tell."""
        return int(self._message.container.pid)

    @property
    def asks(self) -> bool:
        """Whether an annotation of ours is on the pod or on the container."""
        return bool(
            our_annotations(self._message.pod.annotations) or our_annotations(self._message.container.annotations)
        )


def state_change_from_pb(payload: bytes) -> Lifecycle:
    """StateChangeEvent: how events arrive up to NRI 0.11."""
    message = pb.StateChangeEvent.FromString(payload)
    return _lifecycle(message.event, message)


def event_from_pb(event: int, payload: bytes) -> Lifecycle:
    """An event by its own RPC: StopContainer always, the others from NRI 0.12; fields are numbered differently."""
    return _lifecycle(event, pb.StopContainerRequest.FromString(payload))


def _lifecycle(event: int, message: Any) -> Lifecycle:  # noqa: ANN401 - three generated classes with equal fields
    return Lifecycle(event, PodId(message.pod.id), ContainerId(message.container.id), message)
