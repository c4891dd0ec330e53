"""Settings of health: which GPUs are not granted any more, and when they are again."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from nri_gpu.domain.health import Sign
from nri_gpu.policy.forms import about

_Xid = Annotated[int, Meta(ge=1, le=65535)]


class Events(StrEnum):
    """The GPUs whose events are waited for."""

    HELD = "held"
    ALL = "all"
    NONE = "none"


class OtherXids(StrEnum):
    """What an XID of neither list does."""

    IGNORE = "ignore"
    SUSPECT = "suspect"
    BAD = "bad"


class OnBad(StrEnum):
    """What happens to the containers on a GPU that turns bad."""

    REPORT = "report"
    STOP = "stop"


class UnreadyFabric(StrEnum):
    """What becomes of GPUs whose NVLink fabric is not ready."""

    WITHHOLD = "withhold"
    SIGNS = "signs"


class HealthSettings(Struct, frozen=True, kw_only=True):
    """Which errors of a GPU keep it from being granted, for how long, and what becomes of the containers on it."""

    events: Annotated[
        Events,
        about(
            "GPUs whose error events are waited for: those that containers hold, all, or none. Meanwhile such a GPU "
            "cannot be reset, and the driver cannot be unloaded."
        ),
    ] = Events.HELD
    # Application errors as NVIDIA's device plugin has them (NVIDIA/k8s-device-plugin: internal/rm/health.go), and 154,
    # which only announces a recovery action that every query shows anyway.
    ignored_xids: Annotated[
        frozenset[_Xid],
        Meta(max_length=256),
        about("XIDs that say nothing about the GPU: application errors, and 154, which other XIDs explain."),
    ] = frozenset({13, 31, 43, 45, 68, 109, 154})
    # After the immediate actions in NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors): reset or restart.
    fatal_xids: Annotated[frozenset[_Xid], Meta(max_length=256), about("XIDs after which a GPU is bad at once.")] = (
        frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140, 143})
    )
    other_xids: Annotated[
        OtherXids,
        about("XIDs of neither list: ignore; suspect, which stays granted and turns bad with the next incident; bad."),
    ] = OtherXids.SUSPECT
    fatal_signs: Annotated[
        frozenset[Sign],
        about("Signs that make a GPU bad when a query shows them; unreadable: when it still shows reprobe_s later."),
    ] = frozenset({Sign.LOST, Sign.RESET_REQUIRED, Sign.UNREADABLE, Sign.REMAP_FAILED})
    suspect_signs: Annotated[
        frozenset[Sign],
        about("Signs that make it suspect. Signs in neither list are shown and change nothing."),
    ] = frozenset({Sign.REMAP_PENDING, Sign.FABRIC_NOT_READY})
    fabric: Annotated[
        UnreadyFabric,
        about(
            "GPUs that show fabric-not-ready, on a machine with NVSwitches or several such GPUs: withhold them as long "
            "as they show it, without stopping anybody, or do as fatal_signs and suspect_signs say (signs)."
        ),
    ] = UnreadyFabric.WITHHOLD
    hold_down_s: Annotated[
        int, Meta(ge=1, le=86400), about("Seconds without trouble after which a bad GPU is granted again.")
    ] = 300
    reprobe_s: Annotated[int, Meta(ge=1, le=3600), about("Seconds between two queries while a GPU is not healthy.")] = (
        30
    )
    containers: Annotated[
        OnBad,
        about(
            "Containers on a GPU that is bad or recovering: report them, or stop them through CRI, so that the kubelet "
            "starts them on another. As guard.cri_socket and guard.stop_grace_s say; needs grpcio."
        ),
    ] = OnBad.REPORT


def health_faults(health: HealthSettings) -> Iterator[tuple[str, str]]:
    """Faults between keys: key path and sentence of each."""
    for key, one, other in (
        ("fatal_xids", health.fatal_xids, health.ignored_xids),
        ("suspect_signs", health.suspect_signs, health.fatal_signs),
    ):
        if both := sorted(map(str, one & other)):
            among = "ignored_xids" if key == "fatal_xids" else "fatal_signs"
            yield f"health.{key}", f"{', '.join(both)}: in {among} too"
