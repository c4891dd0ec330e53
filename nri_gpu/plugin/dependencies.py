"""What the plugin's handlers need of the rest of the daemon."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from msgspec import Struct, field

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.container import Container, ContainerId, PodId
from nri_gpu.domain.decision import Decision, Grant
from nri_gpu.domain.node import Node
from nri_gpu.plugin.decision_log import Refusals
from nri_gpu.system.cgroups import ContainerCgroups


class Remembered(Struct, frozen=True):
    """One grant of the journal. at: seconds on the boot's monotonic clock, the same for every process."""

    grant: Grant
    at: float


class Recorder(Protocol):
    """Called in the order of events; raises nothing. now: seconds on the ledger's clock."""

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """A request is about to be answered."""

    def granted(self, grant: Grant, signed: str, now: float, revoked: Mapping[ContainerId, PodId]) -> bool:
        """The answer grants GPUs; the runtime may or may not get it. Returns whether that stands in the journal.

        signed: the grant as the container carries it. revoked: containers that must not start from now on.
        """

    def settled(self, container_id: ContainerId) -> None:
        """A container was started, or is gone: from now on the runtime's own list shows what it holds."""

    def synchronized(self, ledger: Ledger) -> None:
        """The ledger was rebuilt from that list."""

    def revoked(self) -> Mapping[ContainerId, PodId]:
        """Containers that must not start, with their sandboxes."""

    def removed(self, container_ids: Collection[ContainerId]) -> None:
        """These were revoked, and are gone."""

    def remembered(self, since: float) -> Iterable[Remembered]:
        """What this daemon or an earlier one granted since then, and is not settled."""


class PluginDependencies(Struct, frozen=True):
    """What the plugin needs of the rest of the daemon.

    clock: monotonic seconds. later: run something once the reply is on its way. recorder: keeps what happens.
    inventory_age_s: seconds since the source of the inventory last answered; None where it never did.
    start_hindrance: why a container with this grant cannot start yet; empty when it can. stage_dir: where driver files
    are staged, without symlinks; empty: what containers have mounted from there does not matter. refusals: logs them.
    cgroups: of containers, as far as they can be seen.
    """

    clock: Callable[[], float]
    later: Callable[[Callable[[], None]], object]
    recorder: Recorder
    inventory_age_s: Callable[[], float | None] = lambda: None
    start_hindrance: Callable[[Grant], str] = lambda _: ""
    stage_dir: str = ""
    refusals: Refusals = field(default_factory=Refusals)
    cgroups: ContainerCgroups = field(default_factory=ContainerCgroups)
