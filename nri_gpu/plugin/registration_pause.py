"""A pause before the plugins register again, where the runtime kept them waiting and being away opens nothing.

While a plugin waits for the end of a container that is stopped slowly, containerd creates nothing on the node, and a
plugin that lost its connection meanwhile waits for the next such end (containerd#14083): pods that end slowly, one
after the other, could keep the node from creating anything. So the next registration is put off, but only where being
away opens nothing: where the kubelet or claims allocate all GPUs, whose containers cannot start without our reply.
Elsewhere a node that creates nothing for a while is better than a guard that is kept away.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from nri_gpu.policy.select import allocates_all
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.storage import write_whole
from nri_gpu.system.tasks import LogOnce

FILE: Final = "away-opens-nothing"  # in the state folder, while it does not: for the guard


class AwayFile:
    """The file that says that being away opens nothing. why_open: why containers can start unseen, or empty."""

    def __init__(self, folder: Path, state: NodeState, why_open: Callable[[], str]) -> None:
        self.opens_nothing = False
        self._file = folder / FILE
        self._state = state
        self._why_open = why_open
        self._faults = LogOnce()
        self._written = self._file.exists()  # by the daemon before us
        state.then(self.look, Changed.POLICY, Changed.LEDGER)

    def look(self) -> None:
        """Write the file, or remove it, by the policy and the ledger of now."""
        state = self._state
        self.opens_nothing = (
            allocates_all(state.policy) and not self._why_open() and not state.ledger.holders_by_request()
        )
        if self.opens_nothing is self._written:
            return
        with self._faults.guard("whether being away opens nothing is not written", path=str(self._file)):
            if self.opens_nothing:
                write_whole(self._file, b"")
            else:
                self._file.unlink(missing_ok=True)
            self._written = self.opens_nothing
