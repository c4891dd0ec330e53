"""The running daemon and its driver process's questions, over the real sockets: claims outlive its crashes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, ClaimUid
from nri_gpu.dra.claims_file import FILE_NAME, ClaimsFile
from nri_gpu.dra.daemon_client import DaemonAwayError, DaemonClient
from nri_gpu.dra.questions import (
    DRA_SOCKET,
    AskPrepare,
    AskUnprepare,
    AskView,
    ClaimFault,
    NodeView,
    Prepared,
    Unprepared,
)
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support.daemon import READY_S, UUIDS, Launch, NriGpu
from tests.support.scripted_runtime import Listener, ScriptedRuntime

POLICY: Final = '[namespaces]\nallow = ["*"]\n[dra]\nenabled = true\n'
POD: Final = nri.pod("train")
UID, OTHER = ClaimUid("11111111-0000-4000-8000-000000000001"), ClaimUid("11111111-0000-4000-8000-000000000002")


def claim(device: str, uid: ClaimUid = UID, *pods: pb.PodSandbox) -> AllocatedClaim:
    result = AllocatedResult(request="gpu", pool="node", device=device)
    names = {PodUid(each.uid): each.name for each in pods or (POD,)}
    return AllocatedClaim(uid=uid, namespace=POD.namespace, name="train", pods=names, results=(result,))


class Node:
    """A daemon, its runtime, and its driver process."""

    def __init__(self, base: Path) -> None:
        self.listener = Listener(base / "nri.sock")
        self.daemon = NriGpu(Launch(base / "daemon", base / "nri.sock").with_policy(POLICY))
        self.state = self.daemon.launch.state
        self.client = DaemonClient(self.state)
        self.runtime: ScriptedRuntime
        self.containers: list[pb.Container] = []

    async def connect(self) -> None:
        self.runtime = await self.listener.accept(READY_S)
        await self.runtime.handshake(pods=[POD], containers=self.containers)
        await asyncio.to_thread(self.daemon.wait_ready)
        await asyncio.to_thread(self.daemon.wait_logged, "driver files not found")  # it grants without them

    async def crash(self) -> None:
        """SIGKILL, and another one is started."""
        await asyncio.to_thread(self.daemon.kill)
        self.daemon.start()

    async def reached(self) -> None:
        """Until it listens."""
        async with asyncio.timeout(READY_S):
            while True:
                with suppress(DaemonAwayError):
                    await self.view()
                    return
                await asyncio.sleep(0.01)

    async def prepare(self, of: AllocatedClaim) -> Prepared:
        answer = await self.client.ask(AskPrepare(of))
        assert isinstance(answer, Prepared), answer
        return answer

    async def view(self) -> NodeView:
        answer = await self.client.ask(AskView())
        assert isinstance(answer, NodeView), answer
        return answer

    async def create(self, name: str, prepared: Prepared) -> pb.CreateContainerResponse | Status:
        """A container that the kubelet gave the claim's devices."""
        made = nri.container(POD, name, env=[f"{key}={value}" for key, value in prepared.markers])
        answer = await self.runtime.create(POD, made)
        if isinstance(answer, pb.CreateContainerResponse):
            self.containers.append(nri.running(nri.adjusted(made, answer)))
        return answer

    async def claims(self) -> list[str]:
        status = await asyncio.to_thread(self.daemon.status)
        return [each["uid"] for each in status["claims"]]


def granted(answer: pb.CreateContainerResponse | Status) -> list[str]:
    """The nodes of GPUs in an answer."""
    assert isinstance(answer, pb.CreateContainerResponse), answer
    paths = [each.path for each in answer.adjust.linux.devices]
    return [each for each in paths if each.removeprefix("/dev/nvidia").isdigit()]


@asynccontextmanager
async def running(base: Path) -> AsyncIterator[Node]:
    node = Node(base)
    async with node.listener:
        node.daemon.start()
        try:
            await node.connect()
            yield node
        finally:
            await asyncio.to_thread(node.daemon.__exit__)


async def test_a_claim_from_prepare_to_unprepare_with_crashes_in_between(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        assert [each.name for each in (await node.view()).devices] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
        prepared = await node.prepare(claim("gpu-2"))
        assert prepared.required
        assert await node.prepare(claim("gpu-2")) == prepared
        assert granted(await node.create("first", prepared)) == ["/dev/nvidia2"]

        await node.crash()
        await node.connect()
        assert await node.claims() == [UID]
        assert [each.uid for each in (await node.view()).claims] == [UID]
        assert await node.prepare(claim("gpu-2")) == prepared  # the key of the boot signed it
        assert granted(await node.create("second", prepared)) == ["/dev/nvidia2"]
        refused = await node.client.ask(AskPrepare(claim("gpu-2", OTHER)))
        assert isinstance(refused, ClaimFault)
        assert "claim" in refused.sentence or "train" in refused.sentence

        await node.crash()
        await node.reached()  # and the runtime is not there yet
        assert await node.client.ask(AskUnprepare(UID)) == Unprepared()
        await node.connect()
        assert await node.claims() == []
        assert UUIDS[2] in str((await asyncio.to_thread(node.daemon.status))["gpus"][2]["holders"])


async def test_a_claim_whose_containers_are_still_to_come_is_held_after_a_crash(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        prepared = await node.prepare(claim("gpu-1"))
        await node.crash()
        await node.connect()
        asks = nri.asking("device=1", "other")
        refused = await node.runtime.create(asks, nri.container(asks))
        assert isinstance(refused, Status)
        assert "claim" in refused.message
        assert granted(await node.create("main", prepared)) == ["/dev/nvidia1"]


@pytest.mark.parametrize("why", ["its checksum is wrong", "before this machine was started"])
async def test_claims_that_cannot_be_believed_are_prepared_again(tmp_path: Path, why: str) -> None:
    async with running(tmp_path) as node:
        prepared = await node.prepare(claim("gpu-3"))
        await node.create("main", prepared)
        await asyncio.to_thread(node.daemon.kill)
        file = node.state / FILE_NAME
        if "checksum" in why:
            file.write_bytes(file.read_bytes().replace(b"gpu-3", b"gpu-0"))
        else:
            ClaimsFile(node.state, "another boot").write(ClaimsFile(node.state).read().values())
        node.daemon.start()
        await node.connect()
        assert why in await asyncio.to_thread(node.daemon.wait_logged, "prepared claims dropped")
        assert await node.claims() == []
        held = (await asyncio.to_thread(node.daemon.status))["gpus"][3]["holders"]
        assert [each["container"] for each in held] == ["main"]  # it keeps its grant
        refused = await node.create("late", prepared)
        assert isinstance(refused, Status)
        assert "not prepared on this node" in refused.message
        assert await node.prepare(claim("gpu-3")) == prepared
        assert granted(await node.create("later", prepared)) == ["/dev/nvidia3"]


async def test_a_daemon_that_is_stopped_takes_nothing_back(tmp_path: Path) -> None:
    """What is published stays as it is while the daemon is restarted."""
    async with running(tmp_path) as node:
        await node.prepare(claim("gpu-1"))
        before = await node.view()
        waiting = asyncio.create_task(node.client.ask(AskView(before.number)))
        await asyncio.to_thread(node.daemon.terminate)
        # By when it was stopped: before the connection, before it read the question, or after that.
        with pytest.raises(DaemonAwayError, match=r"does not listen|went away|gave no answer"):
            await waiting
        assert not (node.state / DRA_SOCKET).exists()
        node.daemon.start()
        await node.reached()
        assert not (await node.view()).known
        await node.connect()
        after = await node.view()
        assert (after.known, after.devices, after.claims) == (True, before.devices, before.claims)
