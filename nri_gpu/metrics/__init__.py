"""Metrics for Prometheus: what they are is in docs/metrics.md."""
