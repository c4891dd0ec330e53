"""What keeps a record of each decision: the interface that the plugin's handlers need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Decision, Grant
from nri_gpu.domain.node import Node


class Remembered(Struct, frozen=True):
    """One grant of the journal. at: seconds on the boot's monotonic clock, the same for every process."""

    grant: Grant
    at: float


class Recorder(Protocol):
    """Told in the order in which things happen; raises nothing. now: seconds on the ledger's clock."""

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """A request is about to be answered."""

    def granted(self, grant: Grant, mark: str, now: float) -> None:
        """And was granted GPUs; from here on the runtime may or may not come to know of them. mark: what says so."""

    def settled(self, container_id: ContainerId) -> None:
        """A container was started, or is gone: the runtime's own list tells what it holds."""

    def synchronized(self, ledger: Ledger) -> None:
        """The ledger was made anew from that list."""

    def remembered(self, since: float) -> Iterable[Remembered]:
        """What was granted since then and is not settled, by whichever daemon."""


class Nobody:
    """Keeps nothing: for a plugin without a state folder."""

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """Forgets it."""

    def granted(self, grant: Grant, mark: str, now: float) -> None:
        """Forgets it."""

    def settled(self, container_id: ContainerId) -> None:
        """Forgets it."""

    def synchronized(self, ledger: Ledger) -> None:
        """Forgets it."""

    def remembered(self, since: float) -> Iterable[Remembered]:
        """Nothing."""
        del since
        return ()
