"""What `check` says of metrics."""

from __future__ import annotations

from collections.abc import Iterator

from nri_gpu.policy.metrics_settings import MetricsSettings


def metrics_advice(settings: MetricsSettings) -> Iterator[str]:
    """What to change about them, a sentence each."""
    if settings.public:
        yield (
            f"metrics.public = true: whoever reaches {settings.listen or 'metrics.listen'} can read the names of all "
            "pods that have GPUs"
        )
