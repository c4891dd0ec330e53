"""A release of three nodes, upgraded and rolled back node by node beneath queued Jobs: two versions of ours at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.test_upgrade import assert_few_lost, wait_jobs
from tests.support.cluster import IMAGE, NAMESPACE, ROOT, TAG, Cluster, Object, jobs, wait_for
from tests.support.helm import CHART, Helm
from tests.support.released import BEFORE_CORDONS, unpacked

pytestmark = pytest.mark.cluster

RELEASE = ("nri-gpu", "--namespace", NAMESPACE)
GPUS = 3 * 4
QUEUED, LASTS_S = 3 * GPUS, 6  # Jobs of each direction


def tagged(tag: str) -> tuple[str, str]:
    """Values by which the chart takes that image."""
    return "--set-string", f"image.tag={tag}"


def images(cluster: Cluster) -> set[str]:
    """Of the daemons' pods that are ready."""
    label = "app.kubernetes.io/component=daemon"
    pods = cluster.get("pods", "", "-n", NAMESPACE, "-l", label)
    return {each["spec"]["containers"][0]["image"] for each in pods if is_ready(each)}


def is_ready(pod: Object) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


def rolled_out(cluster: Cluster, tag: str, *, mixed: bool) -> None:
    """Until all daemons are of that image. mixed: once two versions were ready at the same time."""
    seen: list[set[str]] = []

    def over() -> bool:
        seen.append(images(cluster))
        status = cluster.get("daemonset", "nri-gpu", "-n", NAMESPACE)["status"]
        return seen[-1] == {f"{IMAGE}:{tag}"} and status.get("updatedNumberScheduled") == status["numberAvailable"] == 3

    wait_for(f"the rollout of {tag}", over, 180, lambda: f"{seen}\n{cluster.kubectl('get', 'pods', '-A')}")
    assert not mixed or any(len(each) == 2 for each in seen), seen


def test_no_job_is_lost_in_either_direction(
    three_nodes: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, helm = three_nodes, Helm("helm4", tmp_path, three_nodes.admin, three_nodes.enter)
    cluster.import_image(BEFORE_CORDONS)
    given = tmp_path / "values.json"
    given.write_text(json.dumps(cluster.chart_values()))
    earlier = unpacked(BEFORE_CORDONS) / CHART.relative_to(ROOT)
    helm("install", *RELEASE, earlier, "-f", given, *tagged(BEFORE_CORDONS), "--create-namespace")
    rolled_out(cluster, BEFORE_CORDONS, mixed=False)
    for node in cluster.each():
        node.wait_allocatable(4)
    changes = {
        TAG: ("upgrade", *RELEASE, CHART, "-f", given, *tagged(TAG)),
        BEFORE_CORDONS: ("rollback", *RELEASE),
    }
    failed = []
    for number, (tag, change) in enumerate(changes.items(), 1):
        cluster.apply(*jobs([f"to-{tag}-{each}" for each in range(QUEUED)], f"sleep {LASTS_S}"))
        wait_jobs(cluster, (number - 1) * QUEUED + 1)
        helm(*change)
        rolled_out(cluster, tag, mixed=True)
        wait_jobs(cluster, number * QUEUED, 180)
        failed.append(sum(pod["status"]["phase"] == "Failed" for pod in cluster.get("pods")))
        assert_few_lost(cluster, number * GPUS)
    with capsys.disabled():
        print(f"\n{QUEUED} Jobs to {TAG} and {QUEUED} back; pods that failed so far: {failed}")
    helm("uninstall", *RELEASE)
