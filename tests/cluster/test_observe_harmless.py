"""An observer costs no pod anything: with and without one all is the same, whatever state its process is in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import pytest

from tests.support.cluster import Cluster, Object, pod, wait_for
from tests.support.cluster_claims import claim, on_claim
from tests.support.nvidia_dra import SET, asked
from tests.support.observed_cluster import OBSERVER, REPLICAS, RESOURCE, ObservedCluster, allocations

pytestmark = [pytest.mark.cluster, pytest.mark.ground(SET)]

BATCH, ROUNDS = 10, 4  # 120 pods while it is stopped, starved or killed
NOISE_S: Final = 0.05
NAMES = ("claimed", "plugged", "plain", "privileged")


def _lives(cluster: Cluster, observed: ObservedCluster, seen: Callable[[], None]) -> Mapping[str, str]:
    """The evidence of four pods that came, were looked at, and went."""
    privileged = pod("privileged")
    privileged["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    cluster.wait_allocatable(REPLICAS, RESOURCE)  # a busy node may be without for a moment
    cluster.apply(claim("big", asked()), on_claim("claimed", "big"), pod("plugged", 1, RESOURCE))
    cluster.apply(pod("plain"), privileged)
    cluster.wait_running(*NAMES)
    seen()
    found = observed.evidence(*NAMES)
    cluster.kubectl("delete", "pods,resourceclaims", "--all")
    wait_for("no bundle", lambda: not [*observed.bundles()])
    return found


@pytest.mark.short
def test_pods_bundles_and_device_rules_are_the_same(cluster: Cluster, observed: ObservedCluster) -> None:
    without = _lives(cluster, observed, lambda: None)
    observed.run()
    beside = _lives(cluster, observed, lambda: _wait_seen(observed.status))
    assert len(without) == 1 + 2 * len(NAMES) + len(NAMES)  # each has a sandbox
    assert beside == without


@pytest.mark.parametrize("nvml", [False, True])
def test_they_are_beside_the_charts_observer(
    cluster: Cluster, observed: ObservedCluster, image: None, nvml: bool
) -> None:
    without = _lives(cluster, observed, lambda: None)
    cluster.install(mode="observe", observe={"nvml": nvml})
    assert _lives(cluster, observed, lambda: _wait_seen(observed.chart_status)) == without


def _wait_seen(status: Callable[[], Object]) -> None:
    """Until the observer knows both pods with GPUs."""
    both = lambda: {name for name, _ in allocations(status())} == {"claimed", "plugged"}  # noqa: E731
    wait_for("a look", both, explain=lambda: str(status()))


@contextmanager
def _killed(observed: ObservedCluster) -> Iterator[None]:
    observed.cluster.kill(OBSERVER)
    yield


STATES: Final[Mapping[str, Callable[[ObservedCluster], AbstractContextManager[None]]]] = {
    "away": lambda _: nullcontext(),
    "running": lambda _: nullcontext(),
    "stopped": lambda observed: observed.stopped(),
    "starved": lambda observed: observed.starved(),
    "killed": _killed,
}


def _batch_s(cluster: Cluster, observed: ObservedCluster) -> float:
    """How long a container took to be created and started, of so many that all came to run."""
    seconds, count = observed.operations()
    names = [f"load-{number}" for number in range(BATCH)]
    cluster.apply(*(pod(name, 1, RESOURCE) for name in names))
    cluster.wait_running(*names)
    pods = cluster.get("pods")
    assert [each["status"]["containerStatuses"][0]["restartCount"] for each in pods] == [0] * BATCH
    after_s, after = observed.operations()
    assert after - count == BATCH  # none was tried twice
    cluster.kubectl("delete", "pods", "--all", "--grace-period=1")
    return (after_s - seconds) / BATCH


def test_an_observer_that_hangs_or_dies_costs_no_pod_anything(cluster: Cluster, observed: ObservedCluster) -> None:
    taken: defaultdict[str, list[float]] = defaultdict(list)
    _batch_s(cluster, observed)  # what comes first takes longer
    for _ in range(ROUNDS):
        for state, entered in STATES.items():
            if state != "away":
                observed.run()
            with entered(observed):
                taken[state].append(_batch_s(cluster, observed))
            observed.stop()
    print({state: [round(each * 1000) for each in times] for state, times in taken.items()})
    usual_s = max(taken["away"])
    slow = {state: min(times) for state, times in taken.items() if min(times) > usual_s + NOISE_S}
    assert not slow, taken
