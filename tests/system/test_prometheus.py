"""A real Prometheus scrapes a running daemon: each panel's query has an answer, each alert fires on its fault."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
import yaml
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.health import EventType
from nri_gpu.plugin.guard_status import GuardStatus, process_started, write_guard_status
from nri_gpu.records.policy_file import LAST_GOOD
from tests.support import nri_messages as nri
from tests.support.holding import FULL, MAJOR, cgroup_of, holding, into
from tests.support.nvml import Act, FakeHealth, happen
from tests.support.prometheus import ALERTS, MONITORING, Prometheus, asked_until, free_port
from tests.support.waiting import aside, in_a_loop
from tests.system.chain import HANDLE, INIT, LISTENER, TWO, Chain, listens

GUARD: Final = GuardStatus(pid=os.getpid(), started=process_started(os.getpid()), connected=True)
SOME: Final = 5  # more than an alert takes for an accident
PIPELINED: Final = 256 << 10  # bytes that the daemon reads at once


class Monitored:
    """A node with two GPUs, its daemon and guard, and the Prometheus that scrapes it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.strays = folder, ExitStack()
        self.chain = chain = Chain(folder, TWO, events="all")
        self._guard = folder / "guard"
        target = f"127.0.0.1:{free_port()}"
        chain.daemon.launch = replace(chain.launch, metrics=target)
        assert chain.launch.policy
        self.policy = chain.launch.policy
        text = self.policy.read_text().replace("[inventory]", "[inventory]\nstale_after_s = 3")
        stray = "[stray]\nenabled = true\nevery_s = 1\n"
        self.policy.write_text(f'{text}{stray}[metrics]\nguard_dir = "{self._guard}"\n')
        self.prometheus = Prometheus(folder / "prometheus", target)
        self.guards(connected=True)

    def guards(self, *, connected: bool) -> None:
        """The guard reports this."""
        write_guard_status(self._guard, replace(GUARD, connected=connected))

    async def healthy(self) -> None:
        """Until Prometheus has seen a node that can grant, and a container with a GPU."""
        of = nri.asking("device=0", "holder")
        await self.chain.until("a grant", "device=0")
        assert isinstance(await self.chain.runtime.create(of, nri.container(of)), pb.CreateContainerResponse)
        await self.shows("nri_gpu_grant_info * on (instance) (nri_gpu_connected * nri_gpu_node_ready) == 1")
        await asked_until("no alert", lambda: not self.prometheus.firing())  # of the time before

    async def shows(self, query: str) -> None:
        """Until a query has an answer."""
        await asked_until(query, lambda: self.prometheus.query(query))

    async def is_quiet(self, alert: str) -> None:
        """Until it does not fire: the fault before it may have set it off for a moment."""
        await asked_until(f"no {alert}", lambda: alert not in self.prometheus.firing())

    async def fires(self, alert: str) -> None:
        """Until it does."""
        await asked_until(alert, lambda: alert in self.prometheus.firing())


@pytest.fixture
def monitored(folder: Path) -> Monitored:
    return Monitored(folder)


@in_a_loop
async def test_each_panels_query_has_an_answer(monitored: Monitored) -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    async with monitored.chain.connected():
        with monitored.prometheus:
            await monitored.healthy()
            for query in queries:
                filled = query.replace("$__rate_interval", "5s").replace("$instance", ".*").replace("$namespace", ".*")
                assert "$" not in filled
                await monitored.shows(filled)
            found = await aside(monitored.prometheus.query, "nri_gpu_grant_info")
            wanted = {"uuid": TWO[0].uuid, "mode": "exclusive", "namespace": "ml", "pod": "holder", "container": "main"}
            assert [wanted.items() <= each["metric"].items() for each in found] == [True]


async def guard_away(node: Monitored) -> None:
    node.guards(connected=False)


async def late(node: Monitored) -> None:
    of = nri.asking("1")
    await node.chain.runtime.write(
        node.chain.runtime.request("CreateContainer", nri.create(of, nri.container(of)), timeout_ns=-1)
    )
    await node.chain.runtime.answers(1)


async def malformed(node: Monitored) -> None:
    of = nri.asking("1")
    assert not (await node.chain.runtime.call("CreateContainer", nri.create(of, nri.container(of))[:-1])).status.ok


async def all_at_once(node: Monitored) -> None:
    """As many containers as fit in one read: the last waits for all before it."""
    runtime, of = node.chain.runtime, nri.asking("device=7")
    requests: list[bytes] = []
    size = 0
    while size < PIPELINED:
        made = pb.Container(id=f"c{len(requests)}", name="main", pod_sandbox_id=of.id)
        requests.append(runtime.request("CreateContainer", nri.create(of, made)))
        size += len(requests[-1])
    await runtime.write(b"".join(requests))
    await runtime.answers(len(requests))


async def listener_dies(node: Monitored) -> None:
    for times in range(SOME):
        await listens(node.chain, times=times + 1)
        node.chain.kill(LISTENER)
    await listens(node.chain, times=SOME + 1)  # an event that comes before is lost


async def xid(node: Monitored) -> None:
    happen(node.chain.root, 1, EventType.XID, 79)


async def xids(node: Monitored) -> None:
    for _ in range(SOME):
        await xid(node)
        await node.chain.until("it to be withheld", "device=1", "XID 79")
        await node.chain.until("it to recover", "device=1")


async def stray(node: Monitored) -> None:
    """A container of another runtime holds a GPU: the node of one has a number now that every machine serves."""
    node.chain.daemon.number(MAJOR)
    cgroup = node.strays.enter_context(cgroup_of("cd" * 32))
    node.strays.enter_context(holding(node.folder, FULL, before=into(cgroup)))


async def remap_pending(node: Monitored) -> None:
    node.chain.play([TWO[0], replace(TWO[1], health=FakeHealth(remap_pending=1))])


async def no_fabric_manager(node: Monitored) -> None:
    node.chain.play([replace(gpu, health=FakeHealth(fabric_state=2)) for gpu in TWO])
    await node.chain.until("both to be withheld", "device=1", "see the fabric manager")


async def lost(node: Monitored) -> None:
    node.chain.play(TWO, Act(HANDLE, "fail", 15, gpu=1))


async def hangs(node: Monitored) -> None:
    node.chain.play(TWO, Act(HANDLE, "hang"))


async def unloaded(node: Monitored) -> None:
    node.chain.play(TWO, Act(INIT, "fail", 9))
    node.chain.daemon.unload()


async def ran_without(node: Monitored) -> None:
    of = nri.asking("1", "early")
    await node.chain.reconnect([of], [nri.running(nri.container(of))])


async def reconnects(node: Monitored) -> None:
    for _ in range(SOME):
        await node.chain.reconnect()


async def runtime_gone(node: Monitored) -> None:
    node.chain.runtime.close()


# Each goes on from the one before.
FAULTS: Final[dict[str, Callable[[Monitored], Awaitable[None]]]] = {
    "NriGpuGuardNotConnected": guard_away,
    "NriGpuRequestsLate": late,
    "NriGpuRequestsFailing": malformed,
    "NriGpuSlow": all_at_once,
    "NriGpuChildRestarting": listener_dies,
    "NriGpuGpuWithheld": xid,
    "NriGpuGpuUnstable": xids,
    "NriGpuStrayUse": stray,
    "NriGpuGpuSuspect": remap_pending,
    "NriGpuFabricNotReady": no_fabric_manager,
    "NriGpuGpuLost": lost,
    "NriGpuInventoryStale": hangs,
    "NriGpuNodeNotReady": unloaded,
    "NriGpuContainersWithoutGpus": ran_without,
    "NriGpuReconnecting": reconnects,
    "NriGpuNotConnected": runtime_gone,
}


@in_a_loop
async def test_each_alert_fires_on_its_fault(monitored: Monitored) -> None:
    chain = monitored.chain
    with monitored.prometheus, monitored.strays:
        async with chain.connected():
            await monitored.healthy()
            for alert, happens in FAULTS.items():
                await monitored.is_quiet(alert)
                await happens(monitored)
                await monitored.fires(alert)
            await monitored.fires("NriGpuInventoryFault")
        await monitored.fires("NriGpuDown")
        monitored.policy.write_text("nonsense")
        async with chain.connected():  # on the last good one
            await monitored.fires("NriGpuPolicyRejected")
        (chain.launch.state / LAST_GOOD).unlink()
        async with chain.connected():
            await monitored.fires("NriGpuPolicyUnusable")
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    others = {"NriGpuDown", "NriGpuInventoryFault", "NriGpuPolicyRejected", "NriGpuPolicyUnusable"}
    # They are not provoked here: test_alert_rules.py has these.
    elsewhere = {
        *("NriGpuOverlappingGrants", "NriGpuExternalConflict", "NriGpuLostContainers"),
        *("NriGpuGpuNeedsReset", "NriGpuGpuFailsApplications"),
    }
    assert {rule["alert"] for rule in rules} == {*FAULTS, *others, *elsewhere}
