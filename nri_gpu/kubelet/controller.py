"""The part of a running daemon that is the kubelet's device plugin; gRPC is imported only where it is switched on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from loguru import logger
from msgspec import Struct

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.decision.eligibility import node_fault
from nri_gpu.domain.errors import RestartNeededError
from nri_gpu.domain.gpu import GpuUuid, closure
from nri_gpu.domain.kubelet import AllocatedDevice, PodDevices, ResourceStatus
from nri_gpu.domain.node import Node
from nri_gpu.kubelet.allocations import ExternalAllocations, KubeletAllocations
from nri_gpu.kubelet.pods import KubeletPods
from nri_gpu.kubelet.required_device import RequiredDevice
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.policy.model import Policy
from nri_gpu.policy.select import stale_fault
from nri_gpu.system.state import Board
from nri_gpu.system.succession import LOOK_S, Succession

if TYPE_CHECKING:
    from nri_gpu.kubelet.endpoint import DevicePlugins

ABLE_WITHIN_S = 2.0  # from the state folder to the first grant; then it is registered as it is
UNAPPLIED = "the kubelet (before 1.29) or the runtime (enable_cdi off) left out the CDI device that Allocate answered"
INSTALL_EXTRA = "install the kubernetes extra, pip install 'nri-gpu[kubernetes]'"
NOT_CONNECTED = "nri-gpu is not connected to the container runtime, so pods would start without their GPUs"


def set_grpc_up() -> None:
    """Before its first import."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters is an error of ours, and logged once
    # Our children are started by vfork and exec at once; gRPC's handlers for forks would only warn of them.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")


class Grants(Protocol):
    """What the device plugin needs of the NRI plugin, which alone changes the ledger."""

    policy: Policy
    ledger: Ledger
    kubelet: KubeletAllocations
    external: ExternalAllocations

    def aged(self, node: Node) -> Node:
        """The node with the age of its inventory, where policy asks for it."""

    def taken(self, *, shared: bool) -> frozenset[GpuUuid]:
        """GPUs that others than the kubelet's pods hold."""

    def promise(self, devices: Iterable[AllocatedDevice], *, shared: bool) -> None:
        """The kubelet gave these to a pod."""

    def lapse(self) -> None:
        """Let go of what was granted or promised and never came."""

    def kubelet_keyed(self, key: bytes) -> None:
        """The key of the kubelet's grants can be had."""

    def kubelet_listed(self, given: tuple[PodDevices, ...]) -> None:
        """What the kubelet has given to whom."""


class DaemonBooks(Struct, frozen=True):
    """The daemon's board and plugin, as the device plugin asks of them.

    connected: to the container runtime. device: the CDI device that Allocate answers now; empty for none.
    """

    board: Board
    plugin: Grants
    connected: Callable[[], bool]
    device: Callable[[], str] = lambda: ""

    def node(self) -> Node:
        """The newest snapshot."""
        return self.board.snapshot()

    def policy(self) -> Policy:
        """What holds now."""
        return self.plugin.policy

    def hindrance(self) -> str:
        """Why a container created now would not get its GPUs."""
        if not self.connected():
            return NOT_CONNECTED
        if self.key() is None:
            return "the key that the kubelet's grants are signed with cannot be read or made"
        if self.plugin.policy.fault:
            return f"the policy is broken: {self.plugin.policy.fault}"
        node = self.plugin.aged(self.board.snapshot())
        if stale := stale_fault(self.plugin.policy, node.inventory_age_s):
            return stale
        reason = node_fault(closure(self.plugin.policy.defaults.capabilities), node)
        return reason.sentence if reason else ""

    def taken(self, *, shared: bool) -> frozenset[GpuUuid]:
        """GPUs that others than the kubelet's pods hold."""
        return self.plugin.taken(shared=shared)

    def used(self) -> frozenset[GpuUuid]:
        """GPUs that anybody holds."""
        return frozenset(self.plugin.ledger.usage())

    def promise(self, devices: Iterable[AllocatedDevice], *, shared: bool) -> None:
        """The kubelet gave these to a pod."""
        self.plugin.promise(devices, shared=shared)

    def required(self, devices: Iterable[AllocatedDevice]) -> str:
        """The CDI device to be answered beside these."""
        name = self.device()
        if name:
            self.plugin.kubelet.require(devices)
        return name

    def key(self) -> bytes | None:
        """What tokens are signed with."""
        return self.plugin.kubelet.key


class KubeletController:
    """Runs the device plugin where policy wants one; else does nothing."""

    def __init__(
        self, board: Board, plugin: Grants, settings: KubeletSettings, succession: Succession | None = None
    ) -> None:
        self._plugin = plugin
        self._settings = settings
        self._succession = succession
        self._leave: Callable[[], None] = lambda: None
        # The runtime may not let a successor in before the end of the CRI call that stops its predecessor's container
        # (containerd: BlockPluginSync), and that one waits for the kubelet to be served.
        self._connected = succession is not None and succession.succeeds
        self._required = RequiredDevice(settings)
        self._books = DaemonBooks(board, plugin, lambda: self._connected, self._required.name)
        self._changed: Callable[[], None] = lambda: None
        self._look_for_key: Callable[[], None] = lambda: None
        self._standings: Callable[[], tuple[ResourceStatus, ...]] = tuple
        if settings.enabled:
            plugin.kubelet.awaited = True
        if settings.podresources and (settings.enabled or settings.injects_external):
            # Before the runtime is asked for events: those of sandboxes are among them then.
            plugin.external.pods = KubeletPods(settled=False)

    def begin(self) -> None:
        """Before the runtime lists its containers: whose GPUs came by the kubelet is read with the tokens' key."""
        if self._settings.enabled:
            from nri_gpu.kubelet.token import KeyKeeper

            self._look_for_key = KeyKeeper(Path(self._settings.dir), self._keyed).look
            self._look_for_key()

    def configured(self, configured: Configured) -> None:
        """What the runtime said of itself."""
        self._required.configured(configured)

    def connected(self, yes: bool) -> None:
        """Whether the container runtime asks us about its containers."""
        self._connected = yes
        self.changed()

    def leaves(self) -> None:
        """The next daemon is about to register: what comes is still answered, and nothing registered again."""
        self._leave()

    def changed(self) -> None:
        """GPUs, grants or the policy."""
        self._changed()

    def report(self) -> tuple[ResourceStatus, ...] | None:
        """How each resource stands with the kubelet; None where no device plugin is wanted."""
        return self._standings() if self._settings.enabled else None

    def fail_open(self) -> str:
        """Why a container that the kubelet gave GPUs may start although we never saw it, but for the guard."""
        return self._required.why_not() or (UNAPPLIED if self._plugin.kubelet.unapplied else "")

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            RestartNeededError: the kubelet's folder is another one than this process can reach.

        """
        pods = self._plugin.external.pods
        if not self._settings.enabled and pods is None:
            await asyncio.Event().wait()
        set_grpc_up()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._settings.enabled:
                    tasks.create_task(self._serve())
                if pods is not None:
                    tasks.create_task(self._inquire(pods))
        except* RestartNeededError as group:
            raise _first(group) from None
        await asyncio.Event().wait()

    async def _inquire(self, pods: KubeletPods) -> None:
        """Ask the kubelet what it allocated."""
        try:
            from nri_gpu.kubelet.podresources import Inquiry, PodResources
        except ImportError as error:
            logger.bind(fault=f"{error}: {INSTALL_EXTRA}").error("PodResources cannot be asked")
            pods.settled = True
            return
        client = PodResources(Path(self._settings.podresources))
        await Inquiry(client, pods, self._plugin.kubelet_listed).run()

    async def _serve(self) -> None:
        try:
            from nri_gpu.kubelet.devices import AdvertisedDevices
            from nri_gpu.kubelet.endpoint import DevicePlugins, EndpointPaths
        except ImportError as error:
            fault = f"{error}: {INSTALL_EXTRA}"
            logger.bind(fault=fault).error("no device plugin for the kubelet")
            self._standings = lambda: (ResourceStatus(self._settings.resource, fault=fault),)
            return
        from nri_gpu.system.inotify import folder_changed

        room = DevicePlugins(
            AdvertisedDevices(self._settings, self._books),
            EndpointPaths(self._settings, folder_changed),
            self._tick,
            self._began,
        )
        self._changed, self._standings, self._leave = room.changed, room.standings, room.leave
        async with asyncio.TaskGroup() as tasks:
            if self._succession and self._succession.succeeds:
                with suppress(TimeoutError):  # the daemon before this one serves the kubelet meanwhile
                    await asyncio.wait_for(_until(lambda: not self._books.hindrance()), ABLE_WITHIN_S)
                tasks.create_task(_settle(self._succession, room))
            await room.run()

    def _began(self) -> None:
        """Before each registration."""
        self._required.write()
        self._look_for_key()

    def _tick(self) -> None:
        if self._books.key() is None:
            self._look_for_key()
        self._plugin.lapse()

    def _keyed(self, key: bytes) -> None:
        self._plugin.kubelet_keyed(key)
        self.changed()


async def _settle(succession: Succession, room: DevicePlugins) -> None:
    await _until(room.watched)
    succession.settled()


async def _until(fact: Callable[[], bool]) -> None:
    while not fact():  # noqa: ASYNC110 - of several parts, and once in the life of a process
        await asyncio.sleep(LOOK_S)


def _first(group: BaseExceptionGroup[RestartNeededError]) -> RestartNeededError:
    """However deep the task was that ended so."""
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
