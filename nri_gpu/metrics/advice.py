"""What `check` says of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from nri_gpu.metrics.controller import WITHOUT_LIBRARY
from nri_gpu.policy.metrics import MetricsSettings


def metrics_advice(settings: MetricsSettings) -> Iterator[str]:
    """What to change about them, a sentence each."""
    if settings.listen and find_spec("prometheus_client") is None:
        yield f"metrics.listen has no effect: {WITHOUT_LIBRARY}"
    if settings.public:
        yield (
            f"metrics.public = true: whoever reaches {settings.listen or 'metrics.listen'} can read the names of all "
            "pods that have GPUs"
        )
