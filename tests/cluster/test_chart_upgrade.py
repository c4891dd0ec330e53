"""From the chart of an older version to today's and back, by Helm's programs, beneath pods that have GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from tests.support.cluster import CLUSTER_WIDE, NAMESPACE, Cluster, Object, pod
from tests.support.cluster_claims import POOLS
from tests.support.helm import CHART, Helm
from tests.support.released import BEFORE_CORDONS, unpacked

pytestmark = pytest.mark.cluster

RELEASE: Final = ("nri-gpu", "--namespace", NAMESPACE)
WAIT: Final = ("--wait", "--timeout=2m")
GIVEN: Final[Object] = {
    "policy": POOLS,
    "dra": {"enabled": True},
    # Defaults that are taken away, which Helm keeps as null when it reuses values.
    "nodeSelector": {"kubernetes.io/os": None},
    "resources": {"limits": {"memory": None}},
}


def ours(cluster: Cluster) -> list[Object]:
    """All that a release has."""
    kinds = f"daemonsets,configmaps,serviceaccounts,secrets,services,roles,rolebindings,jobs,{CLUSTER_WIDE}"
    found = cluster.get(kinds, "", "--all-namespaces")
    return [each for each in found if each["metadata"]["name"].startswith(("nri-gpu", "gpu.nri.io", "mig.", "sh.helm"))]


def identities(cluster: Cluster) -> dict[str, str]:
    """Of the DaemonSets: name -> uid, which a new one of the same name would not have."""
    found = cluster.get("daemonsets", "", "-n", NAMESPACE)
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}


@pytest.mark.parametrize(
    ("program", "ways"),
    [("helm3", ("--reuse-values", "--reset-then-reuse-values")), ("helm4", ("--values", "--reuse-values"))],
)
def test_from_an_older_chart_and_back(
    cluster: Cluster, image: None, tmp_path: Path, program: str, ways: tuple[str, str]
) -> None:
    """With today's image in both. The values are given again, or Helm keeps them, with or without the old defaults."""
    helm = Helm(program, tmp_path, cluster.admin)
    old = unpacked(BEFORE_CORDONS) / CHART.relative_to(CHART.parents[2])
    values = tmp_path / "values.json"
    values.write_text(json.dumps({**cluster.chart_values(), **GIVEN}))

    helm("install", *RELEASE, old, "--values", values, "--create-namespace", *WAIT)
    cluster.wait_allocatable(2)
    cluster.apply(pod("train", 2))
    cluster.wait_phase("train")
    held, before = cluster.minors("train"), identities(cluster)
    assert (len(held), set(before)) == (2, {"nri-gpu", "nri-gpu-guard", "nri-gpu-dra"})

    manifests = []
    for way in ways:
        helm("upgrade", *RELEASE, CHART, way, *([values] if way == "--values" else []), *WAIT)
        manifests.append(helm("get", "manifest", *RELEASE))
        assert (identities(cluster), cluster.minors("train")) == (before, held)
        if way == ways[0]:
            helm("rollback", "nri-gpu", "1", "--namespace", NAMESPACE, *WAIT)
            assert (identities(cluster), cluster.minors("train")) == (before, held)
    assert manifests[0] == manifests[1] != helm("get", "manifest", *RELEASE, "--revision", "1")

    helm("uninstall", *RELEASE, *WAIT)
    assert [each["metadata"]["name"] for each in ours(cluster)] == ["gpu.nri.io", "mig.gpu.nri.io"]
    assert cluster.minors("train") == held
