"""The plugin: handlers that decide, commit and answer; holds the one Ledger. Everything here is in memory.

No handler awaits, so nobody sees half a step and no lock is needed; what is said to the log is said after the reply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from loguru import logger
from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.allocation.external import live, seen, with_live
from nri_gpu.allocation.grant import InvalidGrant, SignedGrant, sign_grant, verify_grant
from nri_gpu.allocation.ledger import Entry, GrantPhase, Ledger, Live, rebuilt
from nri_gpu.allocation.releasing import expired
from nri_gpu.allocation.reservations import had_a_pod, promised, redeemed
from nri_gpu.decision.claim import may_ask_by_environment, needs_grant, reads_environment
from nri_gpu.decision.decide import decide
from nri_gpu.decision.mps import holds_by_mps, start_fault
from nri_gpu.decision.validate import validate_adjusted
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Code, Decision, Grant, Inject, Pass, Reason, Refuse
from nri_gpu.domain.edits import NO_EDITS, Edits
from nri_gpu.domain.errors import TooManyEntriesError
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.kubelet import REQUIRED_DESTINATION, AllocatedDevice, PodDevices
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.kubelet.allocations import ExternalAllocations, KubeletAllocations
from nri_gpu.nri import convert, validation
from nri_gpu.nri.convert import EMPTY, DecodeError, Lifecycle, Listed, Markers
from nri_gpu.nri.events import Event
from nri_gpu.nri.status import Reply, status_of
from nri_gpu.plugin.decision_log import HooksSeen, log_decision, log_refusal, tell_of_ungranted
from nri_gpu.plugin.recorder import Nobody, Recorder
from nri_gpu.plugin.releasing import Handover
from nri_gpu.policy.model import Policy, Stale
from nri_gpu.ttrpc.status import Status

# What we must hear of: each event is a round trip for every container of the node, so no more than these.
EVENTS: Final = (
    Event.RUN_POD_SANDBOX,  # pods count for the size of the runtime's list (sizes.py), also those without containers
    Event.CREATE_CONTAINER,
    Event.START_CONTAINER,
    Event.STOP_CONTAINER,
    Event.REMOVE_CONTAINER,
    Event.STOP_POD_SANDBOX,
    Event.REMOVE_POD_SANDBOX,
    # From NRI 0.10. A CreateContainer that we were too late for fails with it: we are asked once more, and are gone
    # (containerd/nri: pkg/adaptation/adaptation.go, validateContainerAdjustment).
    Event.VALIDATE_CONTAINER_ADJUSTMENT,
)
LET_START: Final = convert.without_mount_to_pb(REQUIRED_DESTINATION)
# A container listed as created may be in the middle of its start, which we then never hear of. It keeps its GPUs until
# it is removed or its pod's next attempt is made: held too long by one that failed, never granted twice.
NEVER_LAPSES: Final = math.inf  # seconds, as the time until which it holds
REQUEST_TIMEOUT_S: Final = 2.0  # the runtime's, where it does not tell (below NRI 0.7)


class Outside(Struct, frozen=True):
    """What the plugin needs of the rest of the daemon.

    snapshot: the newest node. clock: monotonic seconds. later: run something once the reply is on its way.
    changed: told each new ledger. inventory_age_s: how long ago the source of the inventory last answered; None where
    it never did. recorder: who keeps what happens. left: told when a GPU waits for a look at its processes before it is
    offered again. start_hindrance: why a container with this grant cannot start yet; empty when it can. user_of: the
    user id of a process, as the host counts; None where it cannot be told. stage_dir: where driver files are staged,
    without symlinks; empty: nobody wants to know what containers have mounted from there.
    """

    snapshot: Callable[[], Node]
    clock: Callable[[], float]
    later: Callable[[Callable[[], None]], object]
    changed: Callable[[Ledger], None]
    inventory_age_s: Callable[[], float | None] = lambda: None
    recorder: Recorder = field(default_factory=Nobody)
    left: Callable[[], None] = lambda: None
    start_hindrance: Callable[[Grant], str] = lambda _: ""
    user_of: Callable[[int], int | None] = lambda _: None
    stage_dir: str = ""


class Plugin:
    """Decides for one runtime. Lives as long as the daemon, across connections.

    ungranted: containers that ran without what they asked for when the runtime last listed them. request_timeout_s: as
    long as the runtime waits for an answer.
    """

    def __init__(self, outside: Outside, policy: Policy, key: bytes) -> None:
        self.ledger = Ledger()
        self.ungranted: frozenset[ContainerId] = frozenset()
        self.kubelet = KubeletAllocations()
        self.external = ExternalAllocations()
        self.stage_dir = outside.stage_dir
        self.request_timeout_s = REQUEST_TIMEOUT_S
        self._outside = outside
        self._key = key
        self._handlers: Mapping[int, Callable[[Lifecycle], Reply]] = {
            Event.RUN_POD_SANDBOX: self._pod_came,
            Event.START_CONTAINER: self._started,
            Event.STOP_CONTAINER: self._stopped,
            Event.REMOVE_CONTAINER: self._removed,
            Event.STOP_POD_SANDBOX: self._pod_gone,
            Event.REMOVE_POD_SANDBOX: self._pod_gone,
        }
        self._markers_of: tuple[int | None, bool] | None = None
        self._markers = Markers(())
        self._hooks = HooksSeen()
        self._unseen: frozenset[ContainerId] = frozenset()  # granted, and not yet seen with what they were granted
        self._handover = Handover()
        self._observed: Inventory | None = None  # by which the ledger knows whose GPUs containers' numbers are
        self.policy = policy

    @property
    def events(self) -> tuple[Event, ...]:
        """What it must hear of."""
        return EVENTS

    def create_container(self, payload: bytes) -> Reply:
        """CreateContainer: what to add to this container, or why it must not be created."""
        node = self._outside.snapshot()
        if not self._needs_reading(payload, node):
            return EMPTY
        self.observe()
        node = self.aged(node)
        container = self.kubelet.read(convert.request_from_pb(payload, self.stage_dir))
        container = self.external.read(container, node.inventory, self.policy.kubelet)
        now = self._outside.clock()
        ledger = self._lapsed(now)
        decision = decide(container, node, ledger, self.policy)
        if not isinstance(decision, Refuse):  # one that is refused may come again for what it was promised
            ledger = redeemed(ledger, container)
        reply, signed = self._reply(container, decision)
        # Recorded and committed only once the reply exists: a bug in making it leaks no grant.
        self.kubelet.decided(container, decision)
        self.external.decided(container, decision, self.policy.kubelet)
        self._record(container, decision, signed, node, now)
        ledger = ledger.after(decision, now)
        self._commit(ledger if isinstance(decision, Refuse) else self._with_live(ledger, container, decision.edits))
        elapsed_s = self._outside.clock() - now
        self._outside.later(lambda: log_decision(container, decision, node, elapsed_s))
        if container.kubelet is not None and container.kubelet.fault:
            self._outside.later(lambda: self.external.complain(container))
        if container.nvidia_hooks and not isinstance(decision, Pass):
            self._outside.later(lambda: self._hooks.warn_of(container))
        return reply

    def _reply(self, container: Container, decision: Decision) -> tuple[Reply, str]:
        """The answer, and the signed grant in it; empty where there is none."""
        match decision:
            case Refuse(reason):
                return status_of(reason), ""
            case Pass(edits):
                return convert.reply_to_pb(edits), ""
            case Inject(edits, grant):
                signed = sign_grant(grant, self._key)
                reply = convert.reply_to_pb(edits) + convert.annotation_to_pb(GRANT_KEY, signed)
                return reply + LET_START if self.kubelet.required(container) else reply, signed

    def _record(self, container: Container, decision: Decision, signed: str, node: Node, now: float) -> None:
        self._outside.recorder.decided(container, decision, node, now)
        if isinstance(decision, Inject) and decision.grant.uuids:
            self._outside.recorder.granted(decision.grant, signed, now)

    def observe(self) -> None:
        """Whose GPUs containers' device numbers are may be different since the last snapshot of the node."""
        inventory = self._outside.snapshot().inventory
        if inventory is not self._observed:
            self._observed = inventory
            self._commit(seen(self.ledger, inventory))

    def recall(self, ledger: Ledger) -> None:
        """What a daemon before us knew, until the runtime says what there is."""
        self.ledger = ledger

    def lapse(self) -> None:
        """Let go of what was granted or promised and never came, for who asks what is free and creates nothing."""
        self._commit(self._lapsed(self._outside.clock()))

    def promise(self, devices: Iterable[AllocatedDevice], *, shared: bool) -> None:
        """The kubelet gave these to a pod; which one is known when its container is created."""
        self._commit(promised(self.ledger, devices, self._outside.clock(), shared=shared))

    def kubelet_keyed(self, key: bytes) -> None:
        """What the kubelet's grants are signed with can be had."""
        self.kubelet.keyed(key, self.ledger)

    def kubelet_listed(self, given: tuple[PodDevices, ...]) -> None:
        """All that the kubelet has given to whom: promises that were forgotten, and others that are over."""
        now = self._outside.clock()
        before = self._lapsed(now)
        after = self.external.reconcile(before, given, self.policy.kubelet, now, self.kubelet.adopt)
        gone = [id_ for id_, entry in before.entries.items() if id_ not in after.entries and had_a_pod(entry)]
        self._commit(before)
        self._commit(self._vacated(after, gone, now))

    def taken(self, *, shared: bool) -> frozenset[GpuUuid]:
        """GPUs that our device plugin cannot give, since others than its pods hold them. shared: nor share them."""
        by_others = self.external.taken(self.ledger, self.policy.kubelet)
        return self.kubelet.taken(self.ledger, shared=shared) | by_others

    def _lapsed(self, now: float) -> Ledger:
        lapsed = self.ledger.lapse(now, self.policy.ledger.created_grace_s)
        return expired(self.kubelet.lapsed(self.ledger, lapsed, now), now)

    def validate(self, payload: bytes) -> Reply:
        """ValidateContainerAdjustment: whether what came of our reply, and of other plugins', is what was granted."""
        if not validation.concerns_us(payload) and not self._asks(payload):
            return EMPTY
        adjusted = validation.adjusted_from_pb(payload, GRANT_KEY)
        # What others give to containers that are not ours is the guard's business, where an operator wants it.
        reason = validate_adjusted(adjusted, self._key, self.policy, strangers=False)
        if reason:
            self._log_refusal(adjusted.container, reason, "container rejected")
        return validation.verdict_to_pb(reason)

    def unanswered(self, payload: bytes) -> None:
        """CreateContainer was decided, and nothing of the answer left: the runtime has gone on without it."""
        try:
            id_ = convert.request_from_pb(payload).id
        except (DecodeError, TooManyEntriesError):  # so it was refused
            return
        if id_ in self.ledger.entries:
            self._outside.recorder.settled(id_)
            after = self.ledger.released(id_)
            self._commit(self.kubelet.ended(self.ledger, after, id_, self._outside.clock()))

    def lifecycle(self, event: int, payload: bytes) -> Reply:
        """An event that came by its own RPC."""
        return self._event(event, payload, lambda: convert.event_from_pb(event, payload))

    def state_change(self, payload: bytes) -> Reply:
        """An event that came by StateChange."""
        if not self._concerns(payload):
            return EMPTY
        change = convert.state_change_from_pb(payload)
        return self._event(change.event, payload, lambda: change)

    def looked(self, inventory: Inventory, began: float) -> None:
        """The inventory's source has answered; it was asked at that moment of our clock."""
        self._commit(self._handover.looked(self.ledger, inventory, began, self.policy.handover))

    def waiting(self) -> bool:
        """Whether a GPU still waits to be offered again, after those that waited long enough."""
        self._commit(expired(self.ledger, self._outside.clock()))
        return bool(self.ledger.releasing)

    def synchronized(self, listed: tuple[Listed, ...]) -> None:
        """Start over from what the runtime says there is."""
        now, node = self._outside.clock(), self._outside.snapshot()
        entries: list[Entry] = []
        lives: list[Live] = []
        ungranted: set[ContainerId] = set()
        self._observed = node.inventory
        for item in listed:
            self._hooks.warn_of(item.container)
            mark = self._mark(item.container)
            if isinstance(mark, SignedGrant):
                phase = GrantPhase.CREATED if item.created else GrantPhase.RUNNING
                grant = self._grant(item.container, mark, item.pid)
                entries.append(Entry(grant, phase, now, NEVER_LAPSES if item.created else None))
            if has := live(item.container):
                lives.append(has)
            if (
                not isinstance(mark, SignedGrant)
                and tell_of_ungranted(item.container, mark, self.policy)
                and not item.created
            ):
                ungranted.add(item.container.id)
        self.ungranted = frozenset(ungranted)
        entries += self._not_listed(frozenset(item.container.id for item in listed), now)
        containers = [item.container for item in listed]
        entries += self.kubelet.listed(containers, self.ledger, now)
        self.external.synchronized(containers, self.policy.kubelet, self.kubelet.adopt)
        anew = seen(rebuilt(entries, (), self.ledger.releasing, lives), node.inventory)
        self._commit(self._vacated(anew, self.ledger.entries, now))
        self._outside.recorder.synchronized(self.ledger)
        logger.bind(gpus=len(node.gpus), grants=len(entries), foreign=len(anew.external)).info("ledger rebuilt")

    def _not_listed(self, listed: frozenset[ContainerId], now: float) -> list[Entry]:
        """Grants whose answers may have come to nothing; given by a daemon before us, perhaps.

        The runtime may be creating the container still, and have it in no list yet. Where it is slower than it lets
        plugins be, the container's start is refused if its GPUs are another's by then.
        """
        grace_s = self.policy.ledger.created_grace_s
        found = self._outside.recorder.remembered(now - grace_s)
        soon = now + self.request_timeout_s
        # A time to come was edited by hand, and would put off the end of the grace.
        given = ((each.grant, min(each.at, now)) for each in found)
        entries = (Entry(grant, GrantPhase.CREATED, at, min(at + grace_s, soon)) for grant, at in given)
        missing = [entry for entry in entries if entry.grant.container_id not in listed]
        self._unseen = frozenset(entry.grant.container_id for entry in missing)
        return missing

    def _event(self, event: int, payload: bytes, read: Callable[[], Lifecycle]) -> Reply:
        handler = self._handlers.get(event)
        return handler(read()) if handler and self._concerns(payload) else EMPTY

    def _concerns(self, payload: bytes) -> bool:
        """Whether an event can change anything: not where nobody has a device, and this one asked for nothing."""
        return bool(self.ledger.entries or self.ledger.live or self.external.pods or self._asks(payload))

    def _asks(self, payload: bytes) -> bool:
        """Whether it may ask: by annotation, or by environment, where policy lets anybody."""
        if convert.PREFIX.encode() in payload:
            return True
        return convert.VISIBLE_NEEDLE in payload and may_ask_by_environment(self.policy)

    def _started(self, change: Lifecycle) -> Reply:
        if change.container_id in self._unseen:
            self._look_at_unseen(change)
        if change.container_id in self.ledger.entries:
            return self._run(change, self.ledger)
        asks = change.asks or may_ask_by_environment(self.policy)
        container = change.container if asks else None
        return EMPTY if container is None else self._start_ungranted(change, container)

    def _look_at_unseen(self, change: Lifecycle) -> None:
        """A daemon that died between its journal and its answer granted what this container never got."""
        container = change.container
        if container is not None and isinstance(self._mark(container), SignedGrant):
            self._commit(self._with_live(self.ledger, container))
        elif container is not None:
            self._outside.recorder.settled(change.container_id)
            self._commit(self.ledger.released(change.container_id))

    def _adopt(self, change: Lifecycle, container: Container, mark: SignedGrant) -> Reply:
        entry = Entry(self._grant(container, mark, change.pid), GrantPhase.LAPSED, self._outside.clock())
        return self._run(change, self._with_live(self.ledger.with_entry(entry), container))

    def _run(self, change: Lifecycle, ledger: Ledger) -> Reply:
        running = ledger.started(change.container_id, self._outside.clock())
        if running is None:
            container = change.container
            assert container is not None  # its id stands in a ledger
            reason = Reason(
                Code.GPU_BUSY,
                "this container was created but not started within the grace, and its GPUs went to another one "
                "meanwhile: create it again.",
            )
            return self._refuse_start(container, reason)
        found = self._checked(change, running)
        if isinstance(found, Reason):
            container = change.container
            assert container is not None  # as above
            return self._refuse_start(container, found)
        self._outside.recorder.settled(change.container_id)
        self._commit(self.kubelet.started(found, change.container_id, lambda: change.container))
        return EMPTY

    def _checked(self, change: Lifecycle, running: Ledger) -> Ledger | Reason:
        """What is known of a granted container only as it starts: its user, and whether its GPU is ready for it."""
        entry = running.entries[change.container_id]
        container, seat = change.container if holds_by_mps(entry.grant) else None, entry.grant.seat
        if container is not None and seat is None:  # the journal remembers none: it is in the container
            seat = Seat.read(container.env, None, container.mps_folder)
        if sentence := self._outside.start_hindrance(replace(entry.grant, seat=seat)):
            return Reason(Code.NODE_NOT_READY, sentence)
        if container is None or seat is None:
            return running
        uid = self._outside.user_of(change.pid)
        uid = seat.uid if uid is None else uid
        if uid is None:
            return Reason(
                Code.NODE_NOT_READY,
                "the user id of this container's process cannot be read from /proc, and an MPS daemon serves one user: "
                "nri-gpu needs the rights of the systemd drop-in mps.conf (docs/mps.md).",
            )
        seated = running.with_entry(replace(entry, grant=replace(entry.grant, seat=replace(seat, uid=uid))))
        return start_fault(change.container_id, uid, seated, self._outside.snapshot().inventory) or seated

    def _grant(self, container: Container, mark: SignedGrant, pid: int) -> Grant:
        """What a container was granted, by its mark; its seat at an MPS daemon by itself and its process."""
        seat = None
        if mark.mode is Mode.MPS:
            seat = Seat.read(container.env, self._outside.user_of(pid), container.mps_folder)
        return Grant.to(container, mark.uuids, mark.mode, mark.generation, seat)

    def _start_ungranted(self, change: Lifecycle, container: Container) -> Reply:
        """Created while we were away: it asked, nobody decided, and it must not run without what it asked for."""
        mark = self._mark(container)
        if isinstance(mark, SignedGrant):
            # Ours, but created while a Synchronize was under way: old runtimes list it in neither (1.7.24).
            return self._adopt(change, container, mark)
        key = needs_grant(container, self.policy, starts=True)
        if not key:
            return EMPTY
        reason = Reason(
            Code.NOT_GRANTED,
            f"{key} asks for GPUs, but this container was created while nri-gpu was not connected to the "
            "runtime, so it has none: create it again.",
        )
        return self._refuse_start(container, reason)

    def _refuse_start(self, container: Container, reason: Reason) -> Status:
        self._log_refusal(container, reason, "start refused")
        return status_of(reason)

    def _log_refusal(self, container: Container, reason: Reason, phrase: str) -> None:
        self._outside.later(lambda: log_refusal(container, reason, phrase))

    def _stopped(self, change: Lifecycle) -> Reply:
        now = self._outside.clock()
        return self._ended(change, self.ledger.stopped(change.container_id, now), now)

    def _removed(self, change: Lifecycle) -> Reply:
        return self._ended(change, self.ledger.released(change.container_id), self._outside.clock())

    def _ended(self, change: Lifecycle, after: Ledger, now: float) -> Reply:
        self._outside.recorder.settled(change.container_id)
        ended = self.kubelet.ended(self.ledger, after, change.container_id, now)
        self._commit(self._vacated(ended, (change.container_id,), now))
        return EMPTY

    def _pod_came(self, change: Lifecycle) -> Reply:
        if self.external.pods is not None:
            self.external.pods.add(change.pod)
        return EMPTY

    def _pod_gone(self, change: Lifecycle) -> Reply:
        if self.external.pods is not None:
            self.external.pods.remove(change.pod_id)
        after = self.ledger.pod_gone(change.pod_id)
        if after is not self.ledger:
            gone = self.ledger.entries.keys() - after.entries.keys()
            for container_id in gone:
                self._outside.recorder.settled(container_id)
            now = self._outside.clock()
            after = self.kubelet.pod_gone(self.ledger, after, now)
            self._commit(self._vacated(after, gone, now))
        self.kubelet.forget(self.ledger)
        return EMPTY

    def _vacated(self, after: Ledger, among: Iterable[ContainerId], now: float) -> Ledger:
        """With the GPUs that these containers left kept from others for a while, and somebody sent to look at them."""
        simulated = self._outside.snapshot().inventory.simulated
        settings = self.policy.handover
        ledger = self._handover.vacated(self.ledger, after, among, now, settings, simulated=simulated)
        if ledger is not after:
            self._outside.later(self._outside.left)
        return ledger

    def _commit(self, ledger: Ledger) -> None:
        if ledger is not self.ledger:
            self.ledger = ledger
            self._outside.changed(ledger)

    def _needs_reading(self, payload: bytes, node: Node) -> bool:
        wanted = (node.inventory.majors.nvidia, reads_environment(self.policy))
        if wanted != self._markers_of:
            self._markers = Markers.of(wanted[0], environment=wanted[1], stage_dir=self.stage_dir)
            self._markers_of = wanted
        if self._markers.found_in(payload):
            return True
        return self.external.pods is not None and self.external.concerns(payload, self.policy.kubelet)

    def aged(self, node: Node) -> Node:
        """The snapshot with its age, where that is why policy refuses; else the very same one."""
        if self.policy.inventory.stale is Stale.SERVE:
            return node
        age_s = self._outside.inventory_age_s()
        if age_s is None or age_s <= self.policy.inventory.stale_after_s:
            return node
        return replace(node, inventory_age_s=age_s)

    def _with_live(self, ledger: Ledger, container: Container, edits: Edits = NO_EDITS) -> Ledger:
        """With what a container has, and will have by these edits."""
        has = live(container, edits, self.stage_dir)
        return ledger if has is None else with_live(ledger, has, self._outside.snapshot().inventory)

    def _mark(self, container: Container) -> SignedGrant | InvalidGrant | None:
        text = container.annotations.get(GRANT_KEY)
        return None if text is None else verify_grant(text, container.pod.uid, container.id, self._key)
