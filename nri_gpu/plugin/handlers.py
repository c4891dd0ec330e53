"""The plugin: handlers that decide, commit and answer. Everything in this module is in memory.

No handler awaits, so nobody sees half a step and no lock is needed; log lines are written after the reply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import is_not
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.decision.asked import asks_in_pod, may_ask_by_environment, needs_grant, reads_environment
from nri_gpu.decision.decide import decide
from nri_gpu.decision.overlaps import granted_twice
from nri_gpu.decision.refusals import answer_too_large
from nri_gpu.decision.start_check import validate_adjusted, validate_staged
from nri_gpu.domain.allocation import (
    REQUIRED_DESTINATION,
    AllocatedDevice,
    AllocationInvalid,
    AllocationPending,
    PodDevices,
)
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId
from nri_gpu.domain.decision import Code, Decision, Grant, Inject, Pass, Reason, Refuse
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.dra.read_claims import ClaimAllocations
from nri_gpu.kubelet.allocations import KubeletTokens
from nri_gpu.kubelet.read_listing import ExternalAllocations
from nri_gpu.ledger.apply import apply, cleared_for
from nri_gpu.ledger.events import (
    AllocationKnown,
    ClaimsInQuestion,
    Created,
    DevicesAllocated,
    DevicesPrepared,
    Gone,
    LedgerEvent,
    Looked,
    PodGone,
    PostStarted,
    ProcessesFound,
    Removed,
    Renumbered,
    Rules,
    SandboxForgotten,
    Started,
    Stopped,
    Ticked,
)
from nri_gpu.ledger.grant_text import sign_grant
from nri_gpu.ledger.ledger import GrantPhase, Ledger
from nri_gpu.ledger.opened import Monitors, live
from nri_gpu.ledger.processes import Began, ListedPids, Told
from nri_gpu.nri import convert, validation
from nri_gpu.nri.codes import Reply, status_of
from nri_gpu.nri.convert import EMPTY, NODE_NEEDLE, DecodeError
from nri_gpu.nri.list_size import event_of, size_of
from nri_gpu.nri.session import Listed
from nri_gpu.nri.subscription import HEED_STARTS, Event, Lifecycle
from nri_gpu.plugin.conflicts import ConflictsSeen
from nri_gpu.plugin.counts import Counts, Outcome
from nri_gpu.plugin.decision_log import HooksSeen, container_fields, log_decision
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.monitors import MonitorPods
from nri_gpu.plugin.nri_service import REQUEST_TIMEOUT_S
from nri_gpu.plugin.process_looks import ProcessLooks
from nri_gpu.plugin.read_allocation import AllocationFacts, read_allocation
from nri_gpu.plugin.released import ReleasedGpus
from nri_gpu.plugin.second_plugin import SecondPlugin
from nri_gpu.plugin.starts import GrantedContainers
from nri_gpu.plugin.synchronize import ListedContainers
from nri_gpu.policy.model import Policy, Stale, Unknown
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.ttrpc.frames import RESPONSE_MAX

# The events we subscribe to: each is a round trip for every container of the node, so no more than these.
EVENTS: Final = (
    Event.RUN_POD_SANDBOX,  # pods count for the size of the runtime's list, also pods without containers
    Event.CREATE_CONTAINER,
    Event.START_CONTAINER,
    Event.POST_START_CONTAINER,  # what is to be stopped during its start may run all the same
    Event.STOP_CONTAINER,
    Event.REMOVE_CONTAINER,
    Event.STOP_POD_SANDBOX,
    Event.REMOVE_POD_SANDBOX,
    # From NRI 0.10. A CreateContainer that we were too late for fails with it: we are asked once more, and are gone
    # (containerd/nri: pkg/adaptation/adaptation.go, validateContainerAdjustment). From 0.12.5 on it asks nobody who is
    # gone, and only the guard refuses such a container (docs/upstream.md).
    Event.VALIDATE_CONTAINER_ADJUSTMENT,
)
UNRECORDED: Final = Reason(
    Code.NODE_NOT_READY,
    "its GPUs were granted to a container that was created and may still be started, and the journal in the state "
    "folder, which would keep that container from starting, cannot be written: make room there (see the log of "
    "`nri-gpu run`) and try again.",
)
LET_START: Final = convert.without_mount_to_pb(REQUIRED_DESTINATION)


class Plugin:
    """The plugin of one runtime. It lives as long as the daemon, across connections."""

    def __init__(self, state: NodeState, needs: PluginDependencies, key: bytes) -> None:
        self.state = state
        # Containers that ran without what they asked for when the runtime last listed them, and still run.
        self.ungranted: frozenset[ContainerId] = frozenset()
        self.runtime = ""  # by its own name; empty before it has configured us
        self.counts = Counts()
        self.kubelet = KubeletTokens()
        self.external = ExternalAllocations(state)
        self.claims = ClaimAllocations(key)
        self.stage_dir = needs.stage_dir
        self.second = SecondPlugin(needs.registered)
        self._needs = needs
        self._key = key
        self.monitors = MonitorPods(state)
        self._granted = GrantedContainers(self, needs, key)
        self._listed = ListedContainers(self, self._granted, needs)
        self._handlers: Mapping[int, Callable[[Lifecycle], Reply]] = {
            Event.RUN_POD_SANDBOX: self._pod_came,
            Event.START_CONTAINER: self._started,
            Event.POST_START_CONTAINER: self._runs,
            Event.STOP_CONTAINER: self._stopped,
            Event.REMOVE_CONTAINER: self._removed,
            Event.STOP_POD_SANDBOX: self._pod_gone,
            Event.REMOVE_POD_SANDBOX: self._pod_gone,
        }
        self._hooks = HooksSeen()
        conflicts = ConflictsSeen()
        state.then(lambda: conflicts.tell(self.ledger), Changed.LEDGER)
        self._released = ReleasedGpus(needs.cgroups)
        self.processes = ProcessLooks(
            state, needs.cgroups, self._apply_seen, self._tells, needs.clock, needs.later, needs.look_at_gpus
        )
        self._listed_pods: frozenset[PodId] = frozenset()  # of the containers in the newest list
        self._observed: tuple[Inventory, Monitors] | None = None  # by which the ledger knows who holds what by number

    @property
    def same_pids(self) -> bool:
        """Return whether the runtime knows processes by our PIDs."""
        return self._needs.cgroups.same_pids

    @same_pids.setter
    def same_pids(self, same: bool) -> None:
        self._needs.cgroups.same_pids = same

    @property
    def ledger(self) -> Ledger:
        """Return who holds what now."""
        return self.state.ledger

    @property
    def rules(self) -> Rules:
        """Return the rules by which `apply` judges events now."""
        settings, inventory = self.state.settings, self.state.node.inventory
        return Rules(
            # Where the runtime does not tell of each start, a created container may run.
            created_grace_s=settings.ledger.created_grace_s if self._tells() else math.inf,
            inventory=inventory,
            waits=settings.handover.wait,
            grace_s=settings.handover.grace_s,
            # A simulated node's file never tells.
            unknown_waits=settings.handover.unknown is Unknown.WAIT and not inventory.simulated,
            counted=self._released.counted,
            monitors=self.monitors.now,
            listed_pods=self._listed_pods,
        )

    def apply(self, event: LedgerEvent) -> None:
        """Apply an event to the ledger. The journal need not remember a container once the runtime tells of it."""
        before = self.ledger.entries.keys()
        self.state.commit(apply(self.ledger, event, self.rules))
        match event:
            case Started(container_id=id_) | Stopped(container_id=id_):
                self._needs.recorder.settled(id_)
            case Removed(container_ids=ids) | Gone(container_ids=ids):
                self._needs.recorder.settled(*ids)
            case PodGone():
                self._needs.recorder.settled(*before - self.ledger.entries.keys())
            case _:
                pass

    def _apply_seen(self, event: LedgerEvent) -> None:
        """Apply what was seen of processes; a container's end also ends what is known of it here."""
        if not isinstance(event, Stopped):
            self.apply(event)
        elif self._holds(event.container_id):
            logger.bind(container_id=event.container_id).info("container ended without an event from the runtime")
            self._ended(event, event.container_id)

    @property
    def policy(self) -> Policy:
        """Return the policy in force."""
        return self.state.policy

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the events to subscribe to."""
        return EVENTS

    def create_container(self, payload: bytes) -> Reply:
        """Answer CreateContainer: what to add to this container, or why it must not be created."""
        if not self._needs_reading(payload, self.state.node):
            return EMPTY
        rules = self.rules
        self._observe(rules)
        node = self.aged(self.state.node)
        container = convert.request_from_pb(payload, self.stage_dir)
        container = read_allocation(container, self._facts(container))
        if isinstance(container.kubelet, AllocationPending) and container.kubelet.again:
            self.apply(ClaimsInQuestion(self._needs.clock(), frozenset({container.kubelet.again})))
        now = self._needs.clock()
        if not self._tells():
            # The kubelet makes the next attempt only after the last attempt is dead, which this runtime does not tell.
            self._ended(Removed(now, self.ledger.running_before(container.id, container.pod.uid, container.name)))
        ledger = apply(self.ledger, Ticked(now), rules)
        decision = decide(container, node, cleared_for(ledger, container, now), self.policy)
        reply, signed = self._reply(container, decision)
        if isinstance(reply, bytes) and len(reply) > RESPONSE_MAX:
            decision = Refuse(answer_too_large(len(reply), RESPONSE_MAX))
            reply, signed = self._reply(container, decision)
        after = ledger
        if not isinstance(decision, Refuse):  # a refused container may come again for what is reserved for it
            grant = decision.grant if isinstance(decision, Inject) else None
            has = live(container, decision.edits, self.stage_dir)
            after = apply(ledger, Created(now, container, grant, has), rules)
        # Recorded and committed only once the reply exists: a bug in making it leaks no grant.
        if isinstance(decision, Inject) and not self._journalled(decision.grant, signed, after, now):
            decision, after = Refuse(UNRECORDED), ledger
            reply, signed = self._reply(container, decision)
        self.processes.saw(Told(container.id))
        self._needs.recorder.decided(container, decision, node, now)
        self.state.commit(after)
        elapsed_s = self._needs.clock() - now
        self._needs.later(lambda: self._note(container, decision, node, elapsed_s))
        return reply

    def _facts(self, container: Container) -> AllocationFacts:
        """Return what is known of a container's allocation, and ask the kubelet what it has not said yet."""
        return AllocationFacts(
            token_key=self.kubelet.key,
            marker_key=self.claims.key,
            claims=self.ledger.claims,
            named=self.claims.asked_about(container, self.ledger) if asks_in_pod(container, self.policy) else None,
            listing=self.external.listing(container.pod),
            inventory=self.state.node.inventory,
            settings=self.state.settings.kubelet,
            in_question=self.ledger.in_question,
        )

    def _reply(self, container: Container, decision: Decision) -> tuple[Reply, str]:
        """Return the answer, and the signed grant in it; an empty text where the answer has no grant."""
        match decision:
            case Refuse(reason):
                return status_of(reason), ""
            case Pass(edits):
                proven = decision.ignored or needs_grant(container, self.policy, starts=True)
                return convert.reply_to_pb(edits, container) + (self._proof(container) if proven else b""), ""
            case Inject(edits, grant):
                signed = sign_grant(grant, self._key)
                reply = convert.reply_to_pb(edits, container) + convert.annotation_to_pb(GRANT_KEY, signed)
                return reply + LET_START if self.kubelet.required(container) else reply, signed

    def _proof(self, container: Container) -> bytes:
        """Return the proof that we decided: the guard may read another policy by the time the container runs.

        Nor does the guard ask PodResources whether the kubelet allocated what NVIDIA_VISIBLE_DEVICES names.
        """
        nothing = Grant.to(container, (), None, self.state.node.generation)
        return convert.annotation_to_pb(GRANT_KEY, sign_grant(nothing, self._key))

    def _journalled(self, grant: Grant, signed: str, after: Ledger, now: float) -> bool:
        """Record a grant in the journal. Return whether the grant may go out.

        A grant that takes another container's GPUs goes out only if the journal says whose GPUs it takes.
        """
        if not grant.uuids:
            return True
        revoked = after.outdone(grant)
        written = self._needs.recorder.granted(grant, signed, now, revoked)
        if written and revoked:
            self._granted.revoke(revoked)
        return written or not revoked.keys() - self._granted.revoked.keys()

    def _note(self, container: Container, decision: Decision, node: Node, elapsed_s: float) -> None:
        """Count and log a decision, once its reply is on its way."""
        self.counts.decided(decision)
        log_decision(container, decision, node, elapsed_s, self._needs.refusals)
        if isinstance(container.kubelet, AllocationInvalid):
            self.external.complain(container)
        if container.nvidia_hooks and not isinstance(decision, Pass):
            self._hooks.warn_of(container)

    def validate(self, payload: bytes) -> Reply:
        """Answer ValidateContainerAdjustment: reject if our reply and other plugins' did not make what was granted."""
        second = self.second.told or validation.names_twice(payload, self.second.name)
        if not (second or validation.concerns_us(payload) or self._asks(payload)):
            return EMPTY
        adjusted = validation.adjusted_from_pb(payload, GRANT_KEY, self.stage_dir)
        self.second.validated(adjusted)
        # Where an operator wants it, the guard looks at what other plugins give to containers that are not ours.
        reason = validate_adjusted(adjusted, self._key, self.policy, ungranted=False)
        if reason is None and (has := self.ledger.live.get(adjusted.container.id)):
            reason = validate_staged(adjusted, has.staged)
        if reason:
            self.counts.refused(reason.code, Outcome.REJECTED)
            fields = container_fields(adjusted.container)
            self._needs.later(lambda: self._needs.refusals.add(fields, reason, "container rejected"))
        return validation.verdict_to_pb(reason)

    def unanswered(self, payload: bytes) -> None:
        """Give back what a CreateContainer was granted: no byte of the answer left, and the runtime has gone on."""
        try:
            container = size_of(payload).container
        except DecodeError:  # so it was refused
            return
        if container and container.id in self.ledger.entries:
            self.apply(Stopped(self._needs.clock(), container.id))

    def lifecycle(self, payload: bytes, event: int = 0) -> Reply:
        """Answer an event that came by its own RPC, or by StateChange."""
        handler = self._handlers.get(event or event_of(payload))
        return handler(Lifecycle(payload, event)) if handler and self._concerns(payload) else EMPTY

    def synchronized(self, listed: tuple[Listed, ...], request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Rebuild the ledger from what the runtime lists. request_timeout_s: for how long it waits for an answer."""
        node, known = self.state.node, self.ledger.lost.keys() - self.ledger.unsought.keys()
        # A lost container with a process that is listed without a PID is still lost: its shim does not answer.
        listed = tuple(item for item in listed if item.pid or item.container.id not in known)
        self._observed = node.inventory, self.monitors.now
        event, self.ungranted = self._listed.read(listed, self._needs.clock(), request_timeout_s)
        containers = [item.container for item in listed]
        self._listed_pods = frozenset(each.pod.id for each in containers)
        for container in containers:
            self._hooks.warn_of(container)
        self.external.synchronized(containers)
        # A sandbox without a container is asked about once it has a container.
        self._question({each.pod.id: each.pod for each in containers if each.pod.name != "?"}.values())
        self.state.synchronized = True
        self.apply(event)
        self._needs.recorder.synchronized(self.ledger)
        entries = self.ledger.entries.values()
        self._granted.end_revoked(each.grant for each in entries if each.phase is GrantPhase.RUNNING)
        pids = {container_id: process.pid for container_id, process in self.ledger.processes.items()}
        running = {each.container.id: each.pid or pids.get(each.container.id, 0) for each in listed if not each.created}
        self.processes.saw(ListedPids(event.ids, {each: pid for each, pid in running.items() if self._holds(each)}))
        for container_id, pid in running.items():
            self._watch(container_id, pid)
        self._complain(granted_twice(self.ledger))
        lost = self.ledger.lost.keys() - event.ids
        found = {"gpus": len(node.gpus), "grants": len(self.ledger.entries), "foreign": len(self.ledger.external)}
        logger.bind(**found, lost=len(lost)).info("ledger rebuilt")

    @property
    def unsure(self) -> bool:
        """Return whether the last list has a container as running that may be over, and holds a GPU."""
        return any(map(self._holds, self.processes.table.unsure))

    def observe(self) -> None:
        """Read containers' device numbers by the newest inventory, and by which pods are monitors now.

        A number may be another GPU's by now, and the policy may make a pod a monitor, or a monitor an ordinary pod.
        """
        self._observe(self.rules)

    def _observe(self, rules: Rules) -> None:
        observed = rules.inventory, rules.monitors
        if self._observed is None or any(map(is_not, observed, self._observed)):
            before, self._observed = granted_twice(self.ledger), observed
            self.apply(Renumbered(self._needs.clock()))
            after = granted_twice(self.ledger)
            self._complain({uuid: pods for uuid, pods in after.items() if before.get(uuid) != pods})

    def _complain(self, overlapping: Mapping[GpuUuid, tuple[str, ...]]) -> None:
        for uuid, pods in overlapping.items():
            bound = logger.bind(gpu_uuid=uuid, fault=" and ".join(pods))
            bound.error("GPU granted to several pods, to one exclusively")

    def looked(self, inventory: Inventory, began: float) -> None:
        """Take what the inventory's source answered. began: when it was asked, by our clock."""
        self.apply(Looked(began, self._released.looked(inventory, self.ledger)))

    # --- for the kubelet's device plugin ---

    def lapse(self) -> None:
        """Release what was granted or reserved and never used, for callers who ask what is free and create nothing."""
        self.apply(Ticked(self._needs.clock()))

    def reserve(self, devices: Iterable[AllocatedDevice], *, shared: bool) -> None:
        """Reserve devices that the kubelet allocated to a pod. Which pod is known when its container is created."""
        self.apply(DevicesAllocated(self._needs.clock(), tuple(devices), shared))

    def keyed(self, key: bytes) -> None:
        """Take the key of the kubelet's tokens, and read the tokens that came before it."""
        for container_id, allocation in self.kubelet.keyed(key).items():
            self.apply(AllocationKnown(self._needs.clock(), container_id, allocation))

    def kubelet_listed(self, given: tuple[PodDevices, ...]) -> None:
        """Take all that the kubelet has given, and to whom: add forgotten reservations, and end those that are over."""
        self.lapse()
        self.apply(self.external.reconciled(given, self._needs.clock()))

    def kubelet_told(self, pod: Pod, given: PodDevices) -> None:
        """Take what NVIDIA's DRA driver prepared for one pod, at once: its containers come next."""
        if devices := tuple(self.external.prepared(given, pod)):
            self.apply(DevicesPrepared(self._needs.clock(), devices))

    def aged(self, node: Node) -> Node:
        """Add a snapshot's age where it is so old that the policy refuses; else return the very same object."""
        inventory = self.policy.inventory
        if inventory.stale is Stale.SERVE:
            return node
        age_s = self._needs.inventory_age_s()
        return node if age_s is None or age_s <= inventory.stale_after_s else replace(node, inventory_age_s=age_s)

    # --- events ---

    def _concerns(self, payload: bytes) -> bool:
        """Return whether an event can matter: a container holds a device, or this one may have or request one."""
        return bool(
            self.ledger.entries
            or self.ledger.reservations
            or self.ledger.live
            or self.ledger.claims
            or self.external.pods
            or NODE_NEEDLE in payload
            or self._asks(payload)
        )

    def _asks(self, payload: bytes) -> bool:
        return convert.may_ask(payload, lambda: may_ask_by_environment(self.policy))

    def _needs_reading(self, payload: bytes, node: Node) -> bool:
        major, environment = node.inventory.majors.nvidia, reads_environment(self.policy)
        may_concern = convert.may_concern(payload, major, environment=environment, stage_dir=self.stage_dir)
        return may_concern or self.external.concerns(payload)

    def _started(self, change: Lifecycle) -> Reply:
        container_id = change.container_id
        self.processes.saw(Told(container_id))
        reply = self._granted.start(change)
        process = self._needs.cgroups.first_process(change.pid, container_id) if self._holds(container_id) else None
        if process:
            self.apply(ProcessesFound(self._needs.clock(), {container_id: process}))
        self._watch(container_id, change.pid)
        return reply

    def _watch(self, container_id: ContainerId, pid: int) -> None:
        if self.same_pids and self._holds(container_id):
            self.processes.saw(Began(container_id, pid))

    def _holds(self, container_id: ContainerId) -> bool:
        """Return whether the end of a container gives a GPU back."""
        return container_id in self.ledger.entries or container_id in self.ledger.live

    def _runs(self, change: Lifecycle) -> Reply:
        if change.container_id in self.ledger.starting:
            self.apply(PostStarted(self._needs.clock(), change.container_id))
        return EMPTY

    def _stopped(self, change: Lifecycle) -> Reply:
        id_, unstarted = change.container_id, change.created and self._tells()
        self._ended(Stopped(self._needs.clock(), id_, unstarted), id_)
        if self.ledger.starting.get(id_) is None:  # else its start may go on
            self.processes.saw(Told(id_))
        return EMPTY

    def _removed(self, change: Lifecycle) -> Reply:
        self.processes.saw(Told(change.container_id))
        self._granted.is_over((change.container_id,))
        return self._ended(Removed(self._needs.clock(), (change.container_id,)), change.container_id)

    def _ended(self, event: Stopped | Removed, *container_ids: ContainerId) -> Reply:
        self.apply(event)
        self.ungranted -= frozenset(container_ids)
        return EMPTY

    def sandbox_forgotten(self, pod_id: PodId) -> None:
        """Take that a sandbox is over, of which the runtime told nothing."""
        self.apply(SandboxForgotten(self._needs.clock(), pod_id))

    def _pod_came(self, change: Lifecycle) -> Reply:
        if self.external.pods is not None:
            self.external.pods.add(change.pod)
        self._question([change.pod])
        return EMPTY

    def _question(self, pods: Iterable[Pod]) -> None:
        """Have the claims that these pods may share read again."""
        self.apply(ClaimsInQuestion(self._needs.clock(), self.claims.in_question(pods, self.ledger)))

    def _pod_gone(self, change: Lifecycle) -> Reply:
        if self.external.pods is not None:
            self.external.pods.remove(change.pod_id)
        self.claims.pod_gone(change.pod_id)
        self.apply(PodGone(self._needs.clock(), change.pod_id))
        self._granted.is_over((), change.pod_id)
        return EMPTY

    def _tells(self) -> bool:
        """Return whether the runtime tells of each start, heeds our refusal of a start, and tells of each end.

        CRI-O before 1.33.10, 1.34.5 and 1.35.0 tells only of the ends that CRI asked for (server/container_stop.go).
        """
        return not self.runtime or self.runtime in HEED_STARTS
