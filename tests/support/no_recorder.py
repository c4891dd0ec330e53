"""For a plugin without a state folder."""

from __future__ import annotations

from collections.abc import Iterable

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Decision, Grant
from nri_gpu.domain.node import Node
from nri_gpu.plugin.dependencies import Remembered


class NoRecorder:
    """Keeps nothing: for a plugin without a state folder."""

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """Does nothing."""

    def granted(self, grant: Grant, signed: str, now: float) -> None:
        """Does nothing."""

    def settled(self, container_id: ContainerId) -> None:
        """Does nothing."""

    def synchronized(self, ledger: Ledger) -> None:
        """Does nothing."""

    def remembered(self, since: float) -> Iterable[Remembered]:
        """Nothing."""
        del since
        return ()
