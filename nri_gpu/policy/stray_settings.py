"""Settings of the stray-use audit: how often it looks, and what it leaves alone."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.policy.forms import Globs, about, patterns, text

# NVIDIA's own, where its packages install them.
_DAEMONS: Final = ("/usr/bin/nvidia-persistenced", "/usr/bin/nv-fabricmanager", "/usr/bin/nv-hostengine")

_EXCEPTIONS: Final = patterns(text(r"[!-~]*/[!-~]*", "namespace/pod or a path, or a pattern of these", 512))


class StraySettings(Struct, frozen=True, kw_only=True):
    """Processes that have NVIDIA's device nodes open, held against what was granted (docs/stray.md)."""

    enabled: Annotated[
        bool,
        about(
            "Scan for them. nri-gpu then needs to see every process of the host: the systemd unit its drop-in "
            "stray.conf, the chart stray.enabled."
        ),
    ] = False
    every_s: Annotated[int, Meta(ge=1, le=3600), about("Seconds between two scans.")] = 30
    exceptions: Annotated[
        Globs,
        _EXCEPTIONS,
        about(
            "What may use GPUs without a grant: pods as namespace/pod, programs of the host by path, containers of "
            "other runtimes by cgroup; shell-style patterns."
        ),
    ] = Globs(_DAEMONS)
