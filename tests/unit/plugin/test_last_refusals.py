"""The last refusals, which `nri-gpu status` shows: of every kind, in their order, and not without end."""

from __future__ import annotations

from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.decision_log import KEPT
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.policy.plugin_settings import PluginSettings
from tests.support import nri_messages as nri
from tests.support.plugin import Bench


def test_each_way_to_be_refused() -> None:
    bench = Bench()
    of = nri.asking("1")
    bench.refused(nri.asking("9", "greedy"))
    bench.plugin.lifecycle(nri.event(Event.START_CONTAINER, of, nri.container(of))[1])
    bench.plugin.validate(nri.validate(of, nri.container(of), {}))
    sizes = Sizes(lambda: PluginSettings(request_bytes=10), bench.later, bench.refusals.add)
    assert sizes.refusal(nri.create(of, nri.container(of)))
    bench.settle()
    assert [(each.number, each.what, each.code) for each in bench.refusals.last] == [
        (1, "container refused", "no-such-gpu"),
        (2, "start refused", "not-granted"),
        (3, "container rejected", "not-granted"),
        (4, "container refused", "request-too-large"),
    ]
    first = bench.refusals.last[0]
    assert (first.pod, first.container, first.at_s) == ("greedy", "main", bench.clock())
    assert first.reason.startswith("asked for 9")


def test_the_last_are_kept() -> None:
    bench = Bench()
    for index in range(KEPT + 3):
        bench.refused(nri.asking("9", f"greedy-{index}"))
    bench.settle()
    assert [each.number for each in bench.refusals.last] == list(range(4, KEPT + 4))
