"""Two kinds of nodes: two releases of the chart in one namespace, each with a policy of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.support.cluster import NAMESPACE, ROOT, Cluster, Object, pod, wait_for
from tests.support.cluster_claims import CLASS, claiming
from tests.support.errors import HarnessError
from tests.support.helm import CHART, Helm

pytestmark = pytest.mark.cluster

LABEL: Final = "gpu.example.com/allocates"
BESIDE: Final = "nri-gpu-beside"
# More of each policy: no annotation gets a GPU on the first kind, and one of 0 to 2 on the second.
ALLOCATED: Final = """
[kubelet]
pool = "counted"

[dra]
pool = "claims"

[[pool]]
name = "counted"
device = ["0", "1"]

[[pool]]
name = "claims"
model = ["*"]
"""
CLAIMED: Final = """
[dra]
pool = "claims"

[[pool]]
name = "claims"
device = ["3"]
"""
# Values of docs/migrate.md, "Node by node": the file's name -> its text.
SHOWN: Final = dict(
    re.findall(r"```yaml\n# (\w+\.yaml):.*?\n(.*?)```", (ROOT / "docs" / "migrate.md").read_text(), re.S)
)


def values(cluster: Cluster, shown: str, policy: str, **dra: object) -> Object:
    """What docs/migrate.md shows, with claims and more of a policy. dra: more values of that name."""
    found: Object = yaml.safe_load(SHOWN[shown])
    whole = f"{found.get('policy', '')}\n{policy}"
    return {**cluster.chart_values(), **found, "policy": whole, "dra": {"enabled": True, **dra}}


class InsideHelm:
    """Helm 4 where the API server of several nodes answers."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._helm = Helm("helm4", folder, cluster.admin)

    def install(self, release: str, given: Object) -> str:
        """What the release's NOTES say. Raises: HarnessError."""
        file = self._folder / f"{release}.json"
        file.write_text(json.dumps(given))
        own = (f"{name}={self._helm.environment[name]}" for name in self._helm.environment if name.startswith("HELM_"))
        command = ("env", f"KUBECONFIG={self._cluster.admin}", *own, str(self._helm.path), "install", release)
        done = self._cluster.enter(*command, str(CHART), "-f", str(file), "-n", NAMESPACE, "--create-namespace")
        if done.returncode:
            raise HarnessError(done.stderr)
        return " ".join(done.stdout.partition("NOTES:")[2].split())


def wait_ready(cluster: Cluster) -> None:
    def ready() -> bool:
        found = [each["status"] for each in cluster.get("daemonsets", "", "-n", NAMESPACE)]
        return all(each.get("numberReady") == each.get("updatedNumberScheduled") == 1 for each in found)

    wait_for("a pod of each DaemonSet", ready, 120, lambda: cluster.kubectl("describe", "pods", "-n", NAMESPACE))


def on_kind(made: Object, kind: str) -> Object:
    """The pod, on nodes of that label."""
    made["spec"]["nodeSelector"] = {LABEL: kind}
    return made


def only(minors: frozenset[int]) -> int:
    (minor,) = minors
    return minor


def visible(cluster: Cluster, name: str) -> str:
    return cluster.kubectl("exec", name, "--", "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES").strip()


def test_two_releases_in_one_namespace(two_nodes: Cluster, tmp_path: Path) -> None:
    """Each node obeys the policy of its release; one release has what the cluster has once, and each says so."""
    first, second = two_nodes.each()
    two_nodes.import_image()
    for node, kind in ((first, "nri-gpu"), (second, "nvidia")):
        two_nodes.kubectl("label", "node", node.node, f"{LABEL}={kind}")
    helm = InsideHelm(two_nodes, tmp_path)

    said = helm.install("nri-gpu", values(two_nodes, "kubelet.yaml", ALLOCATED))
    assert "It has the admission policy" in said
    assert f"It has the DeviceClasses {CLASS} and mig.{CLASS}" in said
    with pytest.raises(HarnessError, match=f'DeviceClass "{CLASS}".*exists and cannot be imported'):
        helm.install(BESIDE, values(two_nodes, "beside.yaml", CLAIMED))
    said = helm.install(BESIDE, values(two_nodes, "beside.yaml", CLAIMED, deviceClasses=False))
    assert "It has no admission policy" in said
    assert "It has no DeviceClasses" in said
    for release in ("nri-gpu", BESIDE):
        two_nodes.kubectl("patch", "daemonset", f"{release}-dra", "-n", NAMESPACE, "-p", json.dumps(two_nodes.reach))
    wait_ready(two_nodes)

    # By its limits a pod has a GPU where the kubelet allocates, by its annotation where it does not.
    first.wait_allocatable(2)
    second.wait_allocatable(0)
    asks = {"gpu.nri.io": "1"}
    allocated = two_nodes.apply(
        on_kind(pod("counted", 1), "nri-gpu"), on_kind(pod("refused", annotations=asks), "nri-gpu")
    )
    assert "has none in its resources.limits" in allocated
    assert "Warning" not in two_nodes.apply(on_kind(pod("annotated", annotations=asks), "nvidia"))
    two_nodes.wait_running("counted", "annotated")
    two_nodes.wait_said("refused", 'in pool "counted", "claims", kept for others')
    assert only(first.minors("counted")) in {0, 1}
    assert only(second.minors("annotated")) in {0, 1, 2}
    assert visible(two_nodes, "counted").startswith("GPU-")
    assert visible(two_nodes, "annotated") == "void"

    # One release's classes serve the nodes of both, each with the GPUs of its own policy.
    for node, kind, pool in ((first, "nri-gpu", {2, 3}), (second, "nvidia", {3})):
        template, claims = claiming(f"claims-{kind}")
        two_nodes.apply(template, on_kind(claims, kind))
        two_nodes.wait_running(f"claims-{kind}")
        assert only(node.minors(f"claims-{kind}")) in pool
    two_nodes.kubectl("delete", "pods,resourceclaimtemplates", "--all", "--timeout=60s")
