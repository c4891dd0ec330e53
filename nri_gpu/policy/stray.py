"""Settings of the stray-use audit: how often it looks, what it does about what it finds, and what it leaves alone."""

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.policy.forms import NAMESPACES, NOTHING, Globs, about, patterns, text

# NVIDIA's own, where its packages install them.
_DAEMONS: Final = ("/usr/bin/nvidia-persistenced", "/usr/bin/nv-fabricmanager", "/usr/bin/nv-hostengine")

_EXCEPTIONS: Final = patterns(text(r"[!-~]*/[!-~]*", "namespace/pod or a path, or a pattern of these", 512))


class OnStray(StrEnum):
    """What happens to a container that uses a GPU which nobody granted to it."""

    REPORT = "report"
    STOP = "stop"


class StraySettings(Struct, frozen=True, kw_only=True):
    """Processes that have NVIDIA's device nodes open, held against what was granted (docs/stray.md)."""

    enabled: Annotated[
        bool,
        about(
            "Look for them. nri-gpu then needs to see every process of the host: the systemd unit its drop-in "
            "stray.conf, the chart stray.enabled."
        ),
    ] = False
    every_s: Annotated[int, Meta(ge=1, le=3600), about("Seconds between two looks.")] = 30
    action: Annotated[
        OnStray,
        about(
            "report them in status and log; or stop, through CRI, unprivileged containers of the namespaces "
            "below that two looks 10 s apart show with the same process. As guard.cri_socket and guard.stop_grace_s "
            "say; needs grpcio."
        ),
    ] = OnStray.REPORT
    namespaces: Annotated[Globs, NAMESPACES, about("Namespaces whose containers may be stopped.")] = NOTHING
    exceptions: Annotated[
        Globs,
        _EXCEPTIONS,
        about(
            "What may use GPUs without a grant: pods as namespace/pod, programs of the host by path, containers of "
            "other runtimes by cgroup; shell-style patterns."
        ),
    ] = Globs(_DAEMONS)
