"""Names of the user's own on a real Kubernetes: they lead to each other, and an upgrade to them is taken."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import CLUSTER_WIDE, NAMESPACE, ROOT, Cluster, wait_for
from tests.support.cluster_claims import CLASS, check_slices, claiming, devices, driver_kubeconfig
from tests.support.errors import HarnessError
from tests.support.helm import CHART, PROGRAMS, Helm, parsed
from tests.support.released import BEFORE_CORDONS, unpacked

pytestmark = pytest.mark.cluster

HELD, ACCOUNT, RELEASE = "held", "claims-driver", ("one", "--namespace", "releases")
CLAIMS: dict[str, Any] = {"kubelet": {"enabled": False}, "dra": {"enabled": True}}
OWN: dict[str, Any] = {
    "nameOverride": "accelerators",
    "fullnameOverride": "gpus",
    "namespaceOverride": HELD,
    "commonLabels": {"team": "ml"},
    "kubelet": {"enabled": False},
    "dra": {"enabled": True, "serviceAccount": {"create": False, "name": ACCOUNT}},
    "rbac": {"create": False},
}


def values(cluster: Cluster, **given: object) -> tuple[str, Path]:
    """Return Helm's option for these values, beside what the chart needs here."""
    return "-f", cluster.file("values.json", json.dumps({**cluster.chart_values(), **given}))


def delete_classes(cluster: Cluster) -> None:
    """Delete what the chart leaves to other releases."""
    cluster.kubectl("delete", "deviceclass", CLASS, f"mig.{CLASS}", "--ignore-not-found")


# --- what somebody else made -----------------------------------------------------------------------------------------


@pytest.fixture
def others(two_nodes: Cluster, tmp_path: Path) -> Iterator[Helm]:
    """Make namespace, account and bindings as an administrator would, who lets Helm make none of them."""
    cluster, helm = two_nodes, Helm("helm4", tmp_path, two_nodes.admin, two_nodes.enter)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": HELD}}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HELD}}
    given = values(cluster, **{**OWN, "rbac": {"create": True}})
    made = parsed(helm("template", *RELEASE, CHART, *given, "--skip-tests"))
    rights = [each for each in made if "Role" in each["kind"]]
    assert len(rights) == 4
    cluster.import_image()
    cluster.apply(namespace, account, *rights)
    yield helm
    cluster.kubectl("delete", "pods,resourceclaims,resourceclaimtemplates", "--all")  # while the driver runs
    helm("uninstall", *RELEASE, "--ignore-not-found")
    for right in rights:
        where = right["metadata"].get("namespace", "default")
        cluster.kubectl("delete", right["kind"], right["metadata"]["name"], "-n", where)
    cluster.kubectl("delete", "namespace", HELD, RELEASE[-1], "--ignore-not-found")
    delete_classes(cluster)


def test_the_token_of_one_node_is_refused_a_slice_of_another(two_nodes: Cluster, others: Helm) -> None:
    cluster = two_nodes
    others("install", *RELEASE, CHART, *values(cluster, **OWN), "--create-namespace")
    cluster.kubectl("patch", "daemonset", "gpus-dra", "-n", HELD, "-p", json.dumps(cluster.reach))
    described = lambda: cluster.kubectl("describe", "pods", "-n", HELD)[-6000:]  # noqa: E731
    wait_for("slices of both nodes", lambda: set(slices(cluster)) == set(cluster.nodes), 90, described)
    cluster.apply(*claiming("train", devices(count=2)))
    cluster.wait_phase("train")

    first, second = cluster.each()
    kubeconfig = driver_kubeconfig(first, ACCOUNT, HELD)
    theirs = json.dumps(cluster.get("resourceslice", slices(cluster)[second.node]))
    for verb in ("replace", "delete"):
        with pytest.raises(HarnessError, match="the driver on node node1 may write ResourceSlices of that node only"):
            first.kubectl("--kubeconfig", str(kubeconfig), verb, "-f", "-", given=theirs)
    check_slices(first, kubeconfig, second.node)

    # Our own kubectl plugin finds the pods by what no name of the user's changes.
    path = os.pathsep.join((cluster.environment["KUBE_BIN"], os.environ["PATH"]))
    plugin = (sys.executable, "-I", str(ROOT / "share/kubectl/kubectl-nri_gpu"), "status", f"--daemon-namespace={HELD}")
    said = cluster.enter("env", f"PATH={path}", f"KUBECONFIG={cluster.admin}", *plugin)
    assert all(node in said.stdout for node in cluster.nodes), said


def slices(cluster: Cluster) -> dict[str, str]:
    """Return the name of our slice of each node."""
    found = (each for each in cluster.get("resourceslices") if each["spec"]["driver"] == CLASS)
    return {each["spec"]["nodeName"]: each["metadata"]["name"] for each in found}


# --- upgrades --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=PROGRAMS)
def helm(request: pytest.FixtureRequest, two_nodes: Cluster, tmp_path: Path) -> Iterator[Helm]:
    yield Helm(request.param, tmp_path, two_nodes.admin, two_nodes.enter)
    delete_classes(two_nodes)


def installed(cluster: Cluster) -> dict[tuple[str, str], tuple[str, Any]]:
    """Return UID and selector of each object that the release has."""
    kinds = f"daemonsets,configmaps,serviceaccounts,roles,rolebindings,{CLUSTER_WIDE}"
    found = cluster.get(kinds, "", "--all-namespaces", "-l", "app.kubernetes.io/instance=one")
    return {
        (each["kind"], each["metadata"]["name"]): (each["metadata"]["uid"], each.get("spec", {}).get("selector"))
        for each in found
    }


def test_an_upgrade_replaces_no_object_and_takes_a_name_of_ones_own(two_nodes: Cluster, helm: Helm) -> None:
    cluster, release = two_nodes, ("one", "--namespace", NAMESPACE)
    nowhere = CLAIMS | {"nodeSelector": {"nobody": "here"}}  # this is about objects, and pods take time
    helm(
        "install",
        *release,
        unpacked(BEFORE_CORDONS) / CHART.relative_to(ROOT),
        *values(cluster, **nowhere),
        "--create-namespace",
    )
    before = installed(cluster)
    assert {kind for kind, _ in before} >= {"DaemonSet", "ClusterRole", "ValidatingAdmissionPolicy", "DeviceClass"}
    helm("upgrade", *release, CHART, *values(cluster, **nowhere))
    upgraded = installed(cluster)
    assert before.items() <= upgraded.items()
    assert {kind for kind, _ in upgraded.keys() - before.keys()} == {"Role", "RoleBinding"}  # of events

    given = {"nameOverride": "accelerators", "commonLabels": {"team": "ml"}}
    helm("upgrade", *release, CHART, *values(cluster, **nowhere, **given))
    assert installed(cluster) == upgraded
    for each in cluster.get("daemonsets", "", "-n", NAMESPACE):
        labels = each["metadata"]["labels"]
        assert (labels["app.kubernetes.io/name"], labels["team"]) == ("accelerators", "ml")
    helm("uninstall", *release)
    assert {kind for kind, _ in installed(cluster)} == {"DeviceClass"}
