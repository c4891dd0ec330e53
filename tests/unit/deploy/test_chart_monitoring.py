"""What the chart installs for Prometheus and Grafana, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import pytest
import yaml

from tests.support.chart import ELSEWHERE
from tests.support.helm import RefusedError, documents, parsed, render
from tests.support.pages import anchors
from tests.support.prometheus import ALERTS, MONITORING
from tools.messages import MANUAL

ON: Final[Mapping[str, Any]] = {
    "metrics": {"enabled": True, "serviceMonitor": {"enabled": True}},
    "rules": {"enabled": True},
    "dashboards": {"enabled": True},
}
METRICS_PAGE: Final = MANUAL.parent / "metrics.md"
KINDS: Final = ("Service", "ServiceMonitor", "PrometheusRule")
# The same with names of one's own.
NAMED: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"nameOverride": "gpus"},
    {"fullnameOverride": "gpus", "commonLabels": {"app.kubernetes.io/part-of": "ml"}},
    {"namespaceOverride": "gpus"},
    {"mode": "observe"},
)


def made(**changed: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - the chart's values
    return documents(ELSEWHERE, **{**ON, **changed})


def only(kind: str, among: list[dict[str, Any]], ends: str = "") -> Any:  # noqa: ANN401 - parsed YAML
    (found,) = (each for each in among if each["kind"] == kind and each["metadata"]["name"].endswith(ends))
    return found


def monitor(**changed: object) -> dict[str, Any]:
    """The ServiceMonitor's only endpoint."""
    found = made(metrics={"enabled": True, "serviceMonitor": {"enabled": True, **changed}})
    (endpoint,) = only("ServiceMonitor", found)["spec"]["endpoints"]
    assert isinstance(endpoint, dict)
    return endpoint


def test_the_rules_are_those_of_the_file() -> None:
    assert only("PrometheusRule", made())["spec"] == yaml.safe_load(ALERTS.read_text())


@pytest.mark.parametrize("given", ["https://example.com/messages.md", "https://example.com/messages.md#"])
def test_each_alert_leads_to_its_heading(given: str) -> None:
    spec = only("PrometheusRule", made(rules={"enabled": True, "runbookUrl": given}))["spec"]
    (group,) = spec["groups"]
    urls = {rule["alert"]: rule["annotations"].pop("runbook_url").split("#") for rule in group["rules"]}
    assert {page for page, _ in urls.values()} == {"https://example.com/messages.md"}
    assert len({anchor for _, anchor in urls.values()}) == len(urls)
    assert {anchor for _, anchor in urls.values()} <= set(anchors(MANUAL))
    assert spec == yaml.safe_load(ALERTS.read_text())  # and nothing else is another


def test_the_dashboard_is_the_file_byte_for_byte() -> None:
    found = only("ConfigMap", made(), "-dashboards")
    assert found["data"] == {"nri-gpu.json": (MONITORING / "dashboard.json").read_text()}
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_by_default_there_is_none_of_it() -> None:
    kinds = {each["kind"] for each in documents(ELSEWHERE, metrics={"enabled": True})}
    assert not kinds & set(KINDS)
    assert monitor().keys() == {"port", "honorLabels", "relabelings"}


def test_how_often_is_scraped_and_what_is_relabelled_after_ours() -> None:
    drop = {"action": "drop", "regex": "go_.*", "sourceLabels": ["__name__"]}
    given = {"interval": "1m30s", "scrapeTimeout": "90s", "relabelings": [{"targetLabel": "a"}]}
    endpoint = monitor(**given, metricRelabelings=[drop])
    assert (endpoint["interval"], endpoint["scrapeTimeout"]) == ("1m30s", "90s")
    assert [each["targetLabel"] for each in endpoint["relabelings"]] == ["instance", "a"]
    assert endpoint["metricRelabelings"] == [drop]


@pytest.mark.parametrize("mode", ["", "observe"])
def test_a_pod_is_scraped_by_one_way_alone(mode: str) -> None:
    for annotated, operator, ways in ((True, False, 1), (True, True, 0), (False, False, 0)):
        metrics = {"enabled": True, "annotations": annotated, "serviceMonitor": {"enabled": operator}}
        text = "".join(render(ELSEWHERE, mode=mode, metrics=metrics).values())
        assert text.count('prometheus.io/scrape: "true"') == ways


def test_the_operator_selects_by_labels_of_ones_own() -> None:
    labels = {"release": "monitoring", "team": "prometheus", "app.kubernetes.io/name": "theirs"}
    given = {"enabled": True, "serviceMonitor": {"enabled": True, "labels": labels}}
    values = {**ON, "metrics": given, "commonLabels": {"team": "gpu", "grafana_dashboard": "0"}}
    texts = render(ELSEWHERE, **values)
    for each in (
        only("ServiceMonitor", parsed(texts["metrics.yaml"])),
        only("PrometheusRule", parsed(texts["rules.yaml"])),
    ):
        assert each["metadata"]["labels"].items() >= labels.items()
    assert only("Service", parsed(texts["metrics.yaml"]))["metadata"]["labels"]["team"] == "gpu"
    assert texts["rules.yaml"].partition("spec:")[0].count("team:") == 1  # a key that comes twice is refused
    (board,) = parsed(texts["dashboards.yaml"])
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize("named", NAMED, ids=str)
def test_the_alerts_know_the_job_whatever_the_names(named: dict[str, Any]) -> None:
    found = made(**named)
    service, operators = only("Service", found), only("ServiceMonitor", found)
    labels = service["metadata"]["labels"]
    assert operators["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert len({each["metadata"]["namespace"] for each in (service, operators, only("PrometheusRule", found))}) == 1
    down = only("PrometheusRule", found)["spec"]["groups"][0]["rules"][0]
    job, label = re.findall(r'up\{(?:job=~"(.*?)"|app_kubernetes_io_name="(.*?)")\}', down["expr"])
    assert re.fullmatch(job[0], labels[operators["spec"]["jobLabel"]])
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in found if each["kind"] == "DaemonSet"]
    selected = [each for each in pods if service["spec"]["selector"].items() <= each.items()]
    assert [each["app.kubernetes.io/component"] for each in selected] == [named.get("mode") or "daemon"]
    assert selected[0]["app.kubernetes.io/name"] == label[1]


def test_the_values_that_the_page_shows_install_all_three() -> None:
    text = re.findall(r"```yaml\n(metrics:.*?)```", METRICS_PAGE.read_text(), flags=re.DOTALL)
    assert set(KINDS) <= {each["kind"] for each in documents(ELSEWHERE, **yaml.safe_load(text[0]))}


@pytest.mark.parametrize("value", ["metrics.serviceMonitor", "rules", "dashboards"])
def test_what_needs_metrics_is_refused_without_them(value: str) -> None:
    given: dict[str, Any] = {"enabled": True}
    for key in reversed(value.split(".")):
        given = {key: given}
    with pytest.raises(
        RefusedError, match=rf"{value}\.enabled is true.*: set metrics\.enabled=true, or {value}\.enabled"
    ):
        render(**given)


@pytest.mark.parametrize(
    ("interval", "timeout"), [("10s", "11s"), ("1m", "1m1ms"), ("1m30s", "1h"), ("08s", "9s"), ("0s", "1ms")]
)
def test_a_timeout_longer_than_the_interval_is_refused(interval: str, timeout: str) -> None:
    """Prometheus' operator would leave such a ServiceMonitor out, and say so in its own log alone."""
    with pytest.raises(RefusedError, match=rf"scrapeTimeout is {timeout}, longer than .*interval, {interval}: "):
        monitor(interval=interval, scrapeTimeout=timeout)


@pytest.mark.parametrize("wrong", ["30", "30s1m", "1.5m", "-1s", "1d "])
def test_a_duration_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(RefusedError, match="values don't meet the specifications of the schema"):
        monitor(interval=wrong)


@pytest.mark.parametrize("wrong", ["docs/messages.md", "https://a b", "https://a/{{ $value }}", "https://a\n"])
def test_a_runbook_is_an_address_and_no_template_of_prometheus(wrong: str) -> None:
    with pytest.raises(RefusedError, match="/rules/runbookUrl"):
        made(rules={"enabled": True, "runbookUrl": wrong})
