"""Requests of the size that real ones have, each for a container of its own."""

from __future__ import annotations

from msgspec import Struct

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import Event
from nri_gpu.ttrpc import SEND_MAX
from tests.support import nri_messages as nri

REQUEST_BYTES = 4700  # a CreateContainer of a small pod under Kubernetes


class Life(Struct, frozen=True):
    """One container: payload of what is asked of a plugin, the first being the one that counts."""

    create: bytes
    post_start: bytes
    remove: bytes


def life(number: int, claim: str = "") -> Life:
    """A container's creation and removal; asks for GPUs by `claim`, or for nothing."""
    annotations = {"kubernetes.io/config.source": "api", "checksum/config": "0" * 64}
    if claim:
        annotations["gpu.nri.io"] = claim
    pod = nri.pod(f"pod-{number:08}", annotations=annotations)
    pod.labels.update({"app": "train", "pod-template-hash": "5d4f8c7b9"})
    made = container_of(pod, number)
    events = [nri.event(kind, pod, made) for kind in (Event.POST_START_CONTAINER, Event.REMOVE_CONTAINER)]
    assert {method for method, _ in events} == {"StateChange"}
    return Life(nri.create(pod, made), *(payload for _, payload in events))


def node(count: int, asking: int) -> tuple[bytes, ...]:
    """Synchronize of a whole node, `asking` of its containers with an annotation, in parts as a runtime makes them."""
    pods, containers = [], []
    for number in range(count):
        asks = {"gpu.nri.io": "none"} if number < asking else {}
        pod = nri.pod(f"pod-{number:08}", annotations=asks)
        pods.append(pod)
        containers.append(nri.running(container_of(pod, number)))
    bytes_each = len(containers[0].SerializeToString()) + len(pods[0].SerializeToString()) + 8
    return tuple(nri.synchronize(pods, containers, count * bytes_each // SEND_MAX + 1))


def container_of(pod: pb.PodSandbox, number: int) -> pb.Container:
    """A container of that pod, with an id of its own, whose creation has the usual size."""
    made = nri.container(pod)
    made.id = f"{number:064x}"
    filler = REQUEST_BYTES - len(nri.create(pod, made)) - 8
    # Kubernetes puts a variable for every service into every container; that is what makes requests this long.
    for index in range(filler // 47):
        made.env.append(f"SVC_{index:03}_PORT_8080_TCP_ADDR=tcp://10.96.0.1:8080"[:45])
    return made
