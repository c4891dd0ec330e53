"""START_CONTAINER: which containers may start, and what is known of a granted container only when it starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Final, Protocol

from msgspec.structs import replace

from nri_gpu.decision.asked import may_ask_by_environment, needs_grant
from nri_gpu.decision.mps_seats import holds_by_mps, start_fault
from nri_gpu.decision.overlaps import kept_out
from nri_gpu.decision.start_check import TAKEN, grant_of, validate_nodes
from nri_gpu.domain.container import Container, ContainerId, PodId
from nri_gpu.domain.decision import Code, Grant, Reason
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.kubelet.allocations import KubeletTokens
from nri_gpu.ledger.apply import apply
from nri_gpu.ledger.events import FoundAtStart, Gone, LedgerEvent, Rules, Started
from nri_gpu.ledger.grant_text import InvalidGrant, SignedGrant
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.opened import live
from nri_gpu.nri.codes import Reply, status_of
from nri_gpu.nri.convert import EMPTY
from nri_gpu.nri.subscription import HEED_STARTS, Lifecycle
from nri_gpu.plugin.counts import Counts, Outcome
from nri_gpu.plugin.decision_log import container_fields, log_revoked
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.policy.model import Policy
from nri_gpu.system.process import user_of
from nri_gpu.system.state import NodeState
from nri_gpu.system.tasks import LogOnce

OVER: Final = Reason(
    Code.GPU_BUSY,
    "the runtime reported that this container ended, but processes of it live on: end them and create it again (see "
    "`nri-gpu status`).",
)
NO_USER: Final = Reason(
    Code.NODE_NOT_READY,
    "the user id of this container's process cannot be read from /proc, and an MPS daemon serves one user: "
    "nri-gpu needs the rights of the systemd drop-in mps.conf (docs/mps.md).",
)
MANY_REVOKED: Final = 4096  # of some 130 bytes each in the journal; none is dropped for number or age
MANY: Final = (
    f"{MANY_REVOKED} containers or more were created, never started and never removed: their GPUs went to others"
)


class LedgerHolder(Protocol):
    """The parts of the plugin that starts need."""

    kubelet: KubeletTokens
    counts: Counts
    state: NodeState
    runtime: str

    @property
    def ledger(self) -> Ledger: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def rules(self) -> Rules: ...
    def apply(self, event: LedgerEvent) -> None: ...


class GrantedContainers:
    """The containers that carry a signed grant, as the runtime describes them."""

    def __init__(self, plugin: LedgerHolder, needs: PluginDependencies, key: bytes) -> None:
        # Containers that must not start, since other containers were granted their GPUs; with their sandboxes.
        self.revoked: Mapping[ContainerId, PodId] = needs.recorder.revoked()
        self._plugin = plugin
        self._needs = needs
        self._key = key
        self._faults = LogOnce()

    def signed_grant(self, container: Container) -> SignedGrant | InvalidGrant | None:
        """Return the grant that is written on a container; None where there is none."""
        return grant_of(container, container.annotations.get(GRANT_KEY), self._key)

    def grant(self, container: Container, signed: SignedGrant, pid: int) -> Grant:
        """Return what a container was granted, by its signed grant; its MPS seat by the container and its process."""
        seat = None
        if signed.mode is Mode.MPS:
            seat = Seat.read(container.env, user_of(pid), container.mps_folder)
        return Grant.to(container, signed.uuids, signed.mode, signed.generation, seat)

    def start(self, change: Lifecycle) -> Reply:
        """Answer START_CONTAINER: nothing, or why this container must not start."""
        if change.container_id in self.revoked and (container := change.container):
            signed = self.signed_grant(container)
            if self._plugin.runtime not in ("", *HEED_STARTS) and isinstance(signed, SignedGrant):
                self.end_revoked([self.grant(container, signed, change.pid)])  # it starts, whatever we answer
            if change.container_id in self.revoked:
                return self._refuse(container, TAKEN)
        if (entry := self._plugin.ledger.entries.get(change.container_id)) and entry.remembered:
            self._look_at_unseen(change)
        if change.container_id in self._plugin.ledger.entries:
            return self._run(change)
        asks = change.asks or may_ask_by_environment(self._plugin.policy)
        container = change.container if asks or change.shows_nodes else None
        return EMPTY if container is None else self._start_ungranted(change, container)

    def _look_at_unseen(self, change: Lifecycle) -> None:
        """Check that a container got its grant: a daemon may have ended between its journal and its answer."""
        container = change.container
        if container is not None and isinstance(self.signed_grant(container), SignedGrant):
            self._plugin.apply(FoundAtStart(self._needs.clock(), live(container)))
        elif container is not None:
            self._plugin.apply(Gone(self._needs.clock(), (change.container_id,)))

    def _run(self, change: Lifecycle, found: FoundAtStart | None = None) -> Reply:
        """Let a granted container start, or refuse it. found: makes it known, where the ledger does not know it."""
        plugin = self._plugin
        ledger = apply(plugin.ledger, found, plugin.rules) if found else plugin.ledger
        entry = ledger.entries[change.container_id]
        seat: Seat | Reason | None = OVER if entry.lost else TAKEN
        if ledger.may_start(change.container_id):
            added = None if found else self._look_at_added(change)
            seat = self._lacking(change, entry.grant) or added or self._seat(change, entry.grant, ledger)
        if isinstance(seat, Reason):
            container = change.container
            assert container is not None  # its id is in a ledger
            return self._refuse(container, seat)
        if found:
            plugin.apply(found)
        container = change.container if plugin.kubelet.tells and entry.allocation is None else None
        allocation = plugin.kubelet.allocated(container) if container else None
        plugin.apply(Started(self._needs.clock(), change.container_id, seat, allocation))
        return EMPTY

    def _lacking(self, change: Lifecycle, grant: Grant) -> Reason | None:
        """Return why a container lacks nodes of its GPUs, or None; only where the runtime heeds that."""
        container = change.container if grant.uuids and self._plugin.runtime in HEED_STARTS else None
        signed = self.signed_grant(container) if container else None
        return validate_nodes(container, signed) if container and isinstance(signed, SignedGrant) else None

    def _seat(self, change: Lifecycle, grant: Grant, ledger: Ledger) -> Seat | Reason | None:
        """Return the container's seat at an MPS daemon, with its user, or why it cannot start; None without a seat.

        Its user, and whether its GPU is ready for it, are known only as it starts.
        """
        container, seat = change.container if holds_by_mps(grant) else None, grant.seat
        if container is not None and seat is None:  # the journal remembers no seat: it is in the container
            seat = Seat.read(container.env, None, container.mps_folder)
        if sentence := self._needs.start_hindrance(replace(grant, seat=seat)):
            return Reason(Code.NODE_NOT_READY, sentence)
        if container is None or seat is None:
            return None
        uid = user_of(change.pid)
        uid = seat.uid if uid is None else uid
        if uid is None:
            return NO_USER
        seat = replace(seat, uid=uid)
        return start_fault(replace(grant, seat=seat), uid, ledger, self._plugin.state.node.inventory) or seat

    def _start_ungranted(self, change: Lifecycle, container: Container) -> Reply:
        """Answer the start of a container that the ledger does not know, created while we were away.

        Without a decision, it must not run without the GPUs that it asked for.
        """
        signed = self.signed_grant(container)
        if isinstance(signed, SignedGrant) and signed.of_nothing:
            self._plugin.apply(FoundAtStart(self._needs.clock(), live(container)))
            return EMPTY
        if isinstance(signed, SignedGrant):
            # Ours, but created while a Synchronize was under way: old runtimes list it in neither (1.7.24).
            grant = self.grant(container, signed, change.pid)
            return self._run(change, FoundAtStart(self._needs.clock(), live(container), grant))
        key = needs_grant(container, self._plugin.policy, starts=True)
        if not key:
            added = self._look_at_added(change)
            return self._refuse(container, added) if added else EMPTY
        reason = Reason(
            Code.NOT_GRANTED,
            f"{key} asks for GPUs, but this container was created while nri-gpu was not connected to the "
            "runtime, so it has none: create it again.",
        )
        return self._refuse(container, reason)

    def _look_at_added(self, change: Lifecycle) -> Reason | None:
        """Take note of devices that a container got after we were asked, as by an NRI plugin that is asked after us.

        Return why it must not start with them, or None.
        """
        plugin, known = self._plugin, self._plugin.ledger.live.get(change.container_id)
        container = change.container if change.shows_nodes else None
        has = live(container) if container else None
        if container is None or has is None or (known and has.numbers <= known.numbers):
            return None
        reason = kept_out(container, plugin.state.node, plugin.ledger, plugin.policy)
        if reason and plugin.runtime in ("", *HEED_STARTS):
            return reason
        if known:
            has = replace(known, numbers=known.numbers | has.numbers)
        plugin.apply(FoundAtStart(self._needs.clock(), has))
        return None

    def revoke(self, lost: Mapping[ContainerId, PodId]) -> None:
        """Let containers never start any more: others were granted their GPUs. The journal has them already."""
        self.revoked = {**self.revoked, **lost}
        if len(self.revoked) >= MANY_REVOKED:
            self._needs.later(lambda: self._faults.note("many containers wait to be removed", MANY))

    def end_revoked(self, running: Iterable[Grant]) -> None:
        """Kill, of these containers, those that must not run, since others hold their GPUs; the rest has its own back.

        running: the grants of containers that run, or start all the same.
        """
        names: dict[str, str] = {}
        for grant in (each for each in running if each.container_id in self.revoked):
            if others := self._plugin.ledger.held_against(grant):
                names[grant.container_id] = grant.pod
                fields = {"namespace": grant.namespace, "pod_name": grant.pod_name}
                fields |= {"container_name": grant.container_name, "container_id": grant.container_id}
                log_revoked(fields, others, chain.from_iterable(others.values()))
            else:
                self.is_over([grant.container_id])
        if names:
            self._needs.kill(names)

    def is_over(self, gone: Collection[ContainerId], pod_id: PodId | None = None) -> None:
        """Forget revoked containers that are removed, alone or with their sandbox: they cannot start any more."""
        over = {id_ for id_, pod in self.revoked.items() if id_ in gone or pod == pod_id}
        if over:
            self.revoked = {id_: pod for id_, pod in self.revoked.items() if id_ not in over}
            self._needs.recorder.removed(over)

    def _refuse(self, container: Container, reason: Reason) -> Reply:
        self._plugin.counts.refused(reason.code, Outcome.START_REFUSED)
        self._needs.later(lambda: self._needs.refusals.add(container_fields(container), reason, "start refused"))
        return status_of(reason)
