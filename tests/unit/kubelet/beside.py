"""A node where others' device plugins give GPUs too, without sockets: the kubelet's word is put in by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Container, Pod
from nri_gpu.domain.kubelet import AllocatedDevice, ContainerDevices, PodDevices
from nri_gpu.kubelet.allocations import KubeletPods
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.policy.model import Policy
from nri_gpu.request.environment import VARIABLE
from tests.support import builders
from tests.support.builders import uuid
from tests.unit.kubelet.station import GPU, Halves

RESERVED = "kai-resource-reservation"
OURS = "example.com/gpu"
THEIRS = KubeletSettings(enabled=True, resource=OURS, inject_for=Globs(("nvidia.com/*",)))
SHARING = replace(THEIRS, reservations=Globs((RESERVED,)))


class Beside(Halves):
    """listed: what the kubelet lists."""

    def __init__(self, settings: KubeletSettings = THEIRS) -> None:
        self.listed: dict[tuple[str, str], PodDevices] = {}
        super().__init__(replace(Policy.default(), kubelet=settings))

    def start_daemon(self, *, connected: bool) -> None:
        super().start_daemon(connected=connected)
        self.pods = KubeletPods()
        self.plugin.external.pods = self.pods

    def came(self, of: Container | Pod) -> None:
        """Its sandbox is made, as the runtime tells it."""
        pod = of.pod if isinstance(of, Container) else of
        message = pb.StateChangeEvent(event=pb.RUN_POD_SANDBOX, pod=builders.pod_message(pod))
        assert self.plugin.lifecycle(message.SerializeToString()) == b""

    def give(self, of: Container, ids: Sequence[str], resource: str = GPU) -> None:
        """What the kubelet lists from now on; it was told to nobody yet."""
        key = (of.pod.namespace, of.pod.name)
        others = [each for each in self.listed.get(key, PodDevices(*key)).containers if each.name != of.name]
        known = self.listed.get(key, PodDevices(*key)).container(of.name)
        devices = (*(known.devices if known else ()), *(AllocatedDevice(resource, id_) for id_ in ids))
        self.listed[key] = PodDevices(*key, (*others, ContainerDevices(of.name, devices)))

    def answer(self) -> None:
        """Every question that waits."""
        for pod in tuple(self.pods.questions):
            key = (pod.namespace, pod.name)
            self.pods.answered((pod,))
            self.pods.put(pod, self.listed.get(key, PodDevices(*key, (ContainerDevices("main"),))))

    def ask_all(self) -> None:
        """A List, of all."""
        self.pods.put_list(self.pods.all(), tuple(self.listed.values()))
        self.plugin.kubelet_listed(tuple(self.listed.values()))
        self.pods.settled = True

    def over(self, of: Container) -> None:
        """The pod is gone."""
        self.end_pod(of)
        self.listed.pop((of.pod.namespace, of.pod.name), None)

    def admitted(self, of: Container, ids: Sequence[str], resource: str = GPU) -> None:
        """The whole way up to CreateContainer."""
        self.give(of, ids, resource)
        self.came(of)
        self.answer()


def of_plugin(*indices: int, pod: str = "train", claim: str | None = None, **fields: object) -> Container:
    """A container as NVIDIA's device plugin leaves it, with deviceListStrategy=envvar."""
    env = {VARIABLE: ",".join(uuid(index) for index in indices)}
    return replace(builders.container(claim, of=pod), **{"env": env, **fields})


def reply_of(halves: Halves, of: Container) -> pb.CreateContainerResponse:
    reply = halves.plugin.create_container(builders.create_payload(of))
    assert isinstance(reply, bytes), reply
    return pb.CreateContainerResponse.FromString(reply)


def env_of(reply: pb.CreateContainerResponse) -> Mapping[str, str]:
    return {each.key: each.value for each in reply.adjust.env}


def nodes_of(reply: pb.CreateContainerResponse) -> set[str]:
    return {each.path for each in reply.adjust.linux.devices}


__all__ = ["OURS", "RESERVED", "SHARING", "THEIRS", "Beside", "env_of", "nodes_of", "of_plugin", "reply_of"]
