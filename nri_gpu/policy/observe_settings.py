"""Settings of the observer: when it looks, and what it listens for."""

from typing import Annotated

from msgspec import Meta, Struct

from nri_gpu.policy.forms import about


class ObserveSettings(Struct, frozen=True, kw_only=True):
    """The way `nri-gpu observe` looks at a node where another component allocates GPUs (docs/quickstart/observe.md)."""

    xids: Annotated[
        bool,
        about("Listen for XIDs. A process then holds NVML open all the time, which keeps a GPU from being reset."),
    ] = False
    look_s: Annotated[
        int, Meta(ge=60, le=3600), about("Seconds between two looks at the processes that have GPUs open.")
    ] = 300
    kubelet_s: Annotated[
        int,
        Meta(ge=10, le=3600),
        about("Seconds that pass at least between two questions to the kubelet, asked as containers come and go."),
    ] = 10
    unopened_s: Annotated[
        int,
        Meta(ge=60, le=604800),
        about("Seconds after which a GPU that was given and that nobody has opened is a finding."),
    ] = 3600
