"""What `check` says: who can read the metrics."""

from __future__ import annotations

from nri_gpu.daemon.metrics_findings import metrics_advice
from nri_gpu.policy.metrics_settings import MetricsSettings

LOCAL = MetricsSettings(listen="127.0.0.1:9464")


def test_nothing_where_all_is_well() -> None:
    assert list(metrics_advice(LOCAL)) == list(metrics_advice(MetricsSettings())) == []


def test_who_reads_a_public_address() -> None:
    (only,) = metrics_advice(MetricsSettings(listen="0.0.0.0:9464", public=True))
    assert "whoever reaches 0.0.0.0:9464" in only
