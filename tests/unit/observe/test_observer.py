"""When an observer looks: at bundles that come and go, now and then, and when somebody asks; never twice at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.node import Inventory, Majors
from nri_gpu.observe.given import NO_KUBELET, Given, GivenDevice
from nri_gpu.observe.looks import NodeLook, SeenContainer, Unseen
from nri_gpu.observe.observer import AWAY, Observer, Senses
from nri_gpu.policy.model import Policy
from nri_gpu.policy.observe_settings import ObserveSettings
from nri_gpu.stray.uses import Extent, Use
from nri_gpu.system.state import NodeState
from tests.support.log import Log
from tests.support.running import running
from tests.support.scripted_runtime import until

QUIET_S = 0.2  # in which nothing happens that should not
EXTENT = Extent(1, 0, True)


class Node:
    """A node that counts the looks at it. kinds: of each, whether it was at processes."""

    def __init__(self, folder: Path, *, look_s: int = 3600, kubelet_s: int = 0) -> None:
        self.folder = folder
        self.kinds: list[bool] = []
        self.majors: list[Majors] = []
        self.asked = 0
        self.containers: tuple[SeenContainer, ...] = ()
        self.uses: tuple[Use, ...] = ()
        self.fault: Exception | None = None
        self.given = Given(at=time.monotonic(), kubelet=True)
        self.takes_s = 0.0
        self.at_once = 0
        observe = ObserveSettings(look_s=look_s, kubelet_s=kubelet_s)
        self.state = NodeState(Inventory(taken_at=0), policy=replace(Policy.default(), observe=observe))
        senses = Senses(look=self._look, given=self._ask, folders=lambda: [folder])
        self.observer = Observer(self.state, senses, settle_s=0.02, fresh_s=3600)

    async def _look(self, inventory: Inventory, processes: bool) -> NodeLook:
        assert self.at_once == 0
        self.at_once, at = 1, time.monotonic()
        await asyncio.sleep(self.takes_s)
        self.at_once = 0
        self.majors.append(inventory.majors)
        self.kinds.append(processes)
        if self.fault:
            raise self.fault
        unseen = (Unseen("processes", "some are hidden"),) if processes else (Unseen("bundles", "one is broken"),)
        extent = EXTENT if processes else None
        return NodeLook(at=at, containers=self.containers, uses=self.uses, extent=extent, unseen=unseen)

    async def _ask(self) -> Given:
        self.asked += 1
        return self.given

    @asynccontextmanager
    async def observed(self) -> AsyncIterator[Observer]:
        async with running(self.observer.run()):
            await until("the first look", lambda: self.observer.ready)
            yield self.observer


@pytest.fixture
def node(folder: Path) -> Node:
    return Node(folder)


async def test_bundles_that_come_together_are_one_look_without_processes(node: Node) -> None:
    async with node.observed() as observer:
        for number in range(20):
            (node.folder / str(number)).mkdir()
        await until("a second look", lambda: len(node.kinds) == 2)
        await asyncio.sleep(QUIET_S)
        assert node.kinds == [True, False]
        assert node.asked == 2
        assert observer.status().unseen == ("one is broken", "some are hidden")


async def test_looks_and_questions_keep_their_distance(folder: Path) -> None:
    node = Node(folder, kubelet_s=3600)
    async with node.observed():
        (folder / "one").mkdir()
        await asyncio.sleep(QUIET_S)
        assert (node.kinds, node.asked) == ([True], 1)


async def test_time_passes(folder: Path) -> None:
    node = Node(folder, look_s=1)
    async with node.observed():
        await until("three looks", lambda: len(node.kinds) >= 3)
        assert set(node.kinds) == {True}
        assert node.asked == 1  # nothing came or went


async def test_a_container_that_no_event_told_of_is_a_question_to_the_kubelet(folder: Path) -> None:
    node = Node(folder, look_s=1)
    async with node.observed():
        node.containers = (SeenContainer(id=ContainerId("a" * 64), runtime="Docker"),)
        await until("a second question", lambda: node.asked == 2)


async def test_a_kubelet_that_failed_is_asked_with_the_next_look(folder: Path) -> None:
    node = Node(folder, look_s=1)
    node.given = Given(kubelet=True, fault="it does not answer")
    async with node.observed() as observer:
        assert "it does not answer" in observer.status().unseen
        await until("a second question", lambda: node.asked == 2)


@pytest.mark.parametrize(
    ("silent", "said"),
    [(Given(at=2.0, kubelet=True, fault="it does not answer"), "it does not answer"), (NO_KUBELET, AWAY)],
)
async def test_what_the_kubelet_gave_stays_given_while_it_is_away(node: Node, silent: Given, said: str) -> None:
    node.given = Given(at=1.0, kubelet=True, devices={("ml", "train", "main"): (GivenDevice(id="GPU-0"),)})
    async with node.observed() as observer:
        node.given = silent
        (node.folder / "one").mkdir()
        await until("a second question", lambda: said in observer.status().unseen)
        assert [each.device for each in observer.status().allocations] == ["GPU-0"]
        assert observer.status().kubelet_s == pytest.approx(time.time() - time.monotonic() + 1.0, abs=1)


async def test_whoever_asks_waits_for_a_look_that_is_not_old(node: Node) -> None:
    node.takes_s = 0.1
    async with running(node.observer.run()):
        await asyncio.gather(*(node.observer.fresh() for _ in range(5)))
        assert node.observer.status().looked_s == pytest.approx(time.time(), abs=5)
        await node.observer.fresh()
        await asyncio.sleep(QUIET_S)
        assert node.kinds == [True]


async def test_an_old_look_is_made_again_for_who_asks(folder: Path) -> None:
    node = Node(folder)
    node.observer._fresh_s = 0.0
    async with node.observed() as observer:
        await observer.fresh()
        assert node.kinds == [True, True]


async def test_a_driver_that_came_is_looked_for_at_once(node: Node) -> None:
    async with node.observed():
        node.state.put_inventory(Inventory(taken_at=1, majors=Majors(195)))
        await until("a second look", lambda: len(node.kinds) == 2)
        assert node.majors == [Majors(), Majors(195)]


async def test_a_finding_is_logged_when_it_comes_and_when_it_goes(folder: Path, log: Log) -> None:
    node = Node(folder, look_s=1)
    node.state.put_inventory(Inventory(taken_at=1, majors=Majors(195)))
    node.uses = (Use(pid=7, started=1, program="/opt/miner", cgroups=("/",), numbers=((195, 0),)),)
    async with node.observed():
        assert "pid 7 /opt/miner" in log.one("observer finding").fields["fault"]
        node.uses = ()
        await until("a look without it", lambda: bool(log.said("observer finding is gone")))


async def test_a_bug_in_a_look_ends_nothing_and_is_said_once(folder: Path, log: Log) -> None:
    node = Node(folder, look_s=1, kubelet_s=1)
    node.fault = ZeroDivisionError("oh")
    async with running(node.observer.run()):
        await until("two looks", lambda: len(node.kinds) == 2)
        assert "ZeroDivisionError" in node.observer.status().unseen[0]
        assert not node.observer.ready
        node.fault = None
        await until("a look", lambda: node.observer.ready)
        assert "some are hidden" in node.observer.status().unseen
    assert len(log.said("bug: a look at the node failed")) == 1


async def test_findings_that_are_left_out_are_counted(node: Node) -> None:
    async with node.observed() as observer:
        observer.observed = replace(observer.observed, more=3)
        assert "3 more findings: mend those that are shown" in observer.status().unseen
