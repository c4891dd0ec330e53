"""The daemon at one moment, as the metrics tell it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from nri_gpu.domain.health import HealthNotes, HealthState
from nri_gpu.domain.node import Node
from nri_gpu.health.xids import ActionClass
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.plugin.counts import Counts
from nri_gpu.policy.model import Policy


class Reading(Struct, frozen=True, kw_only=True):
    """What the metrics are made of.

    policy_rejected: the file has a fault, and the policy before it stays in force. connected: the runtime has listed
    its containers and is being answered. ungranted: running containers that asked and were created without us.
    guard_connected: None where no guard can be seen from here, as in a pod. inventory_age_s: None before the driver's
    first answer. inventory_fault: its last answer was none. restarts: child -> how often it was started again.
    health_transitions: how often a GPU came into each state. health_notes: of each GPU. xids: how often which came, by
    GPU and class of the catalogue's action. stray: kind -> findings of the stray-use audit; None
    while it does not look.
    """

    node: Node
    ledger: Ledger
    policy: Policy
    policy_rejected: bool
    settings: Policy
    counts: Counts
    connected: bool
    ungranted: int
    guard_connected: bool | None
    inventory_age_s: float | None
    inventory_fault: bool
    restarts: Mapping[str, int]
    health_transitions: Mapping[HealthState, int]
    health_notes: Mapping[str, HealthNotes] = {}
    xids: Mapping[tuple[str, ActionClass], int] = {}
    stray: Mapping[str, int] | None = None
