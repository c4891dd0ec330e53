"""The chart's life by the programs Helm 3 and Helm 4 on a real Kubernetes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import CLUSTER_WIDE, NAMESPACE, Cluster, pod
from tests.support.errors import HarnessError
from tests.support.helm import CHART, PROGRAMS, Helm

pytestmark = pytest.mark.cluster

RELEASE = ("nri-gpu", "--namespace", NAMESPACE)
Values = tuple[Path, str, Path]
WAIT = ("--wait", "--timeout=2m")


@pytest.fixture(params=PROGRAMS)
def helm(request: pytest.FixtureRequest, cluster: Cluster, image: None, tmp_path: Path) -> Helm:
    return Helm(request.param, tmp_path, cluster.admin)


@pytest.fixture
def values(cluster: Cluster, tmp_path: Path) -> Values:
    """The chart, and what it needs here."""
    given = tmp_path / "values.json"
    given.write_text(json.dumps(cluster.chart_values()))
    return CHART, "-f", given


def arguments(cluster: Cluster) -> list[str]:
    """Of the daemon's pod that is there now, and ready."""
    (found,) = (
        each
        for each in cluster.get("pods", "", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=daemon")
        if "deletionTimestamp" not in each["metadata"]
    )
    assert found["status"]["containerStatuses"][0]["ready"]
    args: list[str] = found["spec"]["containers"][0]["args"]
    return args


@pytest.mark.short
def test_install_upgrade_rollback_uninstall(cluster: Cluster, helm: Helm, values: Values) -> None:
    helm("install", *RELEASE, *values, "--dry-run=client")
    assert not cluster.get("daemonsets", "", "-n", NAMESPACE)

    helm("install", *RELEASE, *values, "--create-namespace", *WAIT)
    cluster.wait_allocatable(4)
    cluster.apply(pod("train", 2))
    cluster.wait_phase("train")
    held = cluster.minors("train")
    assert len(held) == 2

    helm("upgrade", *RELEASE, *values, "--set", "logLevel=DEBUG", *WAIT)
    assert "--log-level=DEBUG" in arguments(cluster)
    helm("rollback", *RELEASE, *WAIT)
    assert "--log-level=INFO" in arguments(cluster)
    history = json.loads(helm("history", *RELEASE, "-o", "json"))
    assert [each["status"] for each in history] == ["superseded", "superseded", "deployed"]
    assert cluster.minors("train") == held

    good, wrong = (("--set-string", f"policy=[namespaces]\nallow = {value}") for value in ("['*']", "nobody"))
    helm("upgrade", *RELEASE, *values, *good, *WAIT)
    named = ("--set-string", 'policy=[plugin]\nname = "caf"', "--set", "requirePlugin.enabled=true")
    for options, words in (
        (wrong, "not TOML"),
        ((*good, "--set", "dra.enabled=true"), "--dra, --kubelet: "),
        (named, 'policy.toml:2: plugin.name: must be "nri-gpu", the name that pods require, not "caf"'),
    ):
        with pytest.raises(HarnessError) as refused:
            helm("upgrade", *RELEASE, *values, *options, *WAIT)
        assert "nri-gpu-check-policy" in str(refused.value)
        assert words in cluster.kubectl("logs", "job/nri-gpu-check-policy", "-n", NAMESPACE)
    assert "--no-dra" in arguments(cluster)
    assert "nobody" not in cluster.get("configmap", "nri-gpu-policy", "-n", NAMESPACE)["data"]["policy.toml"]
    helm("upgrade", *RELEASE, *values, *good, *WAIT)
    assert not cluster.get("jobs", "", "-n", NAMESPACE)

    helm("uninstall", *RELEASE, *WAIT)
    assert not [each for each in everything(cluster) if each["metadata"]["name"].startswith("nri-gpu")]
    assert cluster.minors("train") == held


def everything(cluster: Cluster) -> list[dict[str, Any]]:
    """All objects of kinds that the chart has."""
    kinds = f"daemonsets,configmaps,serviceaccounts,secrets,services,roles,rolebindings,{CLUSTER_WIDE}"
    found: list[dict[str, Any]] = cluster.get(kinds, "", "--all-namespaces")
    return found


def test_the_device_classes_stay_for_others_and_are_taken_up_again(
    cluster: Cluster, helm: Helm, values: Values
) -> None:
    for _ in range(2):
        options = ("--set", "kubelet.enabled=false,dra.enabled=true", "--create-namespace")
        helm("install", *RELEASE, *values, *options)
        helm("uninstall", *RELEASE)
        left = [each for each in everything(cluster) if "nri-gpu" in str(each["metadata"].get("labels"))]
        assert [each["metadata"]["name"] for each in left] == ["gpu.nri.io", "mig.gpu.nri.io"]
