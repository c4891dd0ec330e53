"""Kinds of containers: what all containers alike have in common on one node under one policy, found out once.

A deployment's pods differ in their names and ids alone, and no grant depends on these. What follows from the rest is
remembered here, up to whom the ledger has to be asked for. A law in tests/property holds what is remembered to what is
found out anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

from msgspec import Struct, field

from nri_gpu.decision.plan import Plan
from nri_gpu.domain.claim import Claim, Mode
from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import Extras
from nri_gpu.domain.gpu import Capabilities, GpuUuid
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import Node
from nri_gpu.policy.model import BrokenPolicy, Policy
from nri_gpu.policy.select import Terms

KINDS_KEPT: Final = 64
OUTFITS_KEPT: Final = 32  # of one kind; 8 GPUs make 28 pairs
# Of somebody else's texts in one kind; CUDA images have up to 2.2 kB of requirements.
TEXT_KEPT: Final = 8192  # characters
ENTRIES_KEPT: Final = 256  # variables and annotations

Key = tuple[Hashable, ...]


class Bid(Struct, frozen=True):
    """What containers of a kind compete for, since they may have it.

    capabilities: closed. extras: those asked for, or the rule's. rule: what allowed it. free: neither pools nor limits
    keep any GPU from it, whatever others hold. seat: at an MPS daemon; None in other modes.
    """

    claim: Claim
    terms: Terms
    mode: Mode
    capabilities: Capabilities
    extras: Extras
    rule: str
    free: bool
    seat: Seat | None = None


class Fitted(Struct, frozen=True):
    """What such a container gets for certain GPUs. note: as in `Inject`."""

    outfit: Plan
    note: str


class Kind(Struct, frozen=True):
    """Everything known of a kind so far. fitted: by the GPUs, and the seat at their MPS daemon."""

    bid: Bid
    fitted: dict[tuple[tuple[GpuUuid, ...], Seat | None], Fitted] = field(default_factory=dict)

    def keep(self, what: tuple[tuple[GpuUuid, ...], Seat | None], fitted: Fitted) -> None:
        """Remember what comes with those."""
        if len(self.fitted) >= OUTFITS_KEPT:
            self.fitted.clear()
        self.fitted[what] = fitted


class Kinds:
    """The kinds met last, on one node and under one policy: when either is another object, nothing is known."""

    def __init__(self) -> None:
        self._of: tuple[Node, Policy] | None = None
        self._kinds: dict[Key, Kind] = {}

    def find(self, key: Key | None, node: Node, policy: Policy | BrokenPolicy) -> Kind | None:
        """A kind that is known."""
        if key is None or self._of is None or self._of[0] is not node or self._of[1] is not policy:
            return None
        return self._kinds.get(key)

    def keep(self, key: Key | None, node: Node, policy: Policy | BrokenPolicy, kind: Kind) -> None:
        """Remember a kind, where there is a key to it that is worth keeping."""
        if key is None or isinstance(policy, BrokenPolicy) or _texts(key) > TEXT_KEPT:
            return
        known = self._of is not None and self._of[0] is node and self._of[1] is policy
        if not known or len(self._kinds) >= KINDS_KEPT:
            self._of, self._kinds = (node, policy), {}
        self._kinds[key] = kind

    def forget(self) -> None:
        """As if nobody had asked yet."""
        self._of, self._kinds = None, {}


def key_of(container: Container, policy: Policy | BrokenPolicy) -> Key | None:
    """All of a container that can decide what it gets, its GPUs aside; None for one that is odd, and always looked at.

    Of its pod's names and labels that is which rule is about it, and its namespace.
    """
    odd = container.devices or container.opened or container.cdi_devices or container.nvidia_hooks or container.rlimits
    odder = container.env_twice or container.privileged or container.wildcard or container.kubelet is not None
    pod = container.pod
    many = len(container.env) + len(container.annotations) + len(pod.annotations) > ENTRIES_KEPT
    if odd or odder or many or isinstance(policy, BrokenPolicy):
        return None
    return (
        policy.rule.first(container),
        pod.namespace,
        container.name,
        container.pinned,
        container.requirement_chars,
        container.uid,
        container.mounts,
        tuple(pod.annotations.items()),
        tuple(container.annotations.items()),
        tuple(container.env.items()),
    )


def _texts(key: Iterable[object]) -> int:
    """Characters in it."""
    return sum(_texts(part) if isinstance(part, tuple | frozenset) else len(str(part)) for part in key)
