"""The chart's rules, dashboard and ServiceMonitor by others' programs: Helm 3 and 4, promtool, Kubernetes' API server.

The custom resources are those of Prometheus' operator, read in the folder of its Go module.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests import ground
from tests.support.errors import HarnessError
from tests.support.helm import CHART, IMAGE, PROGRAMS, Helm, parsed
from tests.support.lone_api_server import LoneApiServer
from tests.support.prometheus import ALERTS, MONITORING, promtool

OPERATOR: Final = "github.com/prometheus-operator/prometheus-operator"
DEFINITIONS: Final = ("prometheusrules", "servicemonitors")
RUNBOOKS: Final = "https://example.com/messages.md"
ALL: Final[dict[str, Any]] = {
    "image": {"repository": IMAGE},
    "metrics": {
        "enabled": True,
        "serviceMonitor": {
            "enabled": True,
            "interval": "1m",
            "scrapeTimeout": "15s",
            "labels": {"release": "monitoring"},
            "relabelings": [{"sourceLabels": ["__meta_kubernetes_namespace"], "targetLabel": "cluster_namespace"}],
            "metricRelabelings": [{"sourceLabels": ["__name__"], "regex": "nri_gpu_xids_total", "action": "drop"}],
        },
    },
    "rules": {"enabled": True, "runbookUrl": RUNBOOKS},
    "dashboards": {"enabled": True},
}


@pytest.fixture(params=PROGRAMS)
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(request.param, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def api_server() -> Iterator[LoneApiServer]:
    """With the operator's definitions, and the release's namespace."""
    folder = ground.module("prometheus-operator", OPERATOR) / "example" / "prometheus-operator-crd"
    with LoneApiServer() as running:
        for name in DEFINITIONS:
            running.kubectl("create", "-f", folder / f"monitoring.coreos.com_{name}.yaml")
            running.kubectl("wait", "--for=condition=Established", f"crd/{name}.monitoring.coreos.com", "--timeout=60s")
        running.kubectl("create", "namespace", "nri-gpu")
        yield running


def rendered(helm: Helm, folder: Path, chart: Path = CHART, **values: object) -> str:
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    options = ("--namespace=nri-gpu", helm.kube_version, f"--values={folder / 'values.yaml'}")
    return helm("template", "nri-gpu", chart, *options)


def spec(text: str) -> Any:  # noqa: ANN401 - parsed YAML
    (found,) = (each["spec"] for each in parsed(text) if each["kind"] == "PrometheusRule")
    return found


def test_promtool_takes_the_rules_with_and_without_runbooks(helm: Helm, tmp_path: Path) -> None:
    count = len(yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"])
    for rules in (ALL["rules"], {"enabled": True}):
        made = spec(rendered(helm, tmp_path, **{**ALL, "rules": rules}))
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(made))
        assert f"{count} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")


def test_what_is_rendered_twice_is_the_same(helm: Helm, tmp_path: Path) -> None:
    assert rendered(helm, tmp_path, **ALL) == rendered(helm, tmp_path, **ALL)


def test_a_parents_chart_brings_alerts_and_dashboard_by_any_name(helm: Helm, tmp_path: Path) -> None:
    """Files are read from the chart's own folder, wherever that lies."""
    parent = tmp_path / "parent"
    shutil.copytree(CHART, parent / "charts" / "nri-gpu")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    needs = [{"name": "nri-gpu", "version": version, "alias": "gpus"}]
    about = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": needs}
    (parent / "Chart.yaml").write_text(yaml.safe_dump(about))
    made = rendered(helm, tmp_path, parent, gpus={**ALL, "rules": {"enabled": True}})
    assert spec(made) == yaml.safe_load(ALERTS.read_text())
    assert (MONITORING / "dashboard.json").read_text() in [
        text for each in parsed(made) if each["kind"] == "ConfigMap" for text in each["data"].values()
    ]
    jobs = [each["metadata"]["labels"]["app.kubernetes.io/name"] for each in parsed(made) if each["kind"] == "Service"]
    assert jobs == ["nri-gpu"]


@pytest.mark.parametrize("mode", ["", "observe"])
def test_kubernetes_takes_all_of_it_by_the_operators_definitions(
    helm: Helm, api_server: LoneApiServer, tmp_path: Path, mode: str
) -> None:
    text = rendered(helm, tmp_path, **ALL, mode=mode)
    said = api_server.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", given=text)
    assert said.count("created (server dry run)") == len([each for each in parsed(text) if each])
    for kind in ("servicemonitor", "prometheusrule"):
        assert f"{kind}.monitoring.coreos.com/nri-gpu created" in said


def test_those_definitions_refuse_what_they_do_not_know(
    api_server: LoneApiServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = rendered(Helm("helm4", tmp_path_factory.mktemp("helm")), tmp_path, **ALL)
    for right, wrong, fault in (
        ("honorLabels:", "honourLabels:", "unknown field"),
        ("scrapeTimeout: 15s", "scrapeTimeout: soon", "scrapeTimeout"),
        ("- alert: NriGpuDown\n", "- alarm: NriGpuDown\n", "unknown field"),
    ):
        assert right in text
        with pytest.raises(HarnessError, match=fault):
            api_server.kubectl(
                "create", "--dry-run=server", "--validate=strict", "-f", "-", given=text.replace(right, wrong)
            )
