"""Events of the Node against an API server over real TLS: which there are, how often, and what they say."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from nri_gpu.dra.api_server import ApiServer, ApiTimes
from nri_gpu.dra.claim_object import ResourceClaimError
from nri_gpu.dra.daemon_client import DaemonAwayError
from nri_gpu.dra.node_events import HOUR_S, HOURLY_MAX, NodeEvents, notices
from nri_gpu.dra.preparation import PreparationError
from nri_gpu.dra.questions import GpuCondition, NodeView
from tests.support.api_server import Canned, StandInApiServer
from tests.support.log import Log
from tests.support.running import running
from tests.support.waiting import aside, wait_for
from tests.unit.dra.offers import view

NODE: Final = "node1"
NOW: Final = 1_800_000_000.0
UNWRITTEN: Final = "events of the Node not written"
FORBIDDEN: Final = Canned(
    403, b'{"kind": "Status", "message": "events is forbidden"}', verb="POST", path="events", times=2
)


def well(uuid: str = "GPU-a", index: int = 0) -> GpuCondition:
    return GpuCondition(uuid, index)


def bad(uuid: str = "GPU-a", index: int = 0, since_s: float | None = None) -> GpuCondition:
    return GpuCondition(uuid, index, "bad", "XID 79, GPU has fallen off the bus", since_s)


def seen(*gpus: GpuCondition, driver: str = "") -> NodeView:
    return view(gpus=gpus, driver_version=driver)


BAD: Final = "GPU 0 (GPU-a) is bad, and granted to no new container: XID 79, GPU has fallen off the bus"
AGAIN: Final = "GPU 0 (GPU-a) can be granted again"
RECOVERING: Final = GpuCondition("GPU-a", 0, "recovering", "XID 79, GPU has fallen off the bus", NOW)
COLD: Final = GpuCondition("GPU-a", 0, "unavailable", "its NVLink fabric is not ready")
NOTICED: Final = {
    "nothing changed": (seen(bad()), seen(bad()), []),
    "it turned bad": (seen(well()), seen(bad()), [("GPUUnavailable", BAD)]),
    "it recovers, and is still withheld": (seen(bad()), seen(RECOVERING), []),
    "it turned bad again before it was back": (seen(RECOVERING), seen(bad()), [("GPUUnavailable", BAD)]),
    "it came back": (seen(RECOVERING), seen(well()), [("GPUAvailable", AGAIN)]),
    "it cannot be granted": (
        seen(well()),
        seen(COLD),
        [("GPUUnavailable", "GPU 0 (GPU-a) is unavailable, and granted to no new container: " + COLD.why)],
    ),
    "it is gone": (
        seen(well(), well("GPU-b", 1)),
        seen(well()),
        [("GPUUnavailable", "GPU 1 (GPU-b) is gone: NVML does not list it any more")],
    ),
    "it is there again": (seen(), seen(well()), [("GPUAvailable", AGAIN)]),
    "it is there again, and bad": (seen(), seen(bad()), [("GPUUnavailable", BAD)]),
    "the driver changed": (
        seen(driver="580.95.05"),
        seen(driver="590.44.01"),
        [("NVIDIADriverChanged", "the NVIDIA driver changed from 580.95.05 to 590.44.01")],
    ),
    "the driver was not known before": (seen(), seen(driver="580.95.05"), []),
    "the driver is not known now": (seen(driver="580.95.05"), seen(), []),
    "a first view of what is well": (None, seen(well(), driver="580.95.05"), []),
    "a first view of what turned bad a moment ago": (None, seen(bad(since_s=NOW - 60)), [("GPUUnavailable", BAD)]),
    "a first view of what turned bad long ago": (None, seen(bad(since_s=NOW - HOUR_S)), []),
    "a first view of what turned bad by a clock that was ahead": (None, seen(bad(since_s=NOW + 60)), []),
    "a first view of what is unavailable since nobody knows when": (None, seen(COLD), []),
}


@pytest.mark.parametrize("case", NOTICED)
def test_what_is_an_event_is_what_an_operator_would_act_on(case: str) -> None:
    before, now, expected = NOTICED[case]
    assert [(each.reason.value, each.note) for each in notices(before, now, NOW)] == expected


def test_an_event_has_the_time_of_the_gpus_health_where_that_is_known() -> None:
    times = [each.at_s for gpu in (bad(since_s=NOW - 5), COLD) for each in notices(seen(well()), seen(gpu), NOW)]
    assert times == [NOW - 5, NOW]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Iterator[StandInApiServer]:
    with StandInApiServer() as running:
        running.add_node(NODE)
        yield running


@asynccontextmanager
async def writing(server: StandInApiServer, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[NodeEvents]:
    api = ApiServer(server.access(), times=ApiTimes(connect=1, read=0.3, answer=1))
    events = NodeEvents(api, NODE, clock=clock, first_wait_s=0.02, longest_wait_s=0.1)
    async with running(events.run()):
        yield events
    api.close()


async def until(ready: Callable[[], bool]) -> None:
    await aside(wait_for, "events", ready, 10)


def written(server: StandInApiServer) -> list[tuple[str, int]]:
    """Note of each event, and how often it happened."""
    events = tuple(server.written_events.values())
    return [(each["note"], each.get("series", {}).get("count", 1)) for each in events]


def put(events: NodeEvents, *gpus: GpuCondition) -> None:
    events.put(seen(*gpus))


async def test_an_event_is_one_of_its_node_by_us(server: StandInApiServer) -> None:
    async with writing(server) as events:
        put(events, well())
        put(events, bad(since_s=NOW + 0.25))
        await until(lambda: bool(server.written_events))
    ((name, event),) = server.written_events.items()
    assert name.startswith(f"{NODE}.")
    uid = server.nodes[NODE]["metadata"]["uid"]
    assert event == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "default"},
        "eventTime": "2027-01-15T08:00:00.250000Z",
        "reportingController": "nri-gpu",
        "reportingInstance": NODE,
        "action": "Withhold",
        "reason": "GPUUnavailable",
        "note": BAD,
        "type": "Warning",
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": uid},
    }


async def test_a_daemon_that_does_not_know_its_gpus_yet_is_no_event(server: StandInApiServer) -> None:
    async with writing(server) as events:
        for _ in range(2):
            events.put(view())  # of a daemon that has just started
            put(events, well())
        put(events, bad())
        await until(lambda: written(server) == [(BAD, 1)])
    assert server.count("POST") == 1


async def test_what_repeats_is_one_event_with_a_series(server: StandInApiServer) -> None:
    async with writing(server) as events:
        for gpu in (well(), bad(), well(), bad(), well(), bad()):
            put(events, gpu)
        await until(lambda: written(server) == [(BAD, 3), (AGAIN, 2)])


async def test_a_series_that_the_server_keeps_no_more_begins_anew(server: StandInApiServer) -> None:
    async with writing(server) as events:
        put(events, well())
        put(events, bad(since_s=NOW))
        put(events, well())
        await until(lambda: len(written(server)) == 2)
        server.written_events.clear()
        put(events, bad(since_s=NOW + 60))
        await until(lambda: written(server) == [(BAD, 1)])


async def test_the_next_driver_process_writes_no_event_twice(server: StandInApiServer) -> None:
    gpus = bad(since_s=time.time() - 60), bad("GPU-b", 1, time.time() - 30)
    async with writing(server) as events:
        put(events, gpus[0])
        await until(lambda: len(written(server)) == 1)
    async with writing(server) as events:
        put(events, *gpus)
        await until(lambda: len(written(server)) == 2)
    assert server.count("POST") == 3
    assert [count for _, count in written(server)] == [1, 1]


async def test_over_the_limit_the_newest_state_is_written_once_the_hour_is_over(server: StandInApiServer) -> None:
    clock = Clock()
    async with writing(server, clock) as events:
        for _ in range(HOURLY_MAX + 3):
            put(events, well())
            put(events, bad())
        put(events, bad("GPU-b", 1))  # GPU-a is gone, and of the other there were none
        other = BAD.replace("0 (GPU-a)", "1 (GPU-b)")
        limited = [(BAD, HOURLY_MAX), (AGAIN, HOURLY_MAX), (other, 1)]
        await until(lambda: written(server) == limited)
        events.claim_failed(PreparationError("no", "gpu-unavailable", "GPU-a"))  # another kind
        await until(lambda: len(written(server)) == 4)
        limited = written(server)
        clock.now = HOUR_S
        put(events, bad("GPU-b", 1))
        await until(lambda: written(server) == [*limited, ("GPU 0 (GPU-a) is gone: NVML does not list it any more", 1)])


async def test_claims_that_fail_while_the_api_server_is_away_push_out_no_gpus_event(server: StandInApiServer) -> None:
    server.canned.append(Canned(503, times=3))
    async with writing(server) as events:
        put(events, well())
        put(events, bad())
        for _ in range(500):
            events.claim_failed(PreparationError("the API server did not answer"))
        await until(lambda: [count for _, count in written(server)] == [1, HOURLY_MAX])


async def test_a_refusal_is_said_once_and_ends_nothing(server: StandInApiServer, log: Log) -> None:
    server.canned.append(FORBIDDEN)
    async with writing(server) as events:
        for gpu in (well(), bad(), well(), bad()):
            put(events, gpu)
        await until(lambda: written(server) == [(BAD, 1)])
    assert "events is forbidden" in log.one(UNWRITTEN).fields["fault"]


@pytest.mark.parametrize(
    "trouble",
    [
        {"status": 503, "headers": {"Retry-After": "0"}},
        {"status": 201, "body": b"<html>", "path": "events"},
        {"status": 401},
        {"status": 200, "body": b"{" * 9, "drip_s": 0.2},
    ],
    ids=["away", "rubbish", "a token that ended", "hangs"],
)
async def test_an_event_waits_for_an_api_server_that_is_away(
    server: StandInApiServer, log: Log, trouble: dict[str, Any]
) -> None:
    server.canned.append(Canned(**trouble, times=3))
    async with writing(server) as events:
        put(events, well())
        put(events, bad())
        await until(lambda: written(server) == [(BAD, 1)])
    assert log.said(UNWRITTEN)


async def test_a_node_that_is_not_there_is_said(server: StandInApiServer, log: Log) -> None:
    server.nodes.clear()
    async with writing(server) as events:
        put(events, well())
        put(events, bad())
        await until(lambda: bool(log.said(UNWRITTEN)))
    assert f"has no node {NODE}: set --node-name" in log.one(UNWRITTEN).fields["fault"]


AUTHORS: Final = "ml/my-secret-claim: telepathy"
FAILURES: Final = {
    "the GPU cannot be granted": (PreparationError(AUTHORS, "gpu-unavailable", "GPU-a"), "gpu-unavailable, GPU-a"),
    "the API server": (PreparationError(AUTHORS), "node-not-ready"),
    "the claim": (ResourceClaimError(AUTHORS), "bad-request"),
    "the daemon": (DaemonAwayError(AUTHORS), "node-not-ready"),
    "a bug": (KeyError(AUTHORS), "node-not-ready"),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_claim_that_is_not_prepared_is_told_without_a_word_of_its_author(
    server: StandInApiServer, case: str
) -> None:
    error, expected = FAILURES[case]
    async with writing(server) as events:
        events.claim_failed(error)
        await until(lambda: bool(written(server)))
    ((note, _),) = written(server)
    assert note == f"a ResourceClaim was not prepared ({expected}): its pod's events say why"


async def test_a_claim_that_is_no_more_is_no_event(server: StandInApiServer) -> None:
    async with writing(server) as events:
        events.claim_failed(ResourceClaimError("it was deleted", over=True))
        events.claim_failed(PreparationError("no"))
        await until(lambda: bool(written(server)))
    assert [note for note, _ in written(server) if "bad-request" in note] == []


async def test_claims_of_one_gpu_take_no_events_from_another(server: StandInApiServer) -> None:
    async with writing(server) as events:
        for _ in range(HOURLY_MAX + 2):
            events.claim_failed(PreparationError("no", "gpu-busy", "GPU-a"))
        events.claim_failed(PreparationError("no", "gpu-busy", "GPU-b"))
        await until(lambda: len(written(server)) == 2)
    assert [count for _, count in written(server)] == [HOURLY_MAX, 1]
