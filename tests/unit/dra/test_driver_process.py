"""The driver process as a whole, without its own process: what it waits for, takes over, keeps right and ends for."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nri_gpu._pb import drahealth_pb2 as pb
from nri_gpu.domain.errors import RestartNeededError
from nri_gpu.domain.resource_claim import ClaimUid
from nri_gpu.dra.device_health import DeviceHealthService
from nri_gpu.dra.driver_process import DriverProcess, DriverTimes
from nri_gpu.dra.node_events import NodeEvents
from nri_gpu.dra.publisher import Publisher
from nri_gpu.dra.questions import ClaimFault, DriverReport, GpuCondition, NodeView, OfferedDevice, PreparedName
from nri_gpu.system.storage import text_of
from tests.support.dra_kubelet import HEALTH, ClaimFaultError, DraKubelet
from tests.support.dra_node import QUICK, TIMES, DraNode
from tests.support.kubelet_nodes import until
from tests.support.log import Log
from tests.support.resource_claims import DRIVER, NODE, UID, resource_claim
from tests.support.running import running

DRIVER_TIMES = DriverTimes(
    retry=0.01, longest_retry=0.05, reread=0.05, tidy=60.0, look=60.0, claims=TIMES, sockets=QUICK
)
CLAIM = ClaimUid(UID)
FILE = f"nri-gpu-claim-{UID}.json"


class TakingPublisher(Publisher):
    """Takes what it is told."""

    def __init__(self) -> None:
        self.report, self.reported = DriverReport(published=7), asyncio.Event()
        self.views: list[NodeView] = []
        self.left = 0
        self.running = False

    def put(self, view: NodeView) -> None:
        self.views.append(view)

    def away(self) -> None:
        self.left += 1

    async def run(self) -> None:
        self.running = True
        await asyncio.Event().wait()


def driver_process(node: DraNode, publisher: TakingPublisher, times: DriverTimes = DRIVER_TIMES) -> DriverProcess:
    events = NodeEvents(node.api_server, NODE)
    return DriverProcess(node.daemon, node.api_server, publisher, DeviceHealthService(NODE), events, times)


@asynccontextmanager
async def process(node: DraNode, times: DriverTimes = DRIVER_TIMES) -> AsyncIterator[TakingPublisher]:
    publisher = TakingPublisher()
    async with running(driver_process(node, publisher, times).serve()):
        yield publisher


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[DraKubelet, DraNode, TakingPublisher]]:
    node = DraNode(folder)
    async with DraKubelet(folder) as kubelet, process(node) as publisher:
        await kubelet.wait_for_driver(DRIVER)
        yield kubelet, node, publisher


async def test_a_daemon_that_is_away_is_waited_for_and_told_of_once(folder: Path, log: Log) -> None:
    node = DraNode(folder)
    node.daemon.away = True
    async with DraKubelet(folder) as kubelet, process(node) as publisher:
        await until(lambda: publisher.left > 2)
        node.daemon.away = False
        await kubelet.wait_for_driver(DRIVER)
    assert len(log.said("daemon not reached, trying again")) == 1


async def test_many_pods_that_come_at_once_do_not_wait_for_each_others_questions(folder: Path) -> None:
    async with served(folder):
        all_there = threading.Barrier(30)
        await asyncio.gather(*(asyncio.to_thread(all_there.wait, 10.0) for _ in range(30)))


async def test_each_view_is_published_and_the_daemon_told_how_that_goes(folder: Path) -> None:
    async with served(folder) as (_, node, publisher):
        await node.daemon.change(counter_sets={"gpu-0": {"memory": 4}})
        await until(lambda: publisher.views[-1].counter_sets)
        assert set(node.daemon.reports) == {DriverReport(published=7)}


@pytest.mark.parametrize("release", HEALTH)
async def test_each_kubelet_is_told_of_devices_that_fall_ill(folder: Path, release: str) -> None:
    ill = OfferedDevice(name="gpu-0", attributes={}, capacity={}, fault="GPU is lost")
    async with served(folder) as (kubelet, node, _):
        driver = kubelet.driver(DRIVER)
        call = driver.channel.unary_stream(
            f"/{driver.health_service(release)}/NodeWatchResources",
            response_deserializer=pb.NodeWatchResourcesResponse.FromString,
        )(b"", timeout=20)
        assert not (await call.read()).devices
        await node.daemon.change(devices=(ill,))
        (told,) = (await call.read()).devices
        assert (told.device.pool_name, told.device.device_name, told.health) == (NODE, "gpu-0", pb.UNHEALTHY)
        call.cancel()


async def test_an_event_that_hangs_delays_no_claim(folder: Path) -> None:
    async with served(folder) as (kubelet, node, publisher):
        node.api_server.silent = True
        await node.daemon.change(gpus=(GpuCondition("GPU-a", 0),))
        await until(lambda: publisher.views[-1].gpus)
        await node.daemon.change(gpus=(GpuCondition("GPU-a", 0, "bad", "XID 79"),))
        await until(lambda: node.api_server.events)
        node.api_server.silent = False
        node.daemon.lingers = 1
        claim = node.api_server.put(resource_claim())
        with pytest.raises(ClaimFaultError, match="held by ml/web"):
            await kubelet.prepare(DRIVER, claim)
        await kubelet.prepare(DRIVER, claim)
    assert [each["reason"] for each in node.api_server.events] == ["GPUUnavailable"]  # it hangs still


async def test_a_claim_that_fails_is_an_event(folder: Path) -> None:
    async with served(folder) as (kubelet, node, _):
        node.daemon.lingers = 1
        with pytest.raises(ClaimFaultError):
            await kubelet.prepare(DRIVER, node.api_server.put(resource_claim()))
        await until(lambda: node.api_server.events)
    (event,) = node.api_server.events
    assert event["note"] == "a ResourceClaim was not prepared (gpu-busy, GPU-a): its pod's events say why"


async def test_the_daemon_is_told_at_once_how_publishing_goes(folder: Path) -> None:
    async with served(folder) as (_, node, publisher):
        publisher.report = DriverReport(published=6, missing=("DRADeviceTaints",))
        publisher.reported.set()
        await until(lambda: publisher.report in node.daemon.reports)


async def test_nothing_is_published_before_the_kubelet_knows_the_driver(folder: Path) -> None:
    async with DraKubelet(folder) as kubelet:
        kubelet.refuse = "not yet"
        async with process(DraNode(folder)) as publisher:
            await until(lambda: kubelet.refused)
            assert not publisher.running
            kubelet.refuse = ""
            await until(lambda: publisher.running)


async def test_specifications_follow_a_daemon_that_signs_with_another_key(folder: Path) -> None:
    async with served(folder) as (kubelet, node, publisher):
        await kubelet.prepare(DRIVER, node.api_server.put(resource_claim()))
        node.daemon.away, node.daemon.mac = True, "cd"
        await node.daemon.change()
        await until(lambda: publisher.left)
        node.daemon.away = False
        await until(lambda: "mac=cd" in (node.cdi / FILE).read_text())


async def removed(node: DraNode) -> None:
    (node.cdi / FILE).unlink()


async def emptied(node: DraNode) -> None:
    (node.cdi / FILE).write_text("")


async def overwritten(node: DraNode) -> None:
    """In place, as by an editor that keeps the file open."""
    await asyncio.sleep(0.05)
    with (node.cdi / FILE).open("r+") as file:
        file.write("#")
        file.flush()
        await asyncio.sleep(0.1)


async def replaced(node: DraNode) -> None:
    (node.cdi / FILE).rename(node.cdi / "elsewhere")
    (node.cdi / FILE).mkdir()
    await asyncio.sleep(0.1)
    (node.cdi / FILE).rmdir()


async def with_its_folder(node: DraNode) -> None:
    shutil.rmtree(node.cdi)


@pytest.mark.parametrize("lost", [removed, emptied, overwritten, replaced, with_its_folder])
async def test_a_file_that_somebody_removes_is_written_at_once_and_that_is_told(
    folder: Path, log: Log, lost: Callable[[DraNode], Awaitable[None]]
) -> None:
    async with served(folder) as (kubelet, node, _):
        claim = node.api_server.put(resource_claim())
        await kubelet.prepare(DRIVER, claim)
        written = (node.cdi / FILE).read_text()
        node.api_server.silent = True  # what is in the file is known
        for times in (1, 2):
            await lost(node)
            async with asyncio.timeout(10):
                await until(lambda: text_of(node.cdi / FILE, 1 << 20) == written)
                await until(lambda: node.daemon.reports[-1].restored == times)  # noqa: B023
        await kubelet.unprepare(DRIVER, claim)
        await asyncio.sleep(0.1)
        assert FILE not in node.files()
    assert len(log.said("CDI specification of a prepared claim was missing, written again")) == 2


async def test_a_file_that_was_removed_while_nobody_looked_is_told_too(folder: Path, log: Log) -> None:
    node = DraNode(folder)
    node.api_server.put(resource_claim())
    node.daemon.prepared[CLAIM] = PreparedName(CLAIM, "ml", "train")
    async with DraKubelet(folder), process(node):
        await until(lambda: node.files() == [FILE])
        await until(lambda: node.daemon.reports[-1].restored)
    log.one("CDI specification of a prepared claim was missing, written again")


async def test_a_file_that_cannot_be_written_is_told_until_it_can(folder: Path, log: Log) -> None:
    async with served(folder) as (kubelet, node, _):
        await kubelet.prepare(DRIVER, node.api_server.put(resource_claim()))
        (node.cdi / f".{FILE}.new").mkdir()  # what it is written by
        (node.cdi / FILE).unlink()
        await until(lambda: FILE in node.daemon.reports[-1].unwritten)
        (node.cdi / f".{FILE}.new").rmdir()
        await until(lambda: node.daemon.reports[-1].unwritten == "" and FILE in node.files())
    log.one("CDI specification of a prepared claim not written, trying again")


async def test_an_answer_that_is_no_view_is_a_daemon_that_is_away(folder: Path, log: Log) -> None:
    node = DraNode(folder)
    node.daemon.faults = [ClaimFault("daemon and driver are of two versions")]
    async with DraKubelet(folder) as kubelet, process(node):
        await kubelet.wait_for_driver(DRIVER)
    assert "two versions" in log.one("daemon not reached, trying again").fields["fault"]


async def test_a_claim_that_cannot_be_read_is_read_again_and_that_is_said_once(folder: Path, log: Log) -> None:
    async with served(folder) as (kubelet, node, _):
        await kubelet.prepare(DRIVER, node.api_server.put(resource_claim()))
        node.api_server.silent = True
        node.daemon.reread.add(CLAIM)
        await node.daemon.change()
        reads = node.api_server.reads
        await until(lambda: node.api_server.reads > reads + 2)
        node.api_server.silent = False
        await until(lambda: not node.daemon.reread)
    line = log.one("prepared ResourceClaims not compared with the API server")
    assert "did not answer within" in line.fields["fault"]


async def test_what_the_kubelet_did_not_unprepare_while_we_were_away_is_released_at_the_start(folder: Path) -> None:
    node = DraNode(folder)
    gone = PreparedName(ClaimUid("uid-gone"), "ml", "gone")
    node.api_server.put(resource_claim())
    for each in (gone, PreparedName(CLAIM, "ml", "train")):
        node.daemon.prepared[each.uid] = each
    node.cdi.mkdir()
    left = node.cdi / "nri-gpu-claim-left.json"
    left.write_text('{"kind": "gpu.nri.io/claim", "annotations": {"gpu.nri.io/boot": "before"}}')
    async with DraKubelet(folder), process(node):
        await until(lambda: set(node.daemon.prepared) == {CLAIM} and node.files() == [FILE])


async def test_another_driver_or_folder_in_the_policy_ends_the_process_to_begin_anew(folder: Path) -> None:
    node = DraNode(folder)
    serving = asyncio.create_task(driver_process(node, TakingPublisher()).serve())
    async with DraKubelet(folder) as kubelet:
        await kubelet.wait_for_driver(DRIVER)
        await node.daemon.change(driver="gpu.example.com")
        with pytest.raises(RestartNeededError, match=r"another dra\.driver"):
            await serving
    assert not list((folder / "plugins_registry").iterdir())
