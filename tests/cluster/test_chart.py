"""The chart's manifests with an image of this checkout, as `kubectl apply` puts them on a cluster."""

import json

import pytest

from tests.support.cluster import NAMESPACE, Cluster, pod

pytestmark = pytest.mark.cluster


def check(cluster: Cluster) -> list[str]:
    """What `nri-gpu check` advises in the daemon's pod, as docs/kubernetes-install.md has it run."""
    command = ("nri-gpu", "check", "/etc/nri-gpu/policy.toml", "-o", "json")
    advice: list[str] = json.loads(cluster.kubectl("exec", "-n", NAMESPACE, "daemonset/nri-gpu", "--", *command))[
        "advice"
    ]
    return advice


@pytest.mark.short
def test_its_defaults(cluster: Cluster, image: None) -> None:
    cluster.install()
    cluster.wait_allocatable(4)
    cluster.apply(pod("train", 2))
    cluster.wait_phase("train")
    assert len(cluster.minors("train")) == 2
    # What a file by itself says: that everybody may ask for what is in no pool, which on this node is nothing; and that
    # others can read the metrics.
    assert {sentence.partition(":")[0] for sentence in check(cluster)} == {
        "every namespace may ask",
        "metrics.public = true",
    }


@pytest.mark.parametrize("registration", ["register", "watcher"])
def test_a_kubelet_whose_root_is_elsewhere(cluster: Cluster, image: None, registration: str) -> None:
    """Its `device-plugins` is where it always is; `pod-resources` and `plugins_registry` went with the root."""
    root = str(cluster.root / "elsewhere")
    cluster.stop("kubelet")
    cluster.start("kubelet", {"KUBELET_ROOT": root})
    try:
        cluster.install(kubelet={"root": root, "registration": registration})
        cluster.wait_allocatable(4)
        cluster.apply(pod("train", 4))
        cluster.wait_phase("train")
        assert len(cluster.minors("train")) == 4
        said = check(cluster)
        assert not [sentence for sentence in said if "kubelet" in sentence], said
    finally:
        cluster.stop("kubelet")
        cluster.start("kubelet")
