"""Containers that were created and never started, on a runtime that heeds no refused start.

CRI-O restores checkpoints without telling, and so runs a container whose grant would have lapsed. Its cgroup tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Set
from typing import Final

from loguru import logger

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.decision import Grant
from nri_gpu.ledger.events import LedgerEvent, NeverStarted, ProcessesFound
from nri_gpu.ledger.ledger import Entry, GrantPhase, Lapse
from nri_gpu.system.cgroups import ContainerCgroups
from nri_gpu.system.state import Changed, NodeState

PAUSE_S: Final = 1.0  # between looks


class UnstartedContainers:
    """The search for cgroups of unstarted containers, which lapse once their grace is over and their cgroups are empty.

    lapses: whether they lapse without a look. clock: the ledger's.
    """

    def __init__(
        self,
        state: NodeState,
        cgroups: ContainerCgroups,
        apply: Callable[[LedgerEvent], None],
        lapses: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._cgroups = cgroups
        self._apply = apply
        self._lapses = lapses
        self._clock = clock
        self._warned: frozenset[ContainerId] = frozenset()
        self._timer: asyncio.TimerHandle | None = None
        state.then(self._wait, Changed.LEDGER)

    def _wait(self) -> None:
        """Look again soon, as long as an unstarted container may still lapse."""
        if not (self._lapses() or self._timer) and self._created:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self.look)

    @property
    def _created(self) -> Mapping[ContainerId, Entry]:
        """Return the containers that were created and hold a GPU, and not for good."""
        entries = self._state.ledger.entries.items()
        created = {id_: each for id_, each in entries if each.phase is GrantPhase.CREATED and each.grant.held}
        return {id_: each for id_, each in created.items() if each.until is not Lapse.NEVER}

    def look(self) -> None:
        """Find the cgroups of unstarted containers, and those that should have started by now and have no process."""
        self._timer = None
        overdue = self._state.ledger.overdue(self._clock(), self._state.settings.ledger.created_grace_s)
        created = {} if self._lapses() else self._created
        if self._cgroups.seen:
            self._find({each for each in created if not self._lives(each)})
            if over := [each for each in created.keys() & overdue if not self._lives(each)]:
                self._apply(NeverStarted(self._clock(), tuple(over)))
        else:
            self._warn_of({id_: each.grant for id_, each in created.items() if id_ in overdue})
        self._wait()

    def _find(self, container_ids: Set[ContainerId]) -> None:
        """Find containers' cgroups, so that a container that is stopped or removed is lost until its own is empty."""
        ledger = self._state.ledger
        known = ledger.entries.keys() | ledger.live.keys()
        self._apply(ProcessesFound(self._clock(), self._cgroups.named(container_ids, known)))

    def _lives(self, container_id: ContainerId) -> bool:
        process = self._state.ledger.processes.get(container_id)
        return process is not None and self._cgroups.lives(process)

    def _warn_of(self, overdue: Mapping[ContainerId, Grant]) -> None:
        for container_id in overdue.keys() - self._warned:
            grant = overdue[container_id]
            bound = logger.bind(namespace=grant.namespace, pod_name=grant.pod_name, container_name=grant.container_name)
            bound.bind(container_id=container_id, gpu_uuid=",".join(grant.held)).warning(
                "container never started and its cgroup is not seen: it keeps its GPUs until it is removed"
            )
        self._warned = frozenset(overdue)
