"""Pauses that double, a fault that lasts logged once, a wait for the first of several."""

from __future__ import annotations

import asyncio

from nri_gpu.system.tasks import Backoff, LogOnce, first_done
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
        for fault in ("full", "full", "gone", "full"):
            faults.warning("not written", fault, path="/x")
        faults.clear()
        faults.warning("not written", "full", path="/x")
    assert [line.fields["fault"] for line in log.said("not written")] == ["full", "gone", "full", "full"]
    assert faults.fault == "full"


def test_the_first_that_is_done_ends_the_wait_for_the_others() -> None:
    async def run() -> bool:
        forever = asyncio.ensure_future(asyncio.Event().wait())
        await first_done(asyncio.sleep(0), forever)
        await first_done(asyncio.Event().wait(), timeout_s=0.01)
        return forever.cancelled()

    assert asyncio.run(run())
