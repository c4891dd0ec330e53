"""The alert rules by `promtool test rules`: each fires on its fault, none on a healthy node. The dashboard's form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from nri_gpu.daemon.metrics_page import pages
from tests.support.metrics import scraped, view
from tests.support.prometheus import ALERTS, MONITORING, promtool

RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    each["alert"]: each for each in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
}
HOURS: Final = 7  # longer than any range
NODE: Final = 'job="nri-gpu",instance="a"'
BUCKET: Final = "nri_gpu_create_container_seconds_bucket"
# Series of a healthy node, a value a minute: `1x9` is a 1 that stays.
HEALTHY: Final = {
    "up": 1,
    "nri_gpu_connected": 1,
    "nri_gpu_reconnects_total": 2,
    'nri_gpu_requests_failed_total{reason="late"}': 1,
    'nri_gpu_requests_failed_total{reason="bug"}': 0,
    "nri_gpu_ungranted_containers": 0,
    'nri_gpu_stray_uses{kind="ungranted-container"}': 0,
    'nri_gpu_stray_uses{kind="privileged-pod"}': 1,
    "nri_gpu_guard_connected": 1,
    "nri_gpu_inventory_age_seconds": 59,
    "nri_gpu_inventory_stale_after_seconds": 300,
    "nri_gpu_node_ready": 1,
    "nri_gpu_policy_fault": 0,
    "nri_gpu_inventory_fault": 0,
    "nri_gpu_policy_rejected": 0,
    'nri_gpu_child_restarts_total{child="nvml"}': 1,
    'nri_gpu_gpu_available{uuid="GPU-0",index="0"}': 1,
    'nri_gpu_gpu_cordoned{uuid="GPU-0",index="0"}': 0,
    'nri_gpu_gpu_reset_due{uuid="GPU-0",index="0"}': 0,
    'nri_gpu_gpu_suspect{uuid="GPU-0",index="0"}': 0,
    'nri_gpu_gpu_failing_namespaces{uuid="GPU-0",index="0"}': 0,
    "nri_gpu_undescribed_gpus": 0,
    'nri_gpu_health_transitions_total{state="bad"}': 3,
}
FAST: Final = {f'{BUCKET}{{le="{bound}"}}': "0+60x420" for bound in ("0.005", "0.1", "0.5", "+Inf")}
SLOW: Final = {**FAST, f'{BUCKET}{{le="0.1"}}': "0+58x420", f'{BUCKET}{{le="0.005"}}': "0+58x420"}
# Alert -> the series that differ, its value and its further labels.
FAULTS: Final[Mapping[str, tuple[Mapping[str, str], float, Mapping[str, str]]]] = {
    "NriGpuDown": ({"up": "0x420"}, 0, {}),
    "NriGpuNotConnected": ({"nri_gpu_connected": "0x420"}, 0, {}),
    "NriGpuReconnecting": ({"nri_gpu_reconnects_total": "0+1x420"}, 15, {}),
    "NriGpuRequestsLate": ({'nri_gpu_requests_failed_total{reason="late"}': "0+1x420"}, 15, {"reason": "late"}),
    "NriGpuRequestsFailing": ({'nri_gpu_requests_failed_total{reason="bug"}': "0+1x420"}, 15, {}),
    "NriGpuSlow": (SLOW, 0.38, {}),
    "NriGpuContainersWithoutGpus": ({"nri_gpu_ungranted_containers": "2x420"}, 2, {}),
    "NriGpuStrayUse": ({'nri_gpu_stray_uses{kind="ungranted-container"}': "3x420"}, 3, {}),
    "NriGpuGuardNotConnected": ({"nri_gpu_guard_connected": "0x420"}, 0, {}),
    "NriGpuInventoryStale": ({"nri_gpu_inventory_age_seconds": "420x420"}, 420, {}),
    "NriGpuInventoryFault": ({"nri_gpu_inventory_fault": "1x420"}, 1, {}),
    "NriGpuNodeNotReady": ({"nri_gpu_node_ready": "0x420"}, 0, {}),
    "NriGpuPolicyUnusable": ({"nri_gpu_policy_fault": "1x420"}, 1, {}),
    "NriGpuPolicyRejected": ({"nri_gpu_policy_rejected": "1x420"}, 1, {}),
    "NriGpuOverlappingGrants": ({"nri_gpu_overlapping_grants": "1x420"}, 1, {}),
    "NriGpuExternalConflict": ({"nri_gpu_external_conflicts": "1x420"}, 1, {}),
    "NriGpuLostContainers": ({"nri_gpu_lost_containers": "2x420"}, 2, {}),
    "NriGpuChildRestarting": ({'nri_gpu_child_restarts_total{child="nvml"}': "0+1x420"}, 15, {"child": "nvml"}),
    "NriGpuGpuWithheld": (
        {'nri_gpu_gpu_available{uuid="GPU-0",index="0"}': "0x420"},
        0,
        {"uuid": "GPU-0", "index": "0"},
    ),
    "NriGpuGpuNeedsReset": (
        {'nri_gpu_gpu_reset_due{uuid="GPU-0",index="0"}': "1x420"},
        1,
        {"uuid": "GPU-0", "index": "0"},
    ),
    "NriGpuGpuFailsApplications": (
        {'nri_gpu_gpu_failing_namespaces{uuid="GPU-0",index="0"}': "3x420"},
        3,
        {"uuid": "GPU-0", "index": "0"},
    ),
    "NriGpuGpuLost": ({"nri_gpu_undescribed_gpus": "1x420"}, 1, {}),
    "NriGpuFabricNotReady": ({"nri_gpu_fabric_not_ready_gpus": "8x420"}, 8, {}),
    "NriGpuGpuSuspect": (
        {'nri_gpu_gpu_suspect{uuid="GPU-0",index="0"}': "1x420"},
        1,
        {"uuid": "GPU-0", "index": "0"},
    ),
    "NriGpuGpuUnstable": (
        {'nri_gpu_health_transitions_total{state="bad"}': "0x300 4+0x60 8+0x60"},
        8.0,
        {"state": "bad"},
    ),
}


def series(changed: Mapping[str, str]) -> list[dict[str, str]]:
    """All of a node, with these in place of the healthy ones."""
    values = {name: f"{value}x420" for name, value in HEALTHY.items()} | FAST | dict(changed)
    return [{"series": _named(name), "values": text} for name, text in values.items()]


def _named(name: str) -> str:
    bare, _, labels = name.partition("{")
    return f"{bare}{{{NODE}{',' if labels else ''}{labels or '}'}"


def tested(tmp_path: Path, **test: object) -> None:
    """`promtool test rules` with one test on it."""
    file = tmp_path / "test.yaml"
    # What is asked is the state after hours: at each minute the rules would take three times the CPU.
    settings = {"rule_files": [str(ALERTS)], "evaluation_interval": "5m"}
    file.write_text(yaml.safe_dump({**settings, "tests": [{"interval": "1m", "name": "test", **test}]}))
    promtool("test", "rules", file)


def test_the_rules_are_rules_and_each_is_tested() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", ALERTS)
    assert list(RULES) == list(FAULTS)


def test_a_healthy_node_fires_none(tmp_path: Path) -> None:
    none = [{"eval_time": f"{HOURS}h", "alertname": name, "exp_alerts": []} for name in RULES]
    tested(tmp_path, input_series=series({}), alert_rule_test=none)


@pytest.mark.parametrize("name", RULES)
def test_each_alert_fires_on_its_fault_alone(tmp_path: Path, name: str) -> None:
    changed, value, labels = FAULTS[name]
    rule = RULES[name]
    labels = {"instance": "a", "job": "nri-gpu", **labels}
    fires = [
        {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": _filled(rule["annotations"], labels, value)}
    ]
    each = [
        {"eval_time": f"{HOURS}h", "alertname": other, "exp_alerts": fires if other == name else []} for other in RULES
    ]
    tested(tmp_path, input_series=series(changed), alert_rule_test=each)


@pytest.mark.parametrize(
    "given",
    [
        {'up{job="kubernetes-pods",instance="a",app_kubernetes_io_name="nri-gpu"}': "0x10"},
        {
            'up{job="kubernetes-pods",instance="a"}': "1 0x10",
            'nri_gpu_build_info{job="kubernetes-pods",instance="a",version="0.1.0"}': "1 stale",
            'up{job="kubernetes-pods",instance="of others"}': "0x10",
        },
    ],
    ids=["by the pods' label", "by what it served"],
)
def test_a_daemon_that_is_down_is_seen_whatever_the_job_is_called(tmp_path: Path, given: Mapping[str, str]) -> None:
    (labels,) = (name[2:] for name in given if name.startswith("up") and '"a"' in name)
    rule = RULES["NriGpuDown"]["expr"]
    wanted = [{"labels": f"up{labels}", "value": 0}]
    tested(
        tmp_path,
        input_series=[{"series": name, "values": text} for name, text in given.items()],
        promql_expr_test=[{"expr": rule, "eval_time": "9m", "exp_samples": wanted}],
    )
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    (panel,) = (each for each in dashboard["panels"] if each["title"] == "Nodes that cannot grant")
    query = panel["targets"][0]["expr"].replace("$instance", ".*")
    tested(
        tmp_path,
        input_series=[{"series": name, "values": text} for name, text in given.items()],
        promql_expr_test=[{"expr": query, "eval_time": "9m", "exp_samples": [{"labels": "{}", "value": 1}]}],
    )


@pytest.mark.parametrize("name", ["NriGpuReconnecting", "NriGpuChildRestarting", "NriGpuGpuUnstable"])
def test_three_are_not_more_than_three(tmp_path: Path, name: str) -> None:
    """Between two scrapes, where the range is longer than what was seen of it."""
    (changed,) = FAULTS[name][0]
    given = series({changed: "0x410 1 2 3x20"})
    asked = {"expr": RULES[name]["expr"], "eval_time": f"{HOURS}h30s", "exp_samples": []}
    tested(tmp_path, input_series=given, promql_expr_test=[asked])


def _filled(annotations: Mapping[str, str], labels: Mapping[str, str], value: float) -> dict[str, str]:
    shown = {"humanizeDuration": _duration(value), "humanize": f"{value:g}", "": f"{value:g}"}

    def fill(found: re.Match[str]) -> str:
        return labels[found[1]] if found[1] else shown[found[2] or ""]

    pattern = r"\{\{ (?:\$labels\.(\w+)|\$value(?: \| (\w+))?) \}\}"
    return {name: re.sub(pattern, fill, text) for name, text in annotations.items()}


def _duration(value: float) -> str:
    return f"{int(value // 60)}m {int(value % 60)}s" if value >= 60 else f"{value * 1000:g}ms"


def test_which_pod_uses_how_much_of_a_gpu(tmp_path: Path) -> None:
    """The join of docs/metrics.md: of a shared GPU, each holder has its use; the exporter may say it several times."""
    docs = (MONITORING.parents[1] / "docs" / "metrics.md").read_text()
    (query,) = re.findall(r"^nri_gpu_grant_info .*$", docs, re.MULTILINE)
    grant = 'nri_gpu_grant_info{{uuid="GPU-0",pod="{}",namespace="ml",container="main",mode="shared"}}'
    given = [
        *(
            {"series": f'DCGM_FI_DEV_GPU_UTIL{{UUID="GPU-0",gpu="0",pod="{pod}",job="{job}"}}', "values": "87"}
            for pod in ("a", "b")
            for job in ("dcgm", "gpu-operator")
        ),
        *({"series": grant.format(pod), "values": "1"} for pod in ("a", "b")),
    ]
    labels = '{{uuid="GPU-0",pod="{}",namespace="ml",container="main",mode="shared"}}'
    wanted = [{"labels": labels.format(pod), "value": 87} for pod in ("a", "b")]
    tested(tmp_path, input_series=given, promql_expr_test=[{"expr": query, "eval_time": "0", "exp_samples": wanted}])


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    known = {name for name, _ in scraped(b"".join(pages(view())).decode()).samples} | {"nri_gpu_grant_info"}
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    texts += [rule["expr"] for rule in RULES.values()]
    used = {name for text in texts for name in re.findall(r"\bnri_gpu_\w+", text)}
    assert used <= known
    assert (
        not known
        - used
        - {"nri_gpu_build_info", "nri_gpu_grants_left_out"}
        - {
            "nri_gpu_create_container_seconds_count",
            "nri_gpu_create_container_seconds_sum",
        }
    )
