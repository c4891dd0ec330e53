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
        held = {id_ for id_, each in self._plugin.ledger.entries.items() if each.holds}
        unlisted = held.union(each.grant.container_id for each in remembered) - ids
        processes = self._processes(listed, holders, unlisted)
        return Synchronized(now, ids, tuple(entries), remembered, tuple(lives), processes), frozenset(ungranted)

    def _processes(
        self, listed: Sequence[Listed], holders: Set[ContainerId], unlisted: Set[ContainerId]
    ) -> Mapping[ContainerId, FirstProcess]:
        """Find the first processes of those that hold something; a node may have thousands that hold nothing.

        unlisted: containers that were granted GPUs, and that the runtime does not list.
        """
        found = self._cgroups_of_others(listed, unlisted)
        for item in listed:
            id_ = item.container.id
            if item.pid and id_ in holders and (process := self._needs.cgroups.first_process(item.pid, id_)):
                found[id_] = process
        return found

    def _cgroups_of_others(
        self, listed: Sequence[Listed], unlisted: Set[ContainerId]
    ) -> dict[ContainerId, FirstProcess]:
        """Find the cgroups of containers that may have run, whose processes neither the ledger nor the runtime names.

        Daemons before this one wrote no processes, and a container may have started while there was no daemon.
        unlisted: as above. Whether the runtime's PIDs are ours is known only in a connection, and with that which
        hierarchies tell.
        """
        ledger = self._plugin.ledger
        seen = {item.container.id for item in listed if item.pid} | ledger.processes.keys()
        known = {item.container.id for item in listed} | ledger.entries.keys() | ledger.live.keys()
        ran = {id_ for id_, entry in ledger.entries.items() if entry.ran}
        return dict(self._needs.cgroups.named((ran | unlisted) - seen, known))

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
