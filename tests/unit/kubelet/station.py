"""Both halves in this process, on a node with four GPUs: beside a kubelet, and without a runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.gpu import Gpu, GpuUuid
from nri_gpu.domain.kubelet import ResourceStatus
from nri_gpu.domain.node import Node
from nri_gpu.kubelet.answer import RequiredDevice
from nri_gpu.kubelet.controller import KubeletController
from nri_gpu.kubelet.devices import AdvertisedDevices
from nri_gpu.kubelet.endpoint import EndpointTimes
from nri_gpu.nri.session import Listed
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.policy.model import Policy
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.ttrpc.events import Status
from tests.support import builders
from tests.support.no_recorder import NoRecorder
from tests.support.plugin import KEY, Clock

TOKENS = bytes(range(100, 132))
GPU = "nvidia.com/gpu"


class Halves:
    """The ledger's two users, without sockets. changed: called when either may have moved something."""

    def __init__(self, policy: Policy | None = None, settings: KubeletSettings | None = None) -> None:
        self.clock = Clock()
        self.age_s = 0.0
        self.marks: dict[str, dict[str, str]] = {}
        self.changed: Callable[[], None] = lambda: None
        self.node_state = NodeState(builders.inventory(simulated=True))  # nobody looks for processes on it
        self.node_state.put_driver(builders.driver())
        self.node_state.subscribe(lambda: self.changed(), Changed.NODE, Changed.LEDGER)
        self.policy = policy or Policy.default()
        self.settings = settings or self.policy.kubelet
        self.start_daemon(connected=True)

    def restart_daemon(self) -> None:
        """A new process: whatever was in memory is gone."""
        self.start_daemon(connected=self.offers.connected)

    def start_daemon(self, *, connected: bool) -> None:
        self.node_state.policy, self.node_state.ledger = self.policy, Ledger()
        needs = PluginDependencies(
            self.clock, lambda action: action(), NoRecorder(), inventory_age_s=lambda: self.age_s
        )
        self.plugin = Plugin(self.node_state, needs, KEY)
        self.plugin.kubelet.key = TOKENS
        self.required = RequiredDevice(self.settings)
        self.offers = AdvertisedDevices(self.settings, self.node_state, self.plugin, self.required, connected=connected)

    def allocate(self, *ids: str, resource: str = GPU) -> Mapping[str, str]:
        """Allocate for one container: its annotations."""
        (answer,) = self.offers.allocate(resource, [ids])
        return answer.annotations

    def keyed(self) -> None:
        """The tokens' key can be read."""
        self.plugin.kubelet.keyed(TOKENS, self.plugin.ledger)

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
        self.marks[of.id] = dict(answer.adjust.annotations)
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
                Listed(replace(of, annotations={**of.annotations, **self.marks[of.id]}), created=not runs)
                for of, runs in alive
            )
        )

    def event(self, event: pb.Event, of: Container) -> bytes | Status:
        message = pb.StateChangeEvent(
            event=event, pod=builders.pod_message(of.pod), container=builders.container_message(of)
        )
        return self.plugin.lifecycle(message.SerializeToString())

    def start(self, of: Container) -> bool:
        """Whether it may."""
        return self.event(pb.START_CONTAINER, of) == b""

    def stop(self, of: Container) -> None:
        self.event(pb.STOP_CONTAINER, of)

    def end_pod(self, of: Container) -> None:
        message = pb.StateChangeEvent(event=pb.STOP_POD_SANDBOX, pod=builders.pod_message(of.pod))
        self.plugin.lifecycle(message.SerializeToString())


# Facts are waited for; how long nothing is done about them only makes tests long.
QUICK = EndpointTimes(look_every=0.05, first_wait=0.02, longest_wait=0.1)


class Station(Halves):
    """With the device plugin served, for a kubelet on `folder`."""

    def __init__(
        self,
        folder: Path,
        policy: Policy | None = None,
        settings: KubeletSettings | None = None,
        times: EndpointTimes = QUICK,
        tick_s: float = 5.0,
    ) -> None:
        placed = replace(
            settings or (policy or Policy.default()).kubelet,
            enabled=True,
            podresources="",
            dir=str(folder / "device-plugins"),
            registry_dir=str(folder / "plugins_registry"),
            cdi_dir=str(folder / "cdi"),
        )
        self._times = times
        self._tick_s = tick_s
        super().__init__(policy, placed)
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.controller = KubeletController(
            self.node_state, self.plugin, self.settings, times=self._times, tick_s=self._tick_s
        )
        self.offers = self.controller.devices
        self.connected(True)
        self.changed = self.controller.changed
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


def again(of: Container, attempt: int = 1) -> Container:
    """Its next attempt: another id, all else the same."""
    return replace(of, id=ContainerId(f"{of.id}.{attempt}"))
