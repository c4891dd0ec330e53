"""A plugin that hands GPUs from one pod to the next, and the looks at them."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.node import Inventory
from nri_gpu.nri.subscription import Event
from nri_gpu.policy.model import Policy
from nri_gpu.system.cgroups import ContainerCgroups
from nri_gpu.system.state import Changed
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support.plugin import Bench

GRACE_S: Final = 60


def inventory(
    bench: Bench,
    processes: int | None,
    *,
    simulated: bool = False,
    started: tuple[int, ...] = (),
    pids: tuple[int, ...] = (),
) -> Inventory:
    """The bench's node as a look finds it, with so many processes on every GPU. started, pids: see `Gpu`."""
    gpus = tuple(replace(gpu, processes=processes, started=started, pids=pids) for gpu in bench.node.gpus)
    return replace(bench.node.inventory, gpus=gpus, simulated=simulated)


class HandoverBench(Bench):
    """A plugin whose owner counts how often it is told of a GPU that was left. known: before anything is left."""

    def __init__(
        self,
        known: int | None = 1,
        *,
        simulated: bool = False,
        policy: Policy | None = None,
        cgroups: ContainerCgroups | None = None,
    ) -> None:
        super().__init__(policy, cgroups=cgroups)
        self.left = 0
        self._known: set[tuple[object, float]] = set()
        self.state.first(self._count, Changed.LEDGER)
        inventory_now = inventory(self, known, simulated=simulated)
        self.node = replace(self.node, inventory=inventory_now)
        self.simulated = simulated
        self.plugin.looked(inventory_now, self.clock.now)

    def _count(self) -> None:
        known, self._known = self._known, {(uuid, each.since) for uuid, each in self.state.ledger.releasing.items()}
        self.left += bool(self._known - known)

    def look(
        self,
        processes: int | None,
        began: float | None = None,
        *,
        started: tuple[int, ...] = (),
        pids: tuple[int, ...] = (),
    ) -> None:
        """A look at the node. began: now, where not said."""
        found = inventory(self, processes, simulated=self.simulated, started=started, pids=pids)
        self.plugin.looked(found, self.clock.now if began is None else began)

    def run(
        self, claim: str = "device=0", name: str = "first", container: str = "main"
    ) -> tuple[pb.PodSandbox, pb.Container]:
        """One that runs."""
        of = nri.asking(claim, name)
        made = nri.container(of, container)
        after = nri.adjusted(made, self.create(of, made))
        self.tell(Event.START_CONTAINER, of, after)
        return of, after

    def run_and_end(self, kind: Event = Event.STOP_CONTAINER) -> None:
        """One that ran, a moment ago."""
        of, made = self.run()
        self.clock.now += 5
        self.tell(kind, of, None if kind in (Event.STOP_POD_SANDBOX, Event.REMOVE_POD_SANDBOX) else made)
        self.clock.now += 1

    @property
    def withheld(self) -> str:
        """What another pod is told; empty when it gets the GPU, and is gone again."""
        second = nri.asking("device=0", "second")
        reply = self.ask(second)
        if isinstance(reply, Status):
            return reply.message
        self.tell(Event.REMOVE_CONTAINER, second, nri.container(second))
        return ""
