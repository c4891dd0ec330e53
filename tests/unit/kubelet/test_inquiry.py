"""Who asks the kubelet: soon, not too often, for ever, and in nobody's way; against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Self

import grpc
import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import Container, PodId, PodUid
from nri_gpu.kubelet.controller import KubeletController
from nri_gpu.kubelet.podresources import Inquiry, PodResources, QuestionPace
from nri_gpu.policy.kubelet import KubeletSettings
from tests.support.builders import container, pod, uuid
from tests.support.log import Log
from tests.support.podresources import PodResourcesServer
from tests.unit.kubelet.beside import THEIRS, Beside, of_plugin
from tests.unit.kubelet.station import GPU
from tests.unit.kubelet.test_endpoint import said

QUICK = QuestionPace(between=0.001, list_every=0.05, first=0.01, longest=0.02)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - a server in this very loop is asked
            await asyncio.sleep(0.005)


class Asking(Beside):
    """With somebody who asks."""

    def __init__(self, server: PodResourcesServer, pace: QuestionPace = QUICK) -> None:
        super().__init__()
        self.server = server
        self.pace = pace

    async def __aenter__(self) -> Self:
        client = PodResources(self.server.socket)
        inquiry = Inquiry(client, self.pods, lambda listed: self.plugin.kubelet_listed(listed), self.pace)
        self._running = asyncio.create_task(inquiry.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        (ended,) = await asyncio.gather(self._running, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)

    async def granted(self, of: Container) -> None:
        """As the kubelet does: try until it works."""
        got: list[object] = []

        def tried() -> bool:
            got.append(self.create(of))
            return not isinstance(got[-1], str)

        await until(tried)
        assert all("[node-not-ready]" in str(each) for each in got[:-1])
        assert got[-1] == (uuid(1),)


async def test_a_sandbox_is_asked_about_at_once(folder: Path) -> None:
    async with PodResourcesServer(folder) as server, Asking(server, replace(QUICK, list_every=60)) as node:
        of = of_plugin(1)
        server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
        await until(lambda: "List" in server.asked)
        node.came(of)
        await node.granted(of)
    assert server.asked.count("Get ml/train") == 1


async def test_a_list_tells_of_what_nobody_asked_about(folder: Path) -> None:
    async with PodResourcesServer(folder) as server, Asking(server) as node:
        server.give("slow", {"main": {GPU: [uuid(1)]}}, "ml")
        await until(lambda: bool(node.plugin.ledger.usage()))
        assert "ml/slow" in str(node.create(container("device=1", of="thief")))


async def test_many_at_once_are_one_list(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        node = Asking(server, replace(QUICK, list_every=60))
        for number in range(200):
            node.came(pod(f"pod-{number}"))
        server.give("pod-7", {"main": {GPU: [uuid(1)]}}, "ml")
        async with node:
            await node.granted(of_plugin(1, pod="pod-7"))
    assert server.asked.count("List") <= 2
    assert len(server.asked) < 20


async def test_it_keeps_to_its_pace(folder: Path) -> None:
    """The kubelet answers 100 a second, and has others to answer."""
    async with PodResourcesServer(folder) as server, Asking(server, QuestionPace()) as node:
        began = asyncio.get_running_loop().time()
        for number in range(60):
            node.came(pod(f"pod-{number}"))
            await asyncio.sleep(0.005)
        assert len(server.asked) <= 60 * (asyncio.get_running_loop().time() - began) + 1


FAULTS = {
    "an error": (grpc.StatusCode.INTERNAL, "something"),
    "too many questions": (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_faults_are_said_once_and_end_nothing(folder: Path, log: Log, fault: tuple[grpc.StatusCode, str]) -> None:
    async with PodResourcesServer(folder) as server:
        server.fault = fault
        async with Asking(server) as node:
            of = of_plugin(1)
            server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
            node.came(of)
            await said(log, fault[0].name)
            await until(lambda: len(server.asked) >= 5)
            assert "[node-not-ready]" in str(node.create(of))
            server.fault = None
            await node.granted(of)
    assert fault[0].name in log.one("PodResources not answered, trying again").fields["fault"]


async def test_a_kubelet_that_restarts(folder: Path, log: Log) -> None:
    server = PodResourcesServer(folder)
    async with Asking(server) as node:
        await said(log, "there is no socket")
        server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
        for number in range(3):
            async with server:
                of = of_plugin(1)
                other = replace(of.pod, id=PodId(f"sandbox-{number}"), uid=PodUid(f"uid-{number}"))
                of = replace(of, pod=other)
                node.came(of)
                await node.granted(of)
            node.end_pod(of)


async def test_a_bug_of_ours_ends_nothing(folder: Path, log: Log) -> None:
    async with PodResourcesServer(folder) as server:
        node = Asking(server)
        bugs = [ZeroDivisionError()]
        whole = node.plugin.kubelet_listed

        def once(given: object) -> None:
            if bugs:
                raise bugs.pop()
            whole(given)  # type: ignore[arg-type] # what it was given

        node.plugin.kubelet_listed = once  # type: ignore[method-assign] # that is the bug
        server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
        async with node:
            node.came(of_plugin(1))
            await node.granted(of_plugin(1))
    assert isinstance(log.one("PodResources not read because of a bug in nri-gpu").exception, ZeroDivisionError)


async def test_the_keeper_asks_where_policy_wants_it(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
        node = Beside()
        settings = replace(THEIRS, enabled=False, podresources=str(server.socket))
        keeper = KubeletController(node.node_state, node.plugin, settings)
        local = container("device=2", of="local")
        assert "has just started" in str(node.create(local))
        running = asyncio.create_task(keeper.run())
        of = of_plugin(1)
        node.came(of)
        await until(lambda: node.create(of) == (uuid(1),))
        assert node.create(local) == (uuid(2),)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_without_a_kubelet_annotations_do_not_wait_for_one(folder: Path) -> None:
    node = Beside()
    settings = replace(THEIRS, enabled=False, podresources=str(folder / "none.sock"))
    running = asyncio.create_task(KubeletController(node.node_state, node.plugin, settings).run())
    await until(lambda: node.create(container("device=2", of="local")) == (uuid(2),))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    "settings",
    [
        KubeletSettings(),
        replace(THEIRS, enabled=False, podresources=""),
        KubeletSettings(enabled=True, podresources=""),
    ],
    ids=["off", "no socket named", "no socket named for our own"],
)
async def test_where_it_is_not_wanted_nobody_asks(settings: KubeletSettings) -> None:
    node = Beside()
    node.plugin.external.pods = None
    KubeletController(node.node_state, node.plugin, settings)
    assert node.plugin.external.pods is None
