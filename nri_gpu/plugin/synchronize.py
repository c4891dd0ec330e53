"""Synchronize: the holders of GPUs by the runtime's list of containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from nri_gpu.decision.asked import is_ignored
from nri_gpu.domain.container import ContainerId, FirstProcess
from nri_gpu.ledger.events import Synchronized
from nri_gpu.ledger.grant_text import SignedGrant
from nri_gpu.ledger.ledger import Entry, GrantPhase, Lapse, Live
from nri_gpu.ledger.opened import live
from nri_gpu.nri.session import Listed
from nri_gpu.plugin.decision_log import warn_ungranted
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.starts import GrantedContainers, LedgerHolder


class ListedContainers:
    """The reader of the runtime's list, which makes the ledger's event of it."""

    def __init__(self, plugin: LedgerHolder, granted: GrantedContainers, needs: PluginDependencies) -> None:
        self._plugin = plugin
        self._granted = granted
        self._needs = needs

    def read(
        self, listed: tuple[Listed, ...], now: float, request_timeout_s: float
    ) -> tuple[Synchronized, frozenset[ContainerId]]:
        """Return the event, and the containers that run without what they asked for.

        now: by the ledger's clock. request_timeout_s: for how long the runtime waits for an answer.
        """
        entries: list[Entry] = []
        lives: list[Live] = []
        ungranted: set[ContainerId] = set()
        self._plugin.kubelet.forget()
        for item in listed:
            container, policy = item.container, self._plugin.policy
            if has := live(container):
                lives.append(has)
            signed = self._granted.signed_grant(container)
            if isinstance(signed, SignedGrant):
                if not (signed.of_nothing and is_ignored(container, policy)):
                    entries.append(self._listed_entry(item, signed, now))
            elif warn_ungranted(container, signed, policy) and not item.created:
                ungranted.add(container.id)
        ids = frozenset(item.container.id for item in listed)
        remembered = self._remembered(now, request_timeout_s)
        holders = {each.grant.container_id for each in (*entries, *remembered)} | {each.container_id for each in lives}
        processes = self._processes(listed, holders)
        unsought = self._unsought(listed, holders).difference(processes)
        event = Synchronized(now, ids, tuple(entries), remembered, tuple(lives), processes, unsought)
        return event, frozenset(ungranted)

    def _processes(self, listed: Sequence[Listed], holders: Set[ContainerId]) -> Mapping[ContainerId, FirstProcess]:
        """Find the first processes of those that hold something; a node may have thousands that hold nothing."""
        holding = {item.container.id: item.pid for item in listed if item.pid and item.container.id in holders}
        found = {id_: self._needs.cgroups.first_process(pid, id_) for id_, pid in holding.items()}
        return {id_: process for id_, process in found.items() if process}

    def _unsought(self, listed: Sequence[Listed], holders: Set[ContainerId]) -> frozenset[ContainerId]:
        """Return the holders that may have run, and whose processes the ledger does not name.

        Daemons before this one wrote no processes, a container may have started while there was no daemon, and a first
        process may end before it is looked at. Where no cgroup can be seen, the runtime's word is all that there is.
        """
        if not self._needs.cgroups.seen:
            return frozenset()
        ledger, created = self._plugin.ledger, {item.container.id for item in listed if item.created}
        ran = {id_ for id_, entry in ledger.entries.items() if entry.ran}
        held = {id_ for id_, entry in ledger.entries.items() if entry.holds}
        return frozenset(ran | (held.union(ledger.live, holders) - created)).difference(ledger.processes)

    def _listed_entry(self, item: Listed, signed: SignedGrant, now: float) -> Entry:
        """Make the entry of a container that is listed with a signed grant; an earlier daemon may have signed it."""
        container, grant = item.container, self._granted.grant(item.container, signed, item.pid)
        phase, until = (GrantPhase.CREATED, Lapse.NEVER) if item.created else (GrantPhase.RUNNING, Lapse.AFTER_GRACE)
        before = self._plugin.ledger.entries.get(container.id)
        since = before.since if before and before.phase is phase else now
        allocation = self._plugin.kubelet.allocated(container) or (before.allocation if before else None)
        entry = Entry(grant, phase, since, until, allocation=allocation)
        return entry.lapsed(now) if item.created and container.id in self._granted.revoked else entry

    def _remembered(self, now: float, request_timeout_s: float) -> tuple[Entry, ...]:
        """Make entries of the grants whose answers may not have arrived; an earlier daemon may have given them.

        The runtime may still be creating the container, and list it nowhere yet. Where that takes longer than the time
        that the runtime gives a plugin, the container's start is refused if another container holds its GPUs by then.
        """
        grace_s = self._plugin.state.settings.ledger.created_grace_s
        found = self._needs.recorder.remembered(now - grace_s)
        soon = now + request_timeout_s
        # A time to come was edited by hand, and would put off the end of the grace.
        given = ((each.grant, min(each.at, now)) for each in found)
        return tuple(
            Entry(grant, GrantPhase.CREATED, at, min(at + grace_s, soon), remembered=True) for grant, at in given
        )
