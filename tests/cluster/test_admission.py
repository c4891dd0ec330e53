"""What the chart's ValidatingAdmissionPolicy says at `kubectl apply`, from a real API server."""

from typing import Any

import pytest

from tests.support.cluster import Cluster, jobs, pod, wait_for
from tests.support.errors import HarnessError
from tests.support.helm import documents

pytestmark = pytest.mark.cluster

DRY = ("--dry-run=server",)
NO_LIMITS = "container main asks for GPUs by annotation and has none in its resources.limits"


def placed(made: dict[str, Any], system: str) -> dict[str, Any]:
    """The pod on nodes of that operating system, a label by which the chart chooses its own."""
    made["spec"]["nodeSelector"] = {"kubernetes.io/os": system}
    return made


def beside(made: dict[str, Any]) -> dict[str, Any]:
    """The pod with a container that somebody injected."""
    made["spec"]["containers"].append({"name": "proxy", "image": "proxy"})
    return made


SAID: dict[str, tuple[dict[str, Any], str]] = {
    "nothing of ours": (pod("a", 1), ""),
    "shaped": (pod("a", 1, annotations={"gpu.nri.io": "capabilities=compute"}), ""),
    "of the container": (pod("a", 1, annotations={"gpu.nri.io/container.main": "all;mode=exclusive"}), ""),
    "a MIG device": (pod("a", 1, "nvidia.com/mig-1g.10gb", {"gpu.nri.io/pod": "all"}), ""),
    "none": (pod("a", annotations={"gpu.nri.io": "none"}), ""),
    "by MPS": (pod("a", annotations={"gpu.nri.io": "1; mode = mps; sharing=threads:50"}), ""),
    "on another release's nodes": (placed(pod("a", annotations={"gpu.nri.io": "slip"}), "other"), ""),
    "on nodes of this one": (placed(pod("a", annotations={"gpu.nri.io": "1"}), "linux"), NO_LIMITS),
    "beside what the kubelet allocates": (beside(pod("a", 1, annotations={"gpu.nri.io/pod": "mode=exclusive"})), ""),
    "that asks for itself": (
        beside(pod("a", 1, annotations={"gpu.nri.io/container.proxy": "1"})),
        NO_LIMITS.replace("main", "proxy"),
    ),
    "beside nothing": (beside(pod("a", annotations={"gpu.nri.io/pod": "1"})), NO_LIMITS),
    "annotation alone": (pod("a", annotations={"gpu.nri.io": "1"}), NO_LIMITS),
    "an unknown key": (pod("a", 1, annotations={"gpu.nri.io/pods": "1"}), "gpu.nri.io/pods means nothing"),
    "no such container": (pod("a", 1, annotations={"gpu.nri.io/container.x": "1"}), "container.x means nothing"),
    "a slip": (
        pod("a", 1, annotations={"gpu.nri.io": "all;mode=share"}),
        "the value of annotation gpu.nri.io is not valid on any node",
    ),
    "too long": (
        pod("a", 1, annotations={"gpu.nri.io": "1;" * 3000}),
        "the value of annotation gpu.nri.io is not valid on any node",
    ),
}


def install(cluster: Cluster, **admission: Any) -> None:  # noqa: ANN401 - the chart's values
    found = documents(admission=admission)
    cluster.apply(*(each for each in found if each["kind"].startswith("Validating")))
    (policy,) = (each for each in found if each["kind"] == "ValidatingAdmissionPolicy")

    def taken_up() -> bool:
        try:
            return NO_LIMITS in cluster.apply(SAID["annotation alone"][0], options=DRY)
        except HarnessError as error:
            return NO_LIMITS in str(error)

    wait_for("the policy", taken_up)
    checked = cluster.get("validatingadmissionpolicy", policy["metadata"]["name"])["status"].get("typeChecking", {})
    assert not checked.get("expressionWarnings")


@pytest.mark.short
def test_warned(cluster: Cluster) -> None:
    install(cluster)
    for name, (made, sentence) in SAID.items():
        said = cluster.apply(made, options=DRY)
        assert ("Warning" in said) == bool(sentence), (name, said)
        assert sentence in said, (name, said)
    (job,) = jobs(["train"], "true")
    assert "Warning" not in cluster.apply(job, options=DRY)
    template = job["spec"]["template"]
    template["metadata"] = {"annotations": {"gpu.nri.io": "1"}}
    del template["spec"]["containers"][0]["resources"]
    cron = {"schedule": "@daily", "jobTemplate": {"spec": job["spec"]}}
    labels = {"app": "a"}
    served = {
        "metadata": {"labels": labels, **template["metadata"]},
        "spec": {"containers": template["spec"]["containers"]},
    }
    deployment = {"selector": {"matchLabels": labels}, "template": served}
    for kind, api, spec in (
        ("Job", "batch/v1", job["spec"]),
        ("CronJob", "batch/v1", cron),
        ("Deployment", "apps/v1", deployment),
    ):
        made = {"apiVersion": api, "kind": kind, "metadata": {"name": "a"}, "spec": spec}
        assert NO_LIMITS in cluster.apply(made, options=DRY), kind


def test_denied(cluster: Cluster) -> None:
    install(cluster, action="Deny", namespaceSelector={"matchLabels": {"kubernetes.io/metadata.name": "default"}})
    for name, (made, sentence) in SAID.items():
        if not sentence:
            cluster.apply(made, options=DRY)
            continue
        with pytest.raises(HarnessError) as refused:
            cluster.apply(made, options=DRY)
        assert sentence in str(refused.value), name
    cluster.apply(SAID["annotation alone"][0], options=(*DRY, "-n", "kube-public"))
