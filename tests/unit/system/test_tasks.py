"""Pauses that double, a fault that lasts logged once, a wait for the first of several."""

from __future__ import annotations

import asyncio
import math
from typing import Final

import pytest

from nri_gpu.domain.errors import RestartNeededError
from nri_gpu.domain.phrases import FIXES
from nri_gpu.system.tasks import Backoff, LogOnce, due, first_done, raised_alone, set_within, to_its_end
from tests.support.log import Log


def test_pauses_double_up_to_the_longest_and_start_again() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.failures == 5
    backoff.reset()
    assert backoff.next_s() == 0.5
    jittered = Backoff(1.0, 1.0, jitter=0.9)
    assert all(0.1 <= jittered.next_s() <= 1.0 for _ in range(100))


def test_a_fault_that_lasts_is_logged_once() -> None:
    faults = LogOnce()
    with Log() as log:
        for fault in ("full", "full", "gone", "full", ""):  # at last all is well
            faults.warning("not written", fault, path="/x")
        faults.warning("not written", "full", path="/x")
    assert [line.fields["fault"] for line in log.said("not written")] == ["full", "gone", "full", "full"]
    assert faults.fault == "full"


LOST: Final = "runtime not reached, trying again"


def test_faults_that_last_for_minutes_are_one_error_that_says_what_to_do() -> None:
    now = 0.0
    faults = LogOnce(stuck_s=300.0, clock=lambda: now)
    with Log() as log:
        for fault in ("away", "away", "gone"):
            faults.warning(LOST, fault, socket="/s")
            now += 149.9
        now = 300.0
        for _ in range(3):
            faults.warning(LOST, "gone", socket="/s")
            now += 300.0
        faults.warning(LOST, "another")
        faults.clear()
        faults.warning(LOST, "gone")
        now += 299.0
        faults.warning(LOST, "gone")
    assert [(line.level, line.fields["fault"]) for line in log.said(LOST)] == [
        ("WARNING", "away"),
        ("WARNING", "gone"),
        ("ERROR", "gone"),
        ("WARNING", "another"),
        ("WARNING", "gone"),
    ]
    error = log.said(LOST)[2].fields
    assert error == {"socket": "/s", "fault": "gone", "lasting_s": 300, "fix": FIXES[LOST]}


def test_a_fault_with_a_fix_of_its_own_has_no_other() -> None:
    now = 0.0
    faults = LogOnce(stuck_s=300.0, clock=lambda: now)
    with Log() as log:
        faults.warning(LOST, "away", fix="come back")
        now = 300.0
        faults.warning(LOST, "away", fix="come back")
    assert [(line.level, line.fields["fix"]) for line in log.said(LOST)] == [
        ("WARNING", "come back"),
        ("ERROR", "come back"),
    ]


def test_a_note_is_no_error_however_long_it_lasts() -> None:
    faults = LogOnce(stuck_s=0.0)
    with Log() as log:
        for _ in range(3):
            faults.note("unusual", "it is so")
        faults.warning("not in the catalogue", "broken")
    assert [(line.level, line.text) for line in log.lines] == [
        ("WARNING", "unusual"),
        ("ERROR", "not in the catalogue"),
    ]
    assert log.lines[1].fields["fix"] == ""


def test_the_first_that_is_done_ends_the_wait_for_the_others() -> None:
    async def run() -> bool:
        forever = asyncio.ensure_future(asyncio.Event().wait())
        await first_done(asyncio.sleep(0), forever)
        await first_done(asyncio.Event().wait(), timeout_s=0.01)
        return forever.cancelled()

    assert asyncio.run(run())


def test_what_ended_a_task_group_alone_is_raised_without_the_group() -> None:
    needed = RestartNeededError("begin anew")
    with pytest.raises(RestartNeededError, match="begin anew"), raised_alone(RestartNeededError):
        raise ExceptionGroup("tasks", [needed])
    with pytest.raises(ExceptionGroup), raised_alone(RestartNeededError):
        raise ExceptionGroup("tasks", [needed, ValueError("a bug beside it")])


async def test_a_cancellation_that_comes_as_the_work_ends_is_not_lost() -> None:
    """As gRPC's server.stop loses it: the daemon stayed when kubelet and daemon were stopped together."""
    ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(to_its_end(asyncio.wait_for(asyncio.shield(ends), 10)))
    await asyncio.sleep(0)
    ends.set_result(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_wait_ends_by_its_event_or_its_time() -> None:
    event = asyncio.Event()
    assert not await set_within(event, 0.01)
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await set_within(event, None)
    assert await set_within(event, 0.0)


@pytest.mark.parametrize(("wait_s", "early_or_late_s"), [(0.01, 0.0), (0.999, 0.0), (1.0, 0.5), (5.0, 0.5)])
async def test_long_waits_end_at_whole_seconds_so_that_one_wake_up_serves_many(
    wait_s: float, early_or_late_s: float
) -> None:
    before, end, after = asyncio.get_running_loop().time(), due(wait_s), asyncio.get_running_loop().time()
    assert before - early_or_late_s <= end - wait_s <= after + early_or_late_s
    assert end.is_integer() or not early_or_late_s


async def test_a_wait_may_be_for_ever() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    assert await set_within(event, math.inf)


async def test_a_wait_makes_no_task() -> None:
    """The idle daemon waits every second of its life."""
    before = asyncio.all_tasks()
    waiting = asyncio.ensure_future(set_within(asyncio.Event(), 0.01))
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before | {waiting}
    assert not await waiting


async def test_a_wait_is_cancelled_with_its_task() -> None:
    waiting = asyncio.ensure_future(set_within(asyncio.Event(), 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
