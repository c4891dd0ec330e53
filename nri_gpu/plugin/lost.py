"""Lost containers: over by the runtime's word, or not in its list. They hold their GPUs until they have no process.

A process can outlive the first one (a shared PID namespace, a shim that hangs), and containerd leaves out of its list
what it cannot classify: a container that was paused while it restarted, one whose shim does not answer or was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.events import Gone, HeldForLong, LedgerEvent
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.system.cgroups import ContainerCgroups
from nri_gpu.system.state import Changed, NodeState

if TYPE_CHECKING:
    from nri_gpu.system.folder_watch import FolderWatch

PAUSE_S: Final = 0.1  # between looks, where nothing tells
WARNED_AFTER_S: Final = 1.0  # processes that are being killed live on for a moment
STUCK_AFTER_S: Final = 60.0  # from then on no pod is sent to its GPUs
PIDS_SHOWN: Final = 8


class Lost(Struct, frozen=True):
    """A lost container."""

    container_id: ContainerId
    pod: str  # namespace/name
    container: str
    uuids: tuple[GpuUuid, ...]
    since: float  # monotonic, seconds
    cgroup: str  # path; empty if it is not seen
    pids: tuple[int, ...]


class LostContainers:
    """The search for processes of lost containers: at once, then when their cgroups change. clock: the ledger's."""

    def __init__(
        self,
        state: NodeState,
        cgroups: ContainerCgroups,
        apply: Callable[[LedgerEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._cgroups = cgroups
        self._apply = apply
        self._clock = clock
        self._known: frozenset[ContainerId] = frozenset()
        self._warned: frozenset[ContainerId] = frozenset()
        self._watch: FolderWatch | None = None
        self._polls = True
        self._timer: asyncio.TimerHandle | None = None
        state.then(self._ledger_changed, Changed.LEDGER)

    def described(self) -> tuple[Lost, ...]:
        """Describe the containers that are lost now, with the processes that they have."""
        ledger = self._state.ledger
        lost = (self._describe(ledger, each, since) for each, since in ledger.lost.items())
        # A monitor's container holds no GPU.
        return tuple(each for each in lost if each.uuids or each.container_id not in ledger.external)

    def _describe(self, ledger: Ledger, container_id: ContainerId, since: float) -> Lost:
        process, entry = ledger.processes[container_id], ledger.entries.get(container_id)
        path = process.cgroup.path if process.cgroup else ""
        pids = self._cgroups.pids(process, PIDS_SHOWN)
        if entry and entry.lost:
            pod, name, uuids = entry.grant.pod, entry.grant.container_name, entry.grant.held
        else:
            live, opened = ledger.live[container_id], ledger.external.get(container_id)
            pod, name, uuids = live.pod, live.container, tuple(opened.held) if opened else ()
        return Lost(container_id, pod, name, uuids, since, path, pids)

    def _ledger_changed(self) -> None:
        lost = frozenset(self._state.ledger.lost)
        new, self._known = lost - self._known, lost
        if new:
            self._begin()

    def _begin(self) -> None:
        """Watch the cgroups that tell of the end of their last process, and look at all lost containers once."""
        ledger = self._state.ledger
        processes = [ledger.processes[each] for each in ledger.lost]
        told = [each for each in processes if self._cgroups.tells(each)]
        self._close()
        files = chain.from_iterable(map(self._cgroups.events_files, told))
        self._polls = len(told) < len(processes) or not self._watches(files)
        self._look()

    def _watches(self, files: Iterable[Path]) -> bool:
        from nri_gpu.system.folder_watch import IN_MODIFY, FolderWatch  # brings ctypes: only where a container is lost

        self._watch = FolderWatch(self._look, IN_MODIFY)
        try:
            self._watch.open(files)
        except OSError:  # a node has few instances (fs.inotify.max_user_instances), and other programs may use them all
            return False
        return True

    def _close(self) -> None:
        if self._watch:
            self._watch.close()

    def look(self) -> tuple[Lost, ...]:
        """Let the lost containers that have no process any more be gone. Return those that have."""
        ledger = self._state.ledger
        if over := [each for each in ledger.lost if not self._cgroups.lives(ledger.processes[each])]:
            self._apply(Gone(self._clock(), tuple(over)))
        now, lost = self._clock(), self.described()
        stuck = (each.uuids for each in lost if now - each.since >= STUCK_AFTER_S)
        self._apply(HeldForLong(now, frozenset(chain.from_iterable(stuck))))
        return lost

    def _look(self) -> None:
        now, lost = self._clock(), self.look()
        self._warn_of(each for each in lost if now - each.since >= WARNED_AFTER_S)
        self._wait([each.since + after_s - now for each in lost for after_s in (WARNED_AFTER_S, STUCK_AFTER_S)])

    def _wait(self, due_s: Iterable[float]) -> None:
        """Look again when a cgroup changes, after the first of these times from now, or soon where nothing tells."""
        if self._timer:
            self._timer.cancel()
        if not self._known:
            self._close()
            return
        pauses = [PAUSE_S] if self._polls else [each for each in due_s if each > 0]
        if pauses:
            self._timer = asyncio.get_running_loop().call_later(min(pauses), self._look)

    def _warn_of(self, lost: Iterable[Lost]) -> None:
        described = {each.container_id: each for each in lost}
        for each in (described[id_] for id_ in described.keys() - self._warned):
            namespace, _, pod_name = each.pod.partition("/")
            bound = logger.bind(namespace=namespace, pod_name=pod_name, container_name=each.container)
            bound = bound.bind(container_id=each.container_id, gpu_uuid=",".join(each.uuids), cgroup=each.cgroup)
            bound.bind(pids=",".join(map(str, each.pids))).warning(
                "container has ended for the runtime, but its processes still hold its GPUs"
            )
        self._warned = frozenset(described)
