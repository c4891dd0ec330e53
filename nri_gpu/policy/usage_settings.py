"""Settings of the samples of what GPUs do."""

from typing import Annotated

from msgspec import Struct

from nri_gpu.policy.forms import about


class UsageSettings(Struct, frozen=True, kw_only=True):
    """Samples of what GPUs do, for `nri-gpu status` and metrics (docs/usage.md)."""

    samples: Annotated[
        bool,
        about(
            "Sample it: with each query of the inventory, and while somebody asks each second, by a process of its own "
            "that holds NVML open meanwhile, for GPUs that are held."
        ),
    ] = True
