"""The publisher against an API server over real TLS: what is on it at the end, and how often it was written to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.dra.api_server import ApiServer, ApiTimes
from nri_gpu.dra.publisher import Publisher, PublisherTimes
from nri_gpu.dra.questions import NodeView, Taint
from tests.support.api_server import GATES, Canned, StandInApiServer
from tests.support.log import Log
from tests.support.running import running
from tests.support.waiting import POLL_S, aside, wait_for
from tests.unit.dra.offers import BAD, device, view

NODE: Final = "node1"
UNPUBLISHED: Final = "ResourceSlices not published, trying again"
QUICK: Final = PublisherTimes(first_wait=0.02, longest_wait=0.1, apart=0.01, longest_apart=0.05, away=0.2, removed=0.02)
API_QUICK: Final = ApiTimes(connect=1, read=1, answer=2)
AWAY_KEYS: Final = ["gpu.nri.io/daemon-not-running"]
OFFER: Final = view(device("gpu-0"), device("gpu-1"))


@asynccontextmanager
async def publishing(
    server: StandInApiServer, offer: NodeView = OFFER, times: PublisherTimes = QUICK, api_times: ApiTimes = API_QUICK
) -> AsyncIterator[Publisher]:
    if NODE not in server.nodes:
        server.add_node(NODE)
    api = ApiServer(server.access(), times=api_times)
    publisher = Publisher(api, NODE, times=times)
    publisher.put(offer)
    async with running(publisher.run()):
        yield publisher
    api.close()


@pytest.fixture
def server() -> Iterator[StandInApiServer]:
    with StandInApiServer() as running:
        yield running


async def until(ready: Callable[[], bool]) -> None:
    await aside(wait_for, "the API server", ready, 10)


@asynccontextmanager
async def published(
    server: StandInApiServer, offer: NodeView = OFFER, times: PublisherTimes = QUICK
) -> AsyncIterator[Publisher]:
    """The same, from when both devices are there."""
    async with publishing(server, offer, times) as publisher:
        await until(lambda: publisher.report.published == 2)
        yield publisher


def names(server: StandInApiServer) -> list[str]:
    return list(server.devices())


def tainted(server: StandInApiServer) -> dict[str, list[str]]:
    return {name: [taint["key"] for taint in each.get("taints", [])] for name, each in server.devices().items()}


async def settled(server: StandInApiServer) -> None:
    """Until the watch has told of all that was written, and a while after."""
    sent = server.bookmarks
    await until(lambda: server.bookmarks > sent + 1)


async def test_devices_are_published_once_and_belong_to_the_node(server: StandInApiServer, log: Log) -> None:
    async with published(server) as publisher:
        await settled(server)
        for _ in range(5):
            publisher.put(replace(OFFER, number=7))
            await settled(server)
    (made,) = server.slices.values()
    assert made["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "name": NODE,
            "uid": server.nodes[NODE]["metadata"]["uid"],
            "controller": True,
        }
    ]
    assert made["apiVersion"] == "resource.k8s.io/v1"
    assert (names(server), server.writes) == (["gpu-0", "gpu-1"], 1)
    assert (publisher.report.missing, publisher.report.fault) == ((), "")
    assert log.one("ResourceSlices published").fields == {"gpus": 2}
    async with publishing(server) as publisher:  # the next process finds all as it should be
        await until(lambda: publisher.report.published == 2)
        await settled(server)
    assert server.writes == 1


async def test_until_the_inventory_is_known_nothing_is_touched(server: StandInApiServer) -> None:
    async with publishing(server, replace(OFFER, known=False)) as publisher:
        publisher.put(OFFER)
        await until(lambda: publisher.report.published == 2)
        publisher.put(view(known=False))
        await settled(server)
        assert names(server) == ["gpu-0", "gpu-1"]
        publisher.put(view())
        await until(lambda: not server.slices)


async def test_what_changes_is_written(server: StandInApiServer) -> None:
    async with published(server) as publisher:
        publisher.put(view(device("gpu-0", BAD), device("gpu-1")))
        await until(lambda: tainted(server) == {"gpu-0": [BAD.key], "gpu-1": []})
        devices = deepcopy(list(server.devices().values()))
        devices[0]["taints"][0]["timeAdded"] = "2020-01-01T00:00:00Z"
        server.change_slice(next(iter(server.slices)), {"devices": devices})
        await settled(server)
        publisher.put(view(device("gpu-0", BAD), device("gpu-1", BAD)))
        await until(lambda: tainted(server)["gpu-1"] == [BAD.key])
        assert server.devices()["gpu-0"]["taints"][0]["timeAdded"] == "2020-01-01T00:00:00Z"  # not begun anew
        publisher.put(view(device("gpu-1")))
        await until(lambda: tainted(server) == {"gpu-1": []})
        assert {each["spec"]["pool"]["generation"] for each in server.slices.values()} == {1}


async def test_the_kubelet_and_others_cannot_remove_or_change_them_for_long(server: StandInApiServer) -> None:
    async with published(server) as publisher:
        await settled(server)
        for _ in range(3):
            server.delete_slices(NODE)
            await until(lambda: names(server) == ["gpu-0", "gpu-1"])
            await settled(server)
        server.change_slice(next(iter(server.slices)), {"devices": []})
        await until(lambda: names(server) == ["gpu-0", "gpu-1"])
        assert publisher.report.fault == ""


async def test_a_kubelet_that_starts_has_time_to_find_the_driver(server: StandInApiServer) -> None:
    loop = asyncio.get_running_loop()
    async with published(server, times=replace(QUICK, removed=0.3)):
        await settled(server)
        server.delete_slices(NODE)
        deleted = loop.time()
        await until(lambda: names(server) == ["gpu-0", "gpu-1"])
        assert loop.time() - deleted >= 0.3


async def test_slices_of_other_nodes_and_drivers_are_left_alone(server: StandInApiServer) -> None:
    pool = {"name": "x", "generation": 1, "resourceSliceCount": 1}
    for name, node, driver in (("a", "node2", "gpu.nri.io"), ("b", NODE, "gpu.nvidia.com"), ("c", NODE, "gpu.nri.io")):
        spec = {"nodeName": node, "driver": driver, "pool": pool, "devices": []}
        server.store({"metadata": {"name": name}, "spec": spec}, None, dry_run=False)
    async with published(server):
        assert sorted(server.slices)[1:] == ["a", "b"]  # c is an obsolete one of ours


@pytest.mark.parametrize(
    ("gates", "missing"),
    [
        (GATES, ()),
        (GATES - {"DRADeviceTaints"}, ("DRADeviceTaints",)),
        (frozenset(), ("DRAConsumableCapacity", "DRADeviceTaints", "DRAPartitionableDevices")),
    ],
)
async def test_features_are_used_where_the_server_has_them(
    server: StandInApiServer, log: Log, gates: frozenset[str], missing: tuple[str, ...]
) -> None:
    server.gates = gates
    mig = device("gpu-2-mig", counter_set="gpu-2", counters={"slices": 1})
    offer = view(device("gpu-0", BAD), device("gpu-1", shared=True), mig, counter_sets={"gpu-2": {"slices": 7}})
    async with publishing(server, offer) as publisher:
        await until(lambda: publisher.report.published > 0)
        await settled(server)
    devices = server.devices()
    assert publisher.report.missing == missing
    assert ("gpu-0" in devices) == ("DRADeviceTaints" in gates)
    assert devices["gpu-1"].get("allowMultipleAllocations", False) == ("DRAConsumableCapacity" in gates)
    assert ("consumesCounters" in devices["gpu-2-mig"]) == ("DRAPartitionableDevices" in gates)
    assert len(server.slices) == (2 if "DRAPartitionableDevices" in gates else 1)
    assert server.writes == len(server.slices)  # never one that offers a bad GPU for a moment
    told = log.said("feature gates are off on the API server, publishing without them")
    assert [line.fields["fault"] for line in told] == ([", ".join(missing)] if missing else [])


async def test_a_feature_that_is_not_wanted_is_not_missed(server: StandInApiServer) -> None:
    server.gates = frozenset({"DRADeviceTaints"})
    async with published(server) as publisher:
        assert publisher.report.missing == ()


async def test_a_feature_that_comes_or_goes_with_another_server_is_noticed(server: StandInApiServer) -> None:
    server.gates = frozenset()
    offer = view(device("gpu-0", BAD), device("gpu-1"))
    async with publishing(server, offer, replace(QUICK, probe_again=0.05)) as publisher:
        await until(lambda: names(server) == ["gpu-1"])
        server.gates = GATES  # found by the next look
        await until(lambda: names(server) == ["gpu-0", "gpu-1"])
        await until(lambda: publisher.report.missing == ())
        server.gates = frozenset()  # found by the answer to the next write that makes a slice
        server.delete_slices(NODE)
        await until(lambda: names(server) == ["gpu-1"])
        await until(lambda: publisher.report.missing == ("DRADeviceTaints",))


async def test_a_server_that_stops_in_good_order_may_be_followed_by_another(server: StandInApiServer) -> None:
    async with published(server, view(device("gpu-0", BAD), device("gpu-1"))) as publisher:
        server.gates = frozenset()
        server.end_watches()  # no write is due, and what is stored keeps its fields
        await until(lambda: names(server) == ["gpu-1"])
        await until(lambda: publisher.report.missing == ("DRADeviceTaints",))


async def test_a_server_that_refuses_counters_alone_keeps_the_other_features(server: StandInApiServer) -> None:
    refusal = json.dumps({"message": "consumesCounters: Invalid value: not in this slice"}).encode()
    server.canned = [Canned(422, refusal, path="dryRun"), Canned(422, refusal, path="dryRun", times=0)]
    async with publishing(server, view(device("gpu-0", BAD))) as publisher:
        await until(lambda: tainted(server) == {"gpu-0": [BAD.key]})
        assert publisher.report.missing == ()
    assert server.count("POST", "dryRun") == 4


async def test_a_daemon_that_is_away_for_long_keeps_new_claims_away(server: StandInApiServer) -> None:
    async with published(server) as publisher:
        publisher.away()
        publisher.put(OFFER)  # back in time
        publisher.away()
        publisher.away()
        await until(lambda: tainted(server) == {"gpu-0": AWAY_KEYS, "gpu-1": AWAY_KEYS})
        server.delete_slices(NODE)
        await until(lambda: len(tainted(server)) == 2)
        publisher.put(OFFER)
        await until(lambda: tainted(server) == {"gpu-0": [], "gpu-1": []})
    server.gates = frozenset()
    async with published(server, times=replace(QUICK, away=0.0)) as publisher:
        publisher.away()
        await settled(server)
        assert names(server) == ["gpu-0", "gpu-1"]  # withdrawn they would help nobody


async def test_conflicts_lost_watches_and_forgotten_history_are_mended_in_silence(
    server: StandInApiServer, log: Log
) -> None:
    async with published(server) as publisher:
        server.canned = [Canned(409, b"{}", verb="PUT")]
        publisher.put(view(device("gpu-0", BAD)))
        await until(lambda: tainted(server) == {"gpu-0": [BAD.key]})
        for harm in (server.break_watches, server.forget_history, server.drop_connections):
            await until(lambda: bool(server.watches))
            harm()
            server.delete_slices(NODE)  # nobody is told of it
            await until(lambda: names(server) == ["gpu-0"])
    assert not log.said(UNPUBLISHED)


async def test_a_server_ends_a_watch_and_the_next_goes_on(server: StandInApiServer) -> None:
    async with publishing(server, api_times=ApiTimes(watch=1.8)):
        await until(lambda: server.count("GET", "watch=1") == 2)
        server.delete_slices(NODE)
        await until(lambda: len(names(server)) == 2)
        assert server.count("GET", "resourceslices?fieldSelector") - server.count("GET", "watch=1") == 1  # one list


@pytest.mark.parametrize(
    ("canned", "sentence"),
    [
        (Canned(403, b'{"message": "resourceslices is forbidden"}', times=-1, path="resourceslices"), "forbidden"),
        (Canned(422, b'{"message": "is invalid: spec.devices"}', times=-1, verb="POST"), "is invalid"),
        (Canned(409, b'{"message": "is taken"}', times=-1, verb="POST", path="slices"), "is taken"),
        (Canned(503, b"<html>", times=-1), "answered 503"),
        (Canned(200, b"garbage", times=-1, path="resourceslices"), "an unexpected response"),
        (Canned(404, b"{}", times=-1), "does not serve resource.k8s.io/v1"),
        (Canned(404, b"{}", times=-1, path="/nodes/"), "has no node node1"),
    ],
)
async def test_what_is_refused_is_told_once_and_tried_again_with_pauses(
    server: StandInApiServer, log: Log, canned: Canned, sentence: str
) -> None:
    server.canned = [canned]
    async with publishing(server) as publisher:
        await until(lambda: sentence in publisher.report.fault)
        asked, began = len(server.requests), asyncio.get_running_loop().time()
        await until(lambda: len(server.requests) > asked + 10)
        assert asyncio.get_running_loop().time() - began > 0.02
        assert len([line for line in log.said(UNPUBLISHED) if sentence in line.fields["fault"]]) == 1
        server.canned.clear()
        await until(lambda: publisher.report.published == 2)
        assert publisher.report.fault == ""


async def test_a_server_that_asks_for_time_gets_it(server: StandInApiServer) -> None:
    async with published(server) as publisher:
        server.canned = [Canned(429, b"{}", {"Retry-After": "1"}, verb="PUT")]
        asked = asyncio.get_running_loop().time()
        publisher.put(view(device("gpu-0")))
        await until(lambda: publisher.report.fault != "")
        assert names(server) == ["gpu-0", "gpu-1"]
        await until(lambda: names(server) == ["gpu-0"])
        assert asyncio.get_running_loop().time() - asked >= 1


async def test_an_absent_server_is_waited_for(log: Log) -> None:
    with StandInApiServer() as gone:
        pass
    async with publishing(gone) as publisher:
        await until(lambda: "cannot be reached" in publisher.report.fault)
    assert len(log.said(UNPUBLISHED)) == 1


async def test_changes_that_come_fast_are_written_in_bursts(server: StandInApiServer) -> None:
    async with published(server, times=replace(QUICK, apart=0.2, longest_apart=0.2)) as publisher:
        for n in range(50):
            publisher.put(view(device("gpu-0", Taint("k", str(n), "NoSchedule"))))
            await asyncio.sleep(POLL_S)
        await until(lambda: server.devices()["gpu-0"].get("taints", [{}])[0].get("value") == "49")
    assert server.writes <= 6


async def test_a_node_that_registered_anew_owns_what_is_made_then(server: StandInApiServer) -> None:
    async with published(server):
        await settled(server)
        uid = server.add_node(NODE)
        server.delete_slices(NODE)  # by the garbage collector
        await until(lambda: len(names(server)) == 2)
        (made,) = server.slices.values()
        assert made["metadata"]["ownerReferences"][0]["uid"] == uid
