"""The daemon's answers to the driver process: what to publish of the node, and the claims that are prepared."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from loguru import logger
from msgspec.structs import replace

from nri_gpu.decision.claim_devices import NotPrepared, prepared
from nri_gpu.domain.allocation import PodDevices
from nri_gpu.domain.container import Pod
from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.node import Node
from nri_gpu.domain.resource_claim import AllocatedClaim, ClaimUid, PreparedClaim
from nri_gpu.dra.claims_file import ClaimsFile
from nri_gpu.dra.daemon_socket import dra_service
from nri_gpu.dra.markers import markers_of
from nri_gpu.dra.offered_devices import conditions, not_ready, offer
from nri_gpu.dra.questions import (
    DRA_SOCKET,
    VIEW_WAIT_S,
    Answer,
    AskPrepare,
    AskUnprepare,
    AskView,
    ClaimFault,
    DriverReport,
    NodeView,
    Prepared,
    PreparedName,
    Question,
    Unprepared,
)
from nri_gpu.dra.read_claims import ClaimAllocations
from nri_gpu.kubelet.allocations import KubeletPods
from nri_gpu.kubelet.kubelet_controller import inquire
from nri_gpu.kubelet.read_listing import ExternalAllocations
from nri_gpu.kubelet.required_device import RequiredDevice
from nri_gpu.ledger.claims import joined, users
from nri_gpu.ledger.events import ClaimPrepared, ClaimReleased, ClaimsJoined, LedgerEvent
from nri_gpu.ledger.ledger import without
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.dra_settings import dra_faults
from nri_gpu.policy.model import Policy
from nri_gpu.system.server import listen, serve
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import set_within

TICK_S: Final = 5.0  # between two looks for what changes with time alone
BURST_S: Final = 0.05  # changes come in bursts, and a view is large
LASTING_S: Final = 10.0  # after which a node that cannot grant is said to be not ready
NOT_CONNECTED: Final = ClaimFault(
    "nri-gpu is not connected to the container runtime, so pods would start without their GPUs; try again", passing=True
)
CDI_OFF: Final = ClaimFault(
    "containerd 1.x drops the CDI devices of claims unless its configuration has enable_cdi = true, and pods would "
    "start without their GPUs: set that, restart containerd, then set dra.cdi_enabled = true in nri-gpu's policy"
)
NO_GROUPS: Final = ClaimFault(
    "it is reserved for a PodGroup, whose pods only the kubelet's PodResources lists, but nri-gpu's policy has "
    'kubelet.podresources = "": remove that line, and restart nri-gpu'
)


class ClaimsPlugin(Protocol):
    """The calls that the DRA controller makes on the NRI plugin."""

    claims: ClaimAllocations
    external: ExternalAllocations

    def aged(self, node: Node) -> Node:
        """Return the node with the age of its inventory, where policy asks for it."""

    def lapse(self) -> None:
        """Release grants and reservations whose time is over."""

    def apply(self, event: LedgerEvent) -> None:
        """Apply an event to the ledger."""


class DraController:
    """The part of the daemon that answers the driver process, and remembers prepared claims in the state folder.

    lasting_s, wait_s: as LASTING_S and VIEW_WAIT_S.
    """

    def __init__(
        self,
        folder: Path,
        node_state: NodeState,
        plugin: ClaimsPlugin,
        fixed: Policy,
        *,
        lasting_s: float = LASTING_S,
        wait_s: float = VIEW_WAIT_S,
    ) -> None:
        self.asked_s: float | None = None  # when the driver process last asked for a view, seconds since the epoch
        self._asked: float | None = None  # the same on the monotonic clock
        self.report = DriverReport()  # what the driver process said of itself then
        self.fault = ""  # why the driver process is not served
        self._node_state = node_state
        self._plugin = plugin
        self._fixed = fixed
        self.settings = fixed.dra
        self._lasting_s = lasting_s
        self._wait_s = wait_s
        self._connected = False
        self._cdi_off = False
        self._required = RequiredDevice(fixed.kubelet)
        self._file = ClaimsFile(folder)
        self._socket = folder / DRA_SOCKET
        self._woken = asyncio.Event()
        self._grouped = asyncio.Event()  # a PodGroup has a claim here
        if self.settings.enabled and fixed.kubelet.podresources:
            # Set before we ask the runtime for events, so that events of sandboxes are among them.
            plugin.claims.pods = KubeletPods(told=self._told)
        self._able = time.monotonic()  # when the node could last grant, or began
        self._view = NodeView(
            number=time.monotonic_ns() // 1_000,  # differs from the numbers of the daemon before this one
            driver=self.settings.driver,
            dir=self.settings.dir,
            registry_dir=fixed.kubelet.registry_dir,
            cdi_dir=fixed.kubelet.cdi_dir,
        )
        node_state.then(self.changed, *Changed)

    def silent_s(self) -> float | None:
        """Return the seconds since the driver process last asked for a view; None where it never did."""
        return None if self._asked is None else time.monotonic() - self._asked

    def recalled(self) -> Mapping[ClaimUid, PreparedClaim]:
        """Return the claims that the daemon before this one had prepared."""
        return self._file.read() if self.settings.enabled else {}

    def configured(self, configured: Configured) -> None:
        self._required.configured(configured)
        old = configured.runtime == "containerd" and configured.version.removeprefix("v").startswith("1.")
        self._cdi_off = old and not self.settings.cdi_enabled

    def connected(self, yes: bool) -> None:
        """Take whether the container runtime asks us about its containers."""
        self._connected = yes
        self.changed()

    def changed(self) -> None:
        """Wake the questions that wait for a view: a part of it may have changed."""
        self._woken.set()
        if any(claim.groups for claim in self._node_state.ledger.claims.values()):
            self._grouped.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        listener = self._listener() if self.settings.enabled else None
        if self.fault:
            logger.bind(fault=self.fault).error("DRA driver process not served")
        async with asyncio.TaskGroup() as tasks:
            if listener:
                tasks.create_task(serve(listener, dra_service(self._socket, self.answer)))
            if self._plugin.claims.pods is not None:
                tasks.create_task(self._inquire(self._plugin.claims.pods))
            await asyncio.Event().wait()

    async def _inquire(self, pods: KubeletPods) -> None:
        """Ask the kubelet which pods of groups have which claims. gRPC is not loaded where no group has a claim."""
        await self._grouped.wait()
        await inquire(self._fixed.kubelet, pods)

    def _told(self, pod: Pod, listed: PodDevices) -> None:
        """Let a pod have the PodGroups' claims that the kubelet names for it: the kubelet knows the pods of a group."""
        state, pods = self._node_state, self._plugin.claims.pods
        claims = joined(state.ledger, pod, listed, pods.uids if pods else frozenset())
        if claims and not self._written({**state.ledger.claims, **{each.uid: each for each in claims}}):
            self._plugin.apply(ClaimsJoined(time.monotonic(), claims))
            logger.bind(namespace=pod.namespace, pod_name=pod.name).info("pod has claims of its PodGroup")

    def _listener(self) -> socket.socket | None:
        """Return the socket that listens; None, with `fault`, where there is no socket."""
        # By the command line, where the start had no policy that gives each a pool.
        for key, sentence in dra_faults(self.settings, self._fixed.kubelet):
            self.fault = f"{key}: {sentence}; then restart nri-gpu"
            return None
        try:
            return listen(self._socket)
        except OSError as error:
            self.fault = f"its socket cannot be made: {fault_of(error)}"
            return None

    async def answer(self, question: Question) -> Answer:
        """Answer the driver process."""
        match question:
            case AskView(after, report):
                self.asked_s, self._asked, self.report = time.time(), time.monotonic(), report or self.report
                self._plugin.external.node = self.report.node
                return await self._next_view(after)
            case AskPrepare(claim):
                return self._prepare(claim)
            case AskUnprepare(uid):
                return self._unprepare(uid)

    async def _next_view(self, after: int) -> NodeView:
        """Return the view once its number is not `after`, or as it is when nothing has changed for a while."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_s
        while (view := self.view()).number == after and (left_s := until - loop.time()) > 0:
            self._woken.clear()
            await set_within(self._woken, min(TICK_S, left_s))
            await asyncio.sleep(BURST_S)
        return view

    def view(self) -> NodeView:
        """Return the current view. Its number changes only when its contents do."""
        state = self._node_state
        node = self._plugin.aged(state.node)
        word = "cdi-off" if self._cdi_off else not_ready(node, state.policy, connected=self._connected)
        now = time.monotonic()
        if not word:
            self._able = now
        # A runtime or daemon that is restarted is no reason to write the slices twice.
        lasting = now - self._able >= self._lasting_s
        devices, counter_sets = offer(node, state.ledger, state.settings, self.settings, word if lasting else "")
        before, inventory = self._view, node.inventory
        if not inventory.fault:
            before = replace(before, gpus=conditions(inventory), driver_version=inventory.driver_version)
        seen = replace(
            before,
            known=self._view.known or lasting or not word,
            devices=devices,
            counter_sets=counter_sets,
            claims=tuple(
                PreparedName(uid, each.namespace, each.name, uid in state.ledger.in_question)
                for uid, each in state.ledger.claims.items()
            ),
        )
        if seen != self._view:
            self._view = replace(seen, number=seen.number + 1)
        return self._view

    def _prepare(self, claim: AllocatedClaim) -> Prepared | ClaimFault:
        """Prepare a claim: write, reserve, and only then answer, so that the next daemon knows what was answered."""
        if not self._connected:
            return NOT_CONNECTED
        if self._cdi_off:
            return CDI_OFF
        if claim.groups and self._plugin.claims.pods is None:
            return NO_GROUPS
        self._plugin.lapse()
        state, plugin = self._node_state, self._plugin
        policy = replace(state.policy, dra=self.settings)  # as devices are offered
        found = prepared(claim, plugin.aged(state.node), state.ledger, policy)
        if isinstance(found, NotPrepared):
            holders = tuple(PreparedName(each.uid, each.namespace, each.name) for each in found.holders)
            return ClaimFault(found.reason.sentence, found.passing, holders, found.reason.code.value, found.uuid)
        known = state.ledger.claims
        if (changed := known.get(found.uid) != found) and (fault := self._written({**known, found.uid: found})):
            return fault
        plugin.apply(ClaimPrepared(time.monotonic(), found))
        self.view()  # no longer in question: if it is again before the driver asks, the view has another number
        if changed:
            _log(found, "claim prepared")
        return Prepared(markers_of(found, plugin.claims.key), required=not self._required.fault())

    def _unprepare(self, uid: ClaimUid) -> Unprepared | ClaimFault:
        claims = self._node_state.ledger.claims
        if claim := claims.get(uid):
            if fault := self._written(without(claims, {uid})):
                return fault
            self._plugin.apply(ClaimReleased(time.monotonic(), uid))
            _log(claim, "claim released")
            if using := users(self._node_state.ledger, claim):
                names = ",".join(f"{each.pod_name}/{each.container_name}" for each in using)
                bound = logger.bind(namespace=claim.namespace, name=claim.name, container_name=names)
                bound.warning("claim released while containers have its GPUs")
        return Unprepared()

    def _written(self, claims: Mapping[ClaimUid, PreparedClaim]) -> ClaimFault | None:
        try:
            self._file.write(claims.values())
        except OSError as error:
            logger.bind(fault=fault_of(error)).warning("prepared claims not written; the claim is not changed")
            return ClaimFault(
                f"nri-gpu cannot write its state folder: {fault_of(error)}; make room under /run, or fix that"
            )
        return None


def _log(claim: PreparedClaim, phrase: str) -> None:
    uuids = ",".join(dict.fromkeys(each.uuid for each in claim.devices)) or "-"
    pods = ",".join(claim.pods.values()) or "-"
    logger.bind(namespace=claim.namespace, name=claim.name, pod_name=pods, gpu_uuid=uuids).info(phrase)
