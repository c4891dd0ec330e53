"""The NRI plugin and our device plugin in this process, on a node with four GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.allocation import AllocatedDevice, ContainerDevices, DynamicDevice, PodDevices, ResourceStatus
from nri_gpu.domain.container import Container, ContainerId, Pod
from nri_gpu.domain.gpu import Gpu, GpuUuid
from nri_gpu.domain.node import Node
from nri_gpu.kubelet.advertised import AdvertisedDevices
from nri_gpu.kubelet.allocations import KubeletPods, held_by_others
from nri_gpu.kubelet.kubelet_controller import KubeletController
from nri_gpu.kubelet.registered_socket import EndpointTimes
from nri_gpu.kubelet.required_device import RequiredDevice, token_key, write_token
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.nri.session import Listed
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.policy.model import Policy
from nri_gpu.request.environment import VARIABLE
from nri_gpu.system.state import NodeState
from nri_gpu.ttrpc.frames import Status
from tests.support import builders
from tests.support.builders import uuid
from tests.support.log import Log
from tests.support.plugin import KEY, Clock, NoRecorder

TOKENS = bytes(range(100, 132))
GPU = "nvidia.com/gpu"


class PluginNode:
    """Both plugins without sockets."""

    def __init__(self, policy: Policy | None = None, settings: KubeletSettings | None = None) -> None:
        self.clock = Clock()
        self.age_s = 0.0
        self.annotations: dict[str, dict[str, str]] = {}
        self.recorder = NoRecorder()
        # Nobody looks for processes on it.
        self.node_state = NodeState(builders.inventory(simulated=True), later=lambda action: action())
        self.node_state.put_driver(builders.driver())
        self.policy = policy or Policy.default()
        self.settings = settings or self.policy.kubelet
        self.start_daemon(connected=True)

    def restart_daemon(self) -> None:
        """A new process: whatever was in memory is gone."""
        self.start_daemon(connected=self.devices.connected)

    def start_daemon(self, *, connected: bool) -> None:
        self.node_state.use(self.policy)
        self.node_state.ledger = Ledger()
        needs = PluginDependencies(
            self.clock, lambda action: action(), self.recorder, inventory_age_s=lambda: self.age_s
        )
        self.plugin = Plugin(self.node_state, needs, KEY)
        self.plugin.kubelet.key = TOKENS
        self.required = RequiredDevice(self.settings)
        self.devices = AdvertisedDevices(
            self.settings, self.node_state, self.plugin, self.required, connected=connected
        )

    def allocate(self, *ids: str, resource: str = GPU) -> Mapping[str, str]:
        """Allocate for one container: its annotations."""
        (answer,) = self.devices.allocate(resource, [ids])
        return answer.annotations

    def taken(self, *, shared: bool = False) -> frozenset[GpuUuid]:
        """GPUs that others than the kubelet's pods hold."""
        offered = self.devices.offered()
        return held_by_others(self.plugin.ledger, self.node_state.settings.kubelet, offered, shared=shared)

    def keyed(self) -> None:
        """The tokens' key can be read."""
        self.plugin.keyed(TOKENS)

    @property
    def node(self) -> Node:
        return self.node_state.node

    def put_gpus(self, gpus: Sequence[Gpu], **fields: object) -> None:
        self.node_state.put_inventory(replace(self.node.inventory, gpus=tuple(gpus), **fields))

    def create(self, of: Container) -> tuple[GpuUuid, ...] | str:
        """CreateContainer: what was granted, or why not."""
        reply = self.plugin.create_container(builders.create_payload(of))
        if isinstance(reply, Status):
            return reply.message
        answer = pb.CreateContainerResponse.FromString(reply)
        self.annotations[of.id] = dict(answer.adjust.annotations)
        entry = self.plugin.ledger.entries.get(of.id)
        return entry.grant.uuids if entry else ()

    def restarted(self, alive: Mapping[ContainerId, tuple[Container, bool]]) -> None:
        """The daemon, and the runtime lists what there is: each container, and whether it runs."""
        self.restart_daemon()
        self.relist(alive.values())

    def relist(self, alive: Iterable[tuple[Container, bool]]) -> None:
        """Synchronize, with these containers; whether each runs."""
        self.plugin.synchronized(
            tuple(
                Listed(replace(of, annotations={**of.annotations, **self.annotations[of.id]}), created=not runs)
                for of, runs in alive
            )
        )

    def event(self, event: pb.Event, of: Container) -> bytes | Status:
        return self.plugin.lifecycle(builders.event_payload(event, of))

    def sandbox_created(self, of: Container | Pod) -> None:
        """Its sandbox is made, as the runtime tells it."""
        pod = of.pod if isinstance(of, Container) else of
        assert self.plugin.lifecycle(builders.event_payload(pb.RUN_POD_SANDBOX, pod)) == b""

    def start(self, of: Container) -> bool:
        """Whether it may."""
        return self.event(pb.START_CONTAINER, of) == b""

    def stop(self, of: Container) -> None:
        self.event(pb.STOP_CONTAINER, of)

    def end_pod(self, of: Container) -> None:
        self.plugin.lifecycle(builders.event_payload(pb.STOP_POD_SANDBOX, of.pod))


# Facts are waited for; how long nothing is done about them only makes tests long.
QUICK = EndpointTimes(look_every=0.05, first_wait=0.02, longest_wait=0.1)


class KubeletNode(PluginNode):
    """With the device plugin served, for a kubelet on `folder`."""

    def __init__(
        self,
        folder: Path,
        settings: KubeletSettings | None = None,
        times: EndpointTimes = QUICK,
        tick_s: float = 5.0,
    ) -> None:
        placed = replace(
            settings or KubeletSettings(),
            enabled=True,
            podresources="",
            dir=str(folder / "device-plugins"),
            registry_dir=str(folder / "plugins_registry"),
            cdi_dir=str(folder / "cdi"),
        )
        self._times = times
        self._tick_s = tick_s
        super().__init__(settings=placed)
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.controller = KubeletController(
            self.node_state, self.plugin, self.settings, times=self._times, tick_s=self._tick_s
        )
        self.devices = self.controller.devices
        self.connected(True)
        self._running = asyncio.create_task(self.controller.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._running
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def connected(self, yes: bool) -> None:
        self.controller.connected(yes)

    def statuses(self) -> tuple[ResourceStatus, ...]:
        return self.controller.report() or ()


def from_kubelet(
    annotations: Mapping[str, str], pod: str = "train", claim: str | None = None, **fields: object
) -> Container:
    """A container as the runtime shows it whom the kubelet gave GPUs."""
    return replace(builders.container(claim, of=pod), annotations=dict(annotations), **fields)


def token(*indices: int, key: bytes = TOKENS) -> dict[str, str]:
    """The annotation that Allocate answers for these GPUs."""
    return {token_key(GPU): write_token(GPU, [uuid(index) for index in indices], key, shared=False)}


async def until(holds: Callable[[], object]) -> None:
    """Until it holds, for at most 10 s."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - a server in this very loop is asked
            await asyncio.sleep(0.005)


async def said(log: Log, text: str) -> None:
    """Until a warning has that text in its fault; the test's own deadline is the limit."""
    while not any(text in line.fields.get("fault", "") for line in log.warnings()):  # noqa: ASYNC110 - no event of it
        await asyncio.sleep(0.01)


def again(of: Container, attempt: int = 1) -> Container:
    """Its next attempt: another id, all else the same."""
    return replace(of, id=ContainerId(f"{of.id}.{attempt}"))


RESERVED = "kai-resource-reservation"
OURS = "example.com/gpu"
INJECTING = KubeletSettings(enabled=True, resource=OURS, inject_for=Globs(("nvidia.com/*",)))
SHARING = replace(INJECTING, reservations=Globs((RESERVED,)))


class ExternalNode(PluginNode):
    """listed: what the kubelet lists."""

    def __init__(self, settings: KubeletSettings = INJECTING) -> None:
        self.listed: dict[tuple[str, str], PodDevices] = {}
        super().__init__(replace(Policy.default(), kubelet=settings))

    def start_daemon(self, *, connected: bool) -> None:
        super().start_daemon(connected=connected)
        self.pods = KubeletPods(told=self.plugin.kubelet_told)
        self.plugin.external.pods = self.pods

    def lists(self, of: Container, ids: Sequence[str], resource: str = GPU) -> None:
        """What the kubelet lists from now on; it was told to nobody yet."""
        key = (of.pod.namespace, of.pod.name)
        others = [each for each in self.listed.get(key, PodDevices(*key)).containers if each.name != of.name]
        known = self.listed.get(key, PodDevices(*key)).container(of.name)
        devices = (*(known.devices if known else ()), *(AllocatedDevice(resource, id_) for id_ in ids))
        self.listed[key] = PodDevices(*key, (*others, ContainerDevices(of.name, devices)))

    def prepares(self, of: Container, *devices: str, pool: str = "node1") -> None:
        """What the kubelet lists from now on of NVIDIA's DRA driver; it was told to nobody yet."""
        prepared = tuple(DynamicDevice(pool, each) for each in devices)
        key = (of.pod.namespace, of.pod.name)
        self.listed[key] = PodDevices(*key, (ContainerDevices(of.name, prepared=prepared),))

    def answer(self) -> None:
        """Every question that waits."""
        for pod in tuple(self.pods.questions):
            key = (pod.namespace, pod.name)
            self.pods.answered((pod,))
            self.pods.put(pod, self.listed.get(key, PodDevices(*key, (ContainerDevices("main"),))))

    def list_all(self) -> None:
        """A List, of all."""
        self.pods.put_list(self.pods.all(), tuple(self.listed.values()))
        self.plugin.kubelet_listed(tuple(self.listed.values()))
        self.pods.settled = True

    def pod_deleted(self, of: Container) -> None:
        """The pod is gone."""
        self.end_pod(of)
        self.listed.pop((of.pod.namespace, of.pod.name), None)

    def admitted(self, of: Container, ids: Sequence[str], resource: str = GPU) -> None:
        """The whole way up to CreateContainer."""
        self.lists(of, ids, resource)
        self.sandbox_created(of)
        self.answer()


def of_plugin(*indices: int, pod: str = "train", claim: str | None = None, **fields: object) -> Container:
    """A container as NVIDIA's device plugin leaves it, with deviceListStrategy=envvar."""
    env = {VARIABLE: ",".join(uuid(index) for index in indices)}
    return replace(builders.container(claim, of=pod), **{"env": env, **fields})


def reply_of(node: PluginNode, of: Container) -> pb.CreateContainerResponse:
    reply = node.plugin.create_container(builders.create_payload(of))
    assert isinstance(reply, bytes), reply
    return pb.CreateContainerResponse.FromString(reply)


def nodes_of(reply: pb.CreateContainerResponse) -> set[str]:
    return {each.path for each in reply.adjust.linux.devices}
