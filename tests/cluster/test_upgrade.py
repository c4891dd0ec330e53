"""What the kubelet gave while nobody of ours was there, and an upgrade beneath queued Jobs."""

import pytest

from tests.support.cluster import BUSYBOX, DAEMON, GUARD, Cluster, Object, pod

pytestmark = pytest.mark.cluster

SENTENCE = "nri-gpu-is-not-running-on-this-node"


def allocated_early(name: str) -> Object:
    """A pod that is admitted, and so allocated for, ten seconds before its container is created."""
    made = pod(name, 1)
    made["spec"]["initContainers"] = [{"name": "early", "image": BUSYBOX, "command": ["sh", "-c", "sleep 10"]}]
    return made


@pytest.mark.parametrize("restarts", ["Always", "Never"])
def test_nothing_that_the_kubelet_gave_starts_while_daemon_and_guard_are_away(cluster: Cluster, restarts: str) -> None:
    cluster.run_daemon()
    cluster.run_guard()
    cluster.wait_allocatable(4)
    train = allocated_early("train")
    train["spec"]["restartPolicy"] = restarts
    cluster.apply(train)
    cluster.wait_said("train", "Container started")
    cluster.kill(DAEMON, GUARD)
    cluster.wait_said("train", SENTENCE)
    cluster.start(DAEMON)
    if restarts == "Never":
        cluster.wait_phase("train", "Failed")  # a start that failed was a start
    else:
        cluster.wait_phase("train")
        assert len(cluster.minors("train")) == 1
