"""What is counted: each decision once, failed requests, ended connections; and the last refusals in their order."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from nri_gpu.domain.decision import Code
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.counts import Failure, Outcome
from nri_gpu.plugin.decision_log import KEPT
from nri_gpu.plugin.nri_service import PLUGIN, PluginService
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.ttrpc import RequestReceived, StreamId
from tests.support import nri_messages as nri
from tests.support.plugin import Bench, ServedPlugin
from tests.support.scripted_runtime import until


def test_each_decision() -> None:
    bench, of = Bench(), nri.asking("1", "late")
    bench.create(nri.asking("1"))
    bench.create(nri.asking("none", "cpu"))
    bench.create(nri.pod("plain"))  # it has nothing to do with GPUs, and is not counted
    bench.refused(nri.asking("9", "greedy"))
    bench.plugin.lifecycle(nri.event(Event.START_CONTAINER, of, nri.container(of))[1])
    bench.plugin.validate(nri.validate(of, nri.container(of), {}))
    sizes = Sizes(lambda: PluginSettings(request_bytes=10), bench.later, bench.refusals.add)
    assert sizes.refusal(nri.create(of, nri.container(of)))
    bench.settle()
    assert bench.plugin.counts.decisions == {
        (Outcome.GRANTED, None): 2,
        (Outcome.REFUSED, Code.NO_SUCH_GPU): 1,
        (Outcome.START_REFUSED, Code.NOT_GRANTED): 1,
        (Outcome.REJECTED, Code.NOT_GRANTED): 1,
    }
    first, *others = bench.refusals.last
    assert (first.what, first.code, first.pod, first.container) == (
        "container refused",
        "no-such-gpu",
        "greedy",
        "main",
    )
    assert (first.number, first.at_s, first.reason[:11]) == (1, bench.clock(), "asked for 9")
    assert [(each.number, each.what, each.code) for each in others] == [
        (2, "start refused", "not-granted"),
        (3, "container rejected", "not-granted"),
        (4, "container refused", "request-too-large"),
    ]


def answered(service: PluginService, payload: bytes, *, method: str = "CreateContainer", timeout_ns: int = 0) -> None:
    request = RequestReceived(StreamId(1), PLUGIN, method, payload, timeout_ns)
    assert service.answer(request).status is not None


def test_each_request_that_fails_and_how_long_creations_took() -> None:
    bench = Bench()
    sizes = Sizes(lambda: PluginSettings(request_bytes=400), bench.later)
    service = PluginService(bench.plugin, lambda _: None, lambda: None, sizes)
    of = nri.asking("1")
    payload = nri.create(of, nri.container(of))
    answered(service, payload)  # before Configure
    service.answer(RequestReceived(StreamId(3), PLUGIN, "Configure", nri.configure(nri.NRI_0_8), 0))
    for part in nri.synchronize([], []):
        service.answer(RequestReceived(StreamId(5), PLUGIN, "Synchronize", part, 0))
    answered(service, payload, timeout_ns=-1)
    answered(service, payload[:-1])
    answered(service, payload + b"\x00" * 400)
    counts = bench.plugin.counts
    assert counts.failures == {Failure.OUT_OF_ORDER: 1, Failure.LATE: 1, Failure.MALFORMED: 1}
    assert counts.decisions == {(Outcome.REFUSED, Code.REQUEST_TOO_LARGE): 1}
    assert sum(counts.create.buckets) == 4
    assert 0 < counts.create.total_ns < 1e9


async def test_connections_that_end(folder: Path) -> None:
    async with ServedPlugin(folder) as served:
        for ended in range(3):
            assert served.plugin.counts.reconnects == ended
            (await served.connected()).close()
            await until("it to be noticed", partial(_reconnected, served, ended + 1))
        await served.connected()
    assert served.plugin.counts.reconnects == 3  # our own end is none


def _reconnected(served: ServedPlugin, count: int) -> bool:
    return served.plugin.counts.reconnects == count


def test_a_container_that_ran_ungranted_counts_until_it_ends() -> None:
    bench = Bench()
    of = nri.asking("1")
    made = nri.container(of)
    bench.synchronize([of], [made])
    assert bench.plugin.ungranted == {made.id}
    bench.tell(Event.STOP_CONTAINER, of, made)
    assert bench.plugin.ungranted == set()


def test_the_last_are_kept() -> None:
    bench = Bench()
    for index in range(KEPT + 3):
        bench.refused(nri.asking("9", f"greedy-{index}"))
    bench.settle()
    assert [each.number for each in bench.refusals.last] == list(range(4, KEPT + 4))
