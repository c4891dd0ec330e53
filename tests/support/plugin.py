"""A plugin and its supervisor in this process, on a node with four GPUs, and the scripted runtime that they talk to."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Container, ContainerId, PodId
from nri_gpu.domain.decision import Decision, Grant
from nri_gpu.domain.gpu import Capability, GpuUuid
from nri_gpu.domain.node import DriverFiles, DriverTree, Inventory, Node
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.kubelet.allocations import held_by_others
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.recording import Remembered
from nri_gpu.nri.convert import Configured
from nri_gpu.nri.session import Listed, Parts
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.decision_log import Refusals
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.supervisor import Identity, SessionFollowers, Supervisor
from nri_gpu.plugin.transport import LIMITS, ConnectionLimits
from nri_gpu.policy.model import Policy
from nri_gpu.policy.plugin_settings import REQUEST_BYTES, PluginSettings
from nri_gpu.system.cgroups import ContainerCgroups
from nri_gpu.system.runtime_cri import RuntimeCri
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.ttrpc import Status, StatusCode
from tests.support import nri_messages as nri
from tests.support.daemon import FOUR_GPUS
from tests.support.nri_messages import NRI_0_8, Flavour
from tests.support.scripted_runtime import Listener, ScriptedRuntime

KEY: Final = bytes(range(32))
CAPABILITIES: Final = (frozenset({Capability.COMPUTE, Capability.UTILITY}), frozenset({Capability.UTILITY}))


@functools.cache
def node(topology: Path = FOUR_GPUS) -> Node:
    """A node with its driver staged."""
    inventory = load_topology(topology, boot_clock=lambda: 0.0)
    trees = {some: DriverTree(f"/staged/{'+'.join(sorted(some))}", ("nvidia-smi",)) for some in CAPABILITIES}
    return Node(number=1, inventory=inventory, driver=DriverFiles("580.95.05", "580.95.05-test", trees, {}))


def listed(
    pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container], stage_dir: str = ""
) -> tuple[Listed, ...]:
    """What a plugin is told at the end of a Synchronize with these."""
    parts = Parts(stage_dir)
    for payload in nri.synchronize(pods, containers):
        parts.add(payload)
    return parts.listed()


class NoRecorder:
    """Keeps nothing: for a plugin without a state folder."""

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        pass

    def granted(self, grant: Grant, signed: str, now: float, revoked: Mapping[ContainerId, PodId]) -> bool:
        return True

    def revoked(self) -> Mapping[ContainerId, PodId]:
        return {}

    def removed(self, container_ids: Collection[ContainerId]) -> None:
        pass

    def settled(self, *container_ids: ContainerId) -> None:
        pass

    def synchronized(self, ledger: Ledger) -> None:
        pass

    def remembered(self, since: float) -> Iterable[Remembered]:
        return ()


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A Plugin without a runtime: what it was told to do later is kept, and what it told its owner."""

    def __init__(
        self,
        policy: Policy | None = None,
        topology: Path = FOUR_GPUS,
        stage_dir: str = "",
        cgroups: ContainerCgroups | None = None,
    ) -> None:
        self.clock = Clock()
        self._later: list[Callable[[], None]] = []
        self.state = NodeState(Inventory(taken_at=0), policy=policy, later=self.later)
        self.node = node(topology)
        self.ledgers: list[Ledger] = []
        self.inventory_age_s: float | None = 0.0
        self.state.first(lambda: self.ledgers.append(self.state.ledger), Changed.LEDGER)
        self.refusals = Refusals(lambda: self.clock())
        needs = PluginDependencies(
            self.clock,
            self.later,
            NoRecorder(),
            lambda: self.inventory_age_s,
            stage_dir=stage_dir,
            refusals=self.refusals,
            cgroups=cgroups or ContainerCgroups(),
        )
        self.plugin = Plugin(self.state, needs, KEY)

    def taken(self, *, shared: bool = False) -> frozenset[GpuUuid]:
        """GPUs that others than the kubelet's pods hold."""
        return held_by_others(self.state.ledger, self.state.settings.kubelet, shared=shared)

    @property
    def node(self) -> Node:
        return self.state.node

    @node.setter
    def node(self, node: Node) -> None:
        self.state.node = node

    def later(self, action: Callable[[], None]) -> None:
        self._later.append(action)

    def settle(self) -> None:
        """Do what was put off until after the reply."""
        while self._later:
            self._later.pop(0)()

    def ask(self, of: pb.PodSandbox, made: pb.Container | None = None) -> pb.CreateContainerResponse | Status:
        """CreateContainer, by default of a container of that pod."""
        reply = self.plugin.create_container(nri.create(of, made or nri.container(of)))
        self.settle()
        return reply if isinstance(reply, Status) else pb.CreateContainerResponse.FromString(reply)

    def create(self, of: pb.PodSandbox, made: pb.Container | None = None) -> pb.CreateContainerResponse:
        """The same, which must succeed."""
        reply = self.ask(of, made)
        assert isinstance(reply, pb.CreateContainerResponse), reply
        return reply

    def refused(self, of: pb.PodSandbox, made: pb.Container | None = None) -> str:
        """The sentence with which it is refused."""
        reply = self.ask(of, made)
        assert isinstance(reply, Status), reply
        return reply.message

    def granted(self, claim: str = "1", name: str = "train") -> tuple[pb.PodSandbox, pb.Container]:
        """A pod with a container as later requests show it, with its grant and its nodes."""
        of = nri.asking(claim, name)
        return of, nri.adjusted(nri.container(of), self.create(of))

    def tell(self, kind: Event, of: pb.PodSandbox, made: pb.Container | None = None) -> bytes | Status:
        """An event by each way that a runtime has for it; all must be answered alike."""
        reply = self.plugin.lifecycle(nri.event(kind, of, made, own_rpc=True)[1], kind)
        if kind not in nri.ALWAYS_OWN:
            assert self.plugin.lifecycle(nri.event(kind, of, made)[1]) == reply
        self.settle()
        return reply

    def not_started(self, of: pb.PodSandbox, made: pb.Container | None = None) -> str:
        """The sentence with which its start is refused."""
        reply = self.tell(Event.START_CONTAINER, of, made or nri.container(of))
        assert isinstance(reply, Status)
        assert reply.code is StatusCode.FAILED_PRECONDITION
        return reply.message

    def synchronize(self, pods: Sequence[pb.PodSandbox] = (), containers: Sequence[pb.Container] = ()) -> None:
        """The runtime connects, and lists these."""
        self.plugin.synchronized(listed(pods, containers, self.plugin.stage_dir))
        self.settle()

    def phases(self) -> dict[str, str]:
        """Container id -> phase, of all the ledger remembers."""
        return {entry.grant.container_id: entry.phase.value for entry in self.plugin.ledger.entries.values()}


class ServedPlugin(Bench):
    """The same with its supervisor, on the socket of a scripted runtime."""

    def __init__(
        self,
        folder: Path,
        *,
        request_bytes: int = REQUEST_BYTES,
        limits: ConnectionLimits = LIMITS,
        opens_nothing: bool = False,
    ) -> None:
        """Its CRI socket is `cri.sock` in that folder. opens_nothing: being away does not."""
        super().__init__()
        self.listener = Listener(folder / "nri.sock")
        self.identity = Identity("nri-gpu", "10")
        self.request_bytes = request_bytes
        self.configured: list[Configured] = []
        self.ready = 0
        self.away: list[str] = []
        self.cri = RuntimeCri(lambda: replace(Policy.default().guard, cri_socket=str(folder / "cri.sock")))
        self.sizes = Sizes(
            lambda: PluginSettings(request_bytes=self.request_bytes),
            self.later,
            cri=self.cri,
            forgotten=self.plugin.sandbox_forgotten,
        )
        self.supervisor = Supervisor(
            self.plugin,
            lambda: self.identity,
            SessionFollowers(self.configured.append, self._count_ready, self.away.append, self.away.append),
            self.sizes,
            limits,
            away_opens_nothing=lambda: opens_nothing,
        )
        self._serving: asyncio.Task[None] | None = None

    def later(self, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(action)

    async def __aenter__(self) -> Self:
        self.listener.open()
        self.start()
        return self

    def start(self) -> None:
        """Let the supervisor run; entering does it once the socket is there."""
        self._serving = asyncio.create_task(self.supervisor.run(self.listener.path))

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop(0.0)
        assert self._serving
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self.listener.__aexit__()

    @property
    def alive(self) -> bool:
        """Whether the supervisor still tries."""
        return self._serving is not None and not self._serving.done()

    async def connected(self, flavour: Flavour = NRI_0_8) -> ScriptedRuntime:
        """A runtime that has been through the whole handshake with the plugin."""
        runtime = await self.listener.accept()
        await runtime.handshake(flavour)
        return runtime

    def _count_ready(self) -> None:
        self.ready += 1
