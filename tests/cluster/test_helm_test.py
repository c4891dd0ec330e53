"""`helm test` by the programs Helm 3 and Helm 4 on a real Kubernetes, with simulated GPUs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.cluster import NAMESPACE, Cluster, Object, pod, wait_for
from tests.support.daemon import UUIDS
from tests.support.helm import CHART, PROGRAMS, Helm
from tests.support.observed_cluster import usual_bundles

pytestmark = pytest.mark.cluster

RELEASE = ("nri-gpu", "--namespace", NAMESPACE)
WAIT = ("--wait", "--timeout=2m")
TEST, ACCOUNT = "nri-gpu-test", "nri-gpu.test"
ANNOTATIONS = ("--set", "kubelet.enabled=false")
CLAIMS = (*ANNOTATIONS, "--set", "dra.enabled=true")


class Installed:
    """A release by one Helm. Each call installs or upgrades it."""

    def __init__(self, cluster: Cluster, helm: Helm, folder: Path) -> None:
        self.cluster = cluster
        self.helm = helm
        self._values = folder / "values.json"
        self._values.write_text(json.dumps(cluster.chart_values()))

    def __call__(self, *options: str) -> None:
        given = (CHART, "-f", self._values)
        self.helm("upgrade", "--install", *RELEASE, *given, *options, "--create-namespace", *WAIT)

    def test(self, *, code: int = 0) -> str:
        """What it says, with the log of its Job; and nothing of it is left."""
        done = subprocess.run(self.command("--timeout=2m"), env=self.helm.environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        self.wait_nothing_left()
        return done.stderr

    def command(self, *options: str) -> list[str]:
        return [str(self.helm.path), "test", *RELEASE, *options]

    def left(self) -> list[str]:
        kinds = "jobs,pods,serviceaccounts,roles,rolebindings,resourceclaims"
        names = [each["metadata"]["name"] for each in self.cluster.get(kinds, "", "-n", NAMESPACE)]
        return [name for name in names if name.startswith((TEST, ACCOUNT))]

    def wait_nothing_left(self) -> None:
        wait_for("nothing of the test", lambda: not self.left(), explain=lambda: str(self.left()))


@pytest.fixture
def reachable(cluster: Cluster) -> Iterator[None]:
    """The API server is in reach of the pods that have a token: no proxy leads to it from a pod's own network."""
    server = urlsplit(cluster.kubectl("config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"))
    place = {"KUBERNETES_SERVICE_HOST": server.hostname, "KUBERNETES_SERVICE_PORT": str(server.port)}
    values = [("hostNetwork", "true")]
    values += [("containers/0/env/-", json.dumps({"name": name, "value": value})) for name, value in place.items()]
    patches = ", ".join(
        f'JSONPatch{{op: "add", path: "/spec/template/spec/{path}", value: {value}}}' for path, value in values
    )
    rules = [
        {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]}
        for group, resource in (("batch", "jobs"), ("apps", "daemonsets"))
    ]
    ours = [{"name": "ours", "expression": f"object.metadata.name in ['{TEST}', 'nri-gpu-dra']"}]
    spec: Object = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {"resourceRules": rules},
        "matchConditions": ours,
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{patches}]"}}],
    }
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": "reach"}}
    cluster.apply(
        {**head, "kind": "MutatingAdmissionPolicy", "spec": spec},
        {**head, "kind": "MutatingAdmissionPolicyBinding", "spec": {"policyName": "reach"}},
    )
    job = pod("none")["spec"] | {"restartPolicy": "Never"}
    job["containers"][0]["env"] = [{"name": "A", "value": "B"}]
    tried = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": TEST}, "spec": {"template": {"spec": job}}}
    wait_for("that policy", lambda: "hostNetwork" in cluster.apply(tried, options=("--dry-run=server", "-o", "yaml")))
    yield
    cluster.kubectl("delete", "mutatingadmissionpolicies,mutatingadmissionpolicybindings", "reach")


@pytest.fixture(params=PROGRAMS)
def installed(
    request: pytest.FixtureRequest, cluster: Cluster, image: None, reachable: None, tmp_path: Path
) -> Installed:
    return Installed(cluster, Helm(request.param, tmp_path, cluster.admin), tmp_path)


@pytest.mark.short
def test_a_pod_asks_as_the_release_lets_pods_ask(installed: Installed) -> None:
    installed()
    assert_granted(installed.test(), "a pod with nvidia.com/gpu: 1 in its limits")
    installed(*CLAIMS)
    assert_granted(installed.test(), "a pod with a ResourceClaim of the DeviceClass gpu.nri.io")
    installed(*ANNOTATIONS)
    assert_granted(installed.test(), "a pod with the annotation gpu.nri.io: 1")
    with usual_bundles(installed.cluster):
        installed("--set", "mode=observe")
        assert "ok: 1 observer ready, on node1" in installed.test()
        installed.helm("uninstall", *RELEASE, "--wait")


def assert_granted(said: str, phrase: str) -> None:
    """Helm 4 puts it between other words of its own log."""
    assert any(f"ok: {phrase} has {uuid} on node node1; no driver is loaded" in said for uuid in UUIDS), said


def test_it_says_why_there_is_no_gpu_and_leaves_nothing(installed: Installed) -> None:
    cluster = installed.cluster
    installed(*ANNOTATIONS, "--set-string", "policy=[namespaces]\nallow = ['ml-*']", "--set", "rbac.create=false")
    said = installed.test(code=1)
    assert "the Role of this test is missing" in said
    assert "create, get and delete on pods, list on events" in said

    installed(*ANNOTATIONS, "--set-string", "policy=[namespaces]\nallow = ['ml-*']")
    assert "the policy does not let the namespace nri-gpu ask" in installed.test(code=1)

    installed()
    cluster.wait_allocatable(4)
    cluster.apply(pod("train", 4))
    cluster.wait_running("train")
    killed_while_it_waits(installed)
    said = installed.test(code=1)
    assert "failed: a pod with nvidia.com/gpu: 1 in its limits: no GPU is free" in said
    assert "1 Insufficient nvidia.com/gpu" in said


def killed_while_it_waits(installed: Installed) -> None:
    """Its Job goes, and with the binding its right to delete the pod: what owns the pod is left to do it."""
    cluster = installed.cluster
    null = subprocess.DEVNULL
    command = installed.command("--timeout=20s")
    with subprocess.Popen(command, env=installed.helm.environment, stdout=null, stderr=null) as running:

        def waits() -> bool:
            return any(_unscheduled(each) for each in cluster.get("pods", "", "-n", NAMESPACE))

        wait_for("a pod that waits", waits, explain=lambda: cluster.kubectl("describe", "pods", "-n", NAMESPACE))
        cluster.kubectl("delete", "rolebinding,job", TEST, "-n", NAMESPACE)
        running.wait(60)  # Helm 3 takes a Job that is gone for one that went well
    installed.wait_nothing_left()


def _unscheduled(found: dict[str, Any]) -> bool:
    return found["metadata"]["name"].startswith(TEST) and any(
        each["type"] == "PodScheduled" and each["status"] == "False" for each in found["status"].get("conditions", ())
    )
