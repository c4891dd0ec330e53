"""A stand-in for what is concluded from looks, until it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from nri_gpu.daemon.answers import AllocationStatus, ObservedFinding
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.node import Inventory
from nri_gpu.health.gpu_record import Moment
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.observe.given import Given
from nri_gpu.observe.looks import Look
from nri_gpu.policy.model import Policy
from nri_gpu.stray.judge import StrayUse


class Memory(Struct, frozen=True):
    """Nothing."""


class Observed(Struct, frozen=True, kw_only=True):
    """Conclusions."""

    memory: Memory = Memory()
    ledger: Ledger = Ledger()
    containers: Mapping[ContainerId, ListedContainer] = {}
    strays: tuple[StrayUse, ...] = ()
    allocations: tuple[AllocationStatus, ...] = ()
    findings: tuple[ObservedFinding, ...] = ()


def observed_after(
    memory: Memory,
    look: Look,
    given: Given,
    inventory: Inventory,
    policy: Policy,
    moment: Moment,
    xids: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> Observed:
    """Return nothing."""
    return Observed()
