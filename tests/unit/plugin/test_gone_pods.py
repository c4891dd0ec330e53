"""Pods that a list brought and that ended without an event: they count until CRI or a later event tells."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import Event
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support._pb import cri_tests_pb2 as lists
from tests.support.cri_server import PLACEHOLDER, CriServer, listing, sandbox
from tests.support.log import Log
from tests.support.nri_messages import NRI_0_8
from tests.support.plugin import ServedPlugin
from tests.support.scripted_runtime import ScriptedRuntime, until

OLD: Final = nri.pod("old", annotations={"filler": "x" * 300_000})  # from before the runtime's restart
NEW: Final = nri.pod("new")
LARGE: Final = 200_000  # bytes
MANY: Final = 40  # of these and one of another pod are no list that a runtime can send
IS_COUNTED: Final = "counted pods without those that are over"


def large(of: pb.PodSandbox, number: int) -> pb.Container:
    return nri.container(of, name=f"c{number}", id=f"{of.id}.{number}", env=["FILLER=" + "x" * LARGE])


async def full(served: ServedPlugin) -> ScriptedRuntime:
    """A runtime whose list brought so much of a pod that another one may have nothing more."""
    runtime = await served.listener.accept()
    await runtime.register(NRI_0_8)
    await runtime.synchronize([OLD], [nri.running(large(OLD, number)) for number in range(MANY)], parts=5)
    assert (await runtime.event(Event.RUN_POD_SANDBOX, NEW)).ok
    return runtime


async def create(runtime: ScriptedRuntime, number: int = 0) -> str:
    """Why the new pod may have no container; empty where it has it."""
    answer = await runtime.create(NEW, large(NEW, number))
    return answer.message if isinstance(answer, Status) else ""


async def test_what_cri_lists_no_more_goes_behind_a_refusal(folder: Path, log: Log) -> None:
    with CriServer(folder / "cri.sock", answers=listing((sandbox(NEW.id, "new"),))) as server:
        async with ServedPlugin(folder) as served:
            runtime = await full(served)
            assert not server.asked
            sentence = await create(runtime)
            assert "[list-too-large]" in sentence
            assert "may be counted" not in sentence
            await until("CRI's answer", lambda: log.said(IS_COUNTED), 15.0)
            assert await create(runtime) == ""
            assert served.alive


@pytest.mark.parametrize("still", ["its sandbox", "a container of it", "another runtime's"])
async def test_what_cri_still_lists_stays(folder: Path, log: Log, still: str) -> None:
    containers = [lists.Container(id=large(OLD, number).id, pod_sandbox_id=OLD.id) for number in range(MANY)]
    pods = [sandbox(NEW.id, "new"), sandbox(OLD.id, "old")] if still == "its sandbox" else [sandbox(NEW.id, "new")]
    answers = listing(tuple(pods), tuple(containers))
    if still == "another runtime's":
        answers = listing((sandbox(NEW.id, "new"),), (), "1.7.24")
    with CriServer(folder / "cri.sock", answers=answers):
        async with ServedPlugin(folder) as served:
            runtime = await full(served)
            assert "[list-too-large]" in await create(runtime)
            await until("CRI's answer", lambda: log.said(IS_COUNTED), 15.0)
            sentence = await create(runtime)
            assert "[list-too-large]" in sentence
            assert ("CRI's socket is another runtime's" in sentence) is (still == "another runtime's")


async def test_containers_that_ended_meanwhile_go_and_their_pod_stays(folder: Path, log: Log) -> None:
    over = [
        lists.Container(id=large(OLD, number).id, pod_sandbox_id=OLD.id, state=lists.CONTAINER_EXITED)
        for number in range(30)
    ]
    alive = [lists.Container(id=large(OLD, number).id, pod_sandbox_id=OLD.id) for number in range(30, MANY)]
    answers = listing((sandbox(OLD.id, "old"), sandbox(NEW.id, "new")), (*over, *alive))
    with CriServer(folder / "cri.sock", answers=answers):
        async with ServedPlugin(folder) as served:
            runtime = await full(served)
            assert "[list-too-large]" in await create(runtime)
            await until("CRI's answer", lambda: log.said(IS_COUNTED), 15.0)
            assert await create(runtime) == ""
            assert OLD.name in {each.pod for each in served.sizes.containers().values()}


async def test_without_cri_the_refusal_says_what_may_be_counted(folder: Path) -> None:
    async with ServedPlugin(folder) as served:
        runtime = await full(served)
        sentence = await create(runtime)
    assert (
        "that are over may be counted, such as ml/old: a restart of nri-gpu counts anew (CRI does not tell: "
        in sentence
    )
    assert sentence.endswith("no such file).")


@pytest.mark.parametrize("how", ["its last container is removed", "another sandbox of its name"])
async def test_without_cri_the_runtimes_own_events_tell(folder: Path, how: str) -> None:
    async with ServedPlugin(folder) as served:
        runtime = await full(served)
        assert "[list-too-large]" in await create(runtime)
        if how == "another sandbox of its name":
            assert (await runtime.event(Event.RUN_POD_SANDBOX, nri.pod("old", id="its-next"))).ok
        else:
            for number in range(MANY):
                assert "old" in {each.pod for each in served.sizes.containers().values()}
                assert (await runtime.event(Event.REMOVE_CONTAINER, OLD, large(OLD, number))).ok
        assert await create(runtime) == ""
        assert (await runtime.call("CreateContainer", nri.create(OLD, nri.container(OLD)))).status.ok
        await until("its count", lambda: "old" in {each.pod for each in served.sizes.containers().values()})


@pytest.mark.parametrize(
    ("socket", "says"),
    [
        ("cri.sock", f"a label or annotation of default/bad (sandbox {'b' * 64}) is not UTF-8"),
        (
            "none.sock",
            "(then `crictl pods` or `crictl ps -a` fails), and CRI, which would tell of which pod, cannot be",
        ),
    ],
)
async def test_a_pod_that_nri_cannot_send_is_named(folder: Path, log: Log, socket: str, says: str) -> None:
    bad = sandbox("b" * 64, "bad", annotations={"key": PLACEHOLDER})
    with CriServer(folder / socket, answers=listing((sandbox("a", "good"), bad))):
        async with ServedPlugin(folder) as served:
            for _ in range(2):
                runtime = await served.listener.accept()
                await runtime.register(NRI_0_8)
                runtime.close()
            await until("the pod's name", lambda: log.said("no connection survives Synchronize"), 15.0)
    fault = str(log.one("no connection survives Synchronize").fields["fault"])
    assert "it has sent no part of its list, and its own log says why" in fault
    assert says in fault
    assert served.away[-1] == fault
