"""The recorder of what happens: the journal and the audit log implement it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from nri_gpu.domain.container import Container, ContainerId, PodId
from nri_gpu.domain.decision import Decision, Grant
from nri_gpu.domain.node import Node
from nri_gpu.ledger.ledger import Ledger


class Remembered(Struct, frozen=True):
    """A grant of the journal. at: seconds on the boot's monotonic clock, the same for every process."""

    grant: Grant
    at: float


class Recorder(Protocol):
    """Called in the order of events; raises nothing. now: seconds on the ledger's clock."""

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """Note a request that is about to be answered."""

    def granted(self, grant: Grant, signed: str, now: float, revoked: Mapping[ContainerId, PodId]) -> bool:
        """Note that the answer grants GPUs; the runtime may or may not get it. Return whether the journal has it.

        signed: the grant as the container carries it. revoked: containers that must not start from now on.
        """

    def settled(self, *container_ids: ContainerId) -> None:
        """Note containers that were started, or are gone: from now on the runtime's own list shows what they hold."""

    def synchronized(self, ledger: Ledger) -> None:
        """Note the ledger that was built anew from that list."""

    def revoked(self) -> Mapping[ContainerId, PodId]:
        """Return the containers that must not start, with their sandboxes."""

    def removed(self, container_ids: Collection[ContainerId]) -> None:
        """Note revoked containers that are gone."""

    def remembered(self, since: float) -> Iterable[Remembered]:
        """Return unsettled grants made at `since` or later, by this daemon or an earlier one."""
