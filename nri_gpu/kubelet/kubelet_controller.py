"""The kubelet's device plugin in the daemon, where policy wants it. gRPC is imported only then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from loguru import logger

from nri_gpu.domain.allocation import PodDevices, ResourceStatus
from nri_gpu.domain.container import Pod
from nri_gpu.domain.errors import RestartNeededError
from nri_gpu.kubelet.advertised import AdvertisedDevices, ReservingPlugin
from nri_gpu.kubelet.allocations import KubeletPods
from nri_gpu.kubelet.read_listing import ExternalAllocations
from nri_gpu.kubelet.required_device import RequiredDevice, TokenKey
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.succession import LOOK_S, Succession
from nri_gpu.system.tasks import LogOnce, first_done, raised_alone, set_within

if TYPE_CHECKING:
    from nri_gpu.kubelet.registered_socket import Endpoint, EndpointTimes

ABLE_WITHIN_S: Final = 2.0  # to wait for the first grant to be possible before registering, after a hand-over
TICK_S: Final = 5.0
UNAPPLIED: Final = (
    "the kubelet (before 1.29) or the runtime (enable_cdi off) left out the CDI device that Allocate answered"
)


class NriPlugin(ReservingPlugin, Protocol):
    """The parts that the controller needs of the NRI plugin."""

    external: ExternalAllocations

    def keyed(self, key: bytes) -> None:
        """Read the tokens that came before their key."""

    def lapse(self) -> None:
        """Release grants and reservations whose time is over."""

    def kubelet_listed(self, listed: tuple[PodDevices, ...]) -> None:
        """Take what PodResources lists."""

    def kubelet_told(self, pod: Pod, given: PodDevices) -> None:
        """Take what PodResources says of one pod."""


def set_up_grpc() -> None:
    """Set gRPC's environment, before its first import."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters is an error of ours, and logged once
    # Our children are started by vfork and exec at once; gRPC's handlers for forks would only warn of them.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")


async def inquire(
    settings: KubeletSettings, pods: KubeletPods, listed: Callable[[tuple[PodDevices, ...]], None] | None = None
) -> None:
    """Ask PodResources about pods until cancelled. listed: is told all pods now and then; None: nobody is told."""
    set_up_grpc()
    try:
        from nri_gpu.kubelet.podresources import SELDOM, USUAL, Inquiry, PodResources
    except ImportError as error:
        logger.bind(fault=str(error)).error("PodResources cannot be asked")
        pods.settled = True
        return
    await Inquiry(PodResources(Path(settings.podresources)), pods, listed, USUAL if listed else SELDOM).run()


class KubeletController:
    """The device plugin and the questions to PodResources, each where policy wants it.

    devices: what is advertised to the kubelet. offered_twice: as `AdvertisedDevices` takes it. claims: whether
    ResourceClaims are served here, beside which NVIDIA's driver may serve others. times: of endpoints; None: the usual
    ones. tick_s: between two looks for what changes with time alone: grants that lapse, an inventory that grows old.
    """

    def __init__(
        self,
        node_state: NodeState,
        plugin: NriPlugin,
        settings: KubeletSettings,
        succession: Succession | None = None,
        *,
        offered_twice: bool = False,
        claims: bool = False,
        times: EndpointTimes | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        self._node_state = node_state
        self._plugin = plugin
        self._settings = settings
        self._succession = succession
        self._times = times
        self._tick_s = tick_s
        self._required = RequiredDevice(settings)
        # The runtime may not let a successor in before the end of the CRI call that stops its predecessor's container
        # (containerd: BlockPluginSync), and that call waits for the kubelet to be served. So a successor counts as
        # connected from the beginning.
        succeeds = succession is not None and succession.succeeds
        self.devices = AdvertisedDevices(
            settings, node_state, plugin, self._required, connected=succeeds, offered_twice=offered_twice
        )
        self._key = TokenKey(Path(settings.dir))
        self._endpoints: dict[str, Endpoint] = {}  # by resource
        self._registers = True
        self._woken = asyncio.Event()
        self._log = LogOnce()
        self._left_out = ""
        self._fault = ""
        if settings.enabled:
            plugin.kubelet.awaited = True
            node_state.then(self.changed, *Changed)
        if settings.podresources and (settings.enabled or settings.injects_external or claims):
            # Set before we ask the runtime for events, so that events of sandboxes are among them.
            plugin.external.pods = KubeletPods(settled=False, told=plugin.kubelet_told)

    def begin(self) -> None:
        """Read the tokens' key before the runtime lists its containers, some of which have tokens."""
        if self._settings.enabled:
            self._look_for_key()

    def configured(self, configured: Configured) -> None:
        self._required.configured(configured)

    def connected(self, yes: bool) -> None:
        """Take whether the container runtime asks us about its containers."""
        self.devices.connected = yes
        self.changed()

    def changed(self) -> None:
        """Look again: the node, grants, the policy or the connection to the runtime changed."""
        self._woken.set()

    def stop_registering(self) -> None:
        """Answer what comes, and register nothing any more: the next daemon is about to register."""
        self._registers = False
        for endpoint in self._endpoints.values():
            endpoint.registers = False

    def report(self) -> tuple[ResourceStatus, ...] | None:
        """Return the status of each resource; None where no device plugin is wanted."""
        if not self._settings.enabled:
            return None
        if self._fault:
            return tuple(ResourceStatus(name, False, None, self._fault) for name in self._settings.names)
        return tuple(endpoint.status() for endpoint in self._endpoints.values())

    def fail_open(self) -> str:
        """Return why containers with kubelet GPUs can start unseen on this node, but for the guard, or empty."""
        return self._required.fault() or (UNAPPLIED if self._plugin.kubelet.unapplied else "")

    async def run(self) -> None:
        """Serve until cancelled.

        Raises: RestartNeededError: this process cannot reach the kubelet's folder.
        """
        pods = self._plugin.external.pods
        if self._settings.enabled:
            set_up_grpc()
        with raised_alone(RestartNeededError):
            async with asyncio.TaskGroup() as tasks:
                if self._settings.enabled:
                    tasks.create_task(self._serve(tasks))
                if pods is not None:
                    tasks.create_task(inquire(self._settings, pods, self._plugin.kubelet_listed))
        await asyncio.Event().wait()

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        """Be the kubelet's device plugin: a task for each resource."""
        try:
            from nri_gpu.kubelet.registered_socket import Endpoint
        except ImportError as error:
            self._fault = str(error)
            logger.bind(fault=self._fault).error("device plugin cannot be served")
            return
        if self._succession and self._succession.succeeds:
            # The daemon before this one serves the kubelet meanwhile.
            await first_done(_until(lambda: not self.devices.hindrance()), timeout_s=ABLE_WITHIN_S)
            tasks.create_task(self._settle(self._succession))
        while True:
            self._woken.clear()
            try:
                self._look(tasks, Endpoint)
                self._log.clear()
            except Exception as error:  # the NRI plugin goes on serving, whatever goes wrong here
                if repr(error) != self._log.fault:
                    logger.opt(exception=True).error("bug: device plugin not up to date")
                self._log.fault = repr(error)
            await set_within(self._woken, self._tick_s)

    def _look(self, tasks: asyncio.TaskGroup, endpoint: type[Endpoint]) -> None:
        """Serve resources that are new, and send lists that changed; neither once another daemon takes over."""
        if self._plugin.kubelet.key is None:
            self._look_for_key()
        self._plugin.lapse()
        if (left_out := self.devices.left_out()) != self._left_out:
            self._left_out = left_out
            if left_out:
                logger.bind(fault=left_out).error("MIG devices are not offered to the kubelet")
        for resource in self.devices.resources() if self._registers else ():
            if resource not in self._endpoints:
                self._endpoints[resource] = made = endpoint(resource, self.devices, self._session_began, self._times)
                tasks.create_task(made.run())
            self._endpoints[resource].plugin.changed()

    async def _settle(self, succession: Succession) -> None:
        """Tell the daemon before this one to end once the kubelet reads the list of every resource."""
        endpoints = self._endpoints
        await _until(lambda: bool(endpoints) and all(each.plugin.watched for each in endpoints.values()))
        succession.settled()

    def _session_began(self) -> None:
        """Write the required device and look for the key, before each registration."""
        self._required.write()
        self._look_for_key()

    def _look_for_key(self) -> None:
        if key := self._key.look():
            self._plugin.keyed(key)
            self.changed()


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - it depends on several parts, and happens once in the life of a process
        await asyncio.sleep(LOOK_S)
