"""Settings of health: the errors after which GPUs are not granted any more, and when they are again."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.domain.finding import Finding, in_policy
from nri_gpu.domain.health import Sign
from nri_gpu.policy.forms import about

_Xid = Annotated[int, Meta(ge=1, le=65535)]
# Lists that the policy file wrote out before each XID's action was known.
SHIPPED_IGNORED: Final = frozenset({13, 31, 43, 45, 68, 109, 154})
SHIPPED_FATAL: Final = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140, 143})


class Events(StrEnum):
    """The GPUs whose events are waited for."""

    HELD = "held"
    ALL = "all"
    NONE = "none"


class OtherXids(StrEnum):
    """The effect of an XID that neither the lists nor NVIDIA's catalogue have; but for suspect, that no list has."""

    IGNORE = "ignore"
    SUSPECT = "suspect"
    BAD = "bad"


class ResetBy(StrEnum):
    """The end of the withholding of a GPU after an XID whose action is a reset."""

    PROOF = "proof"
    QUIET = "quiet"


class OnBad(StrEnum):
    """The fate of the containers on a GPU that turns bad."""

    REPORT = "report"
    STOP = "stop"


class UnreadyFabric(StrEnum):
    """The fate of GPUs whose NVLink fabric is not ready."""

    WITHHOLD = "withhold"
    SIGNS = "signs"


class HealthSettings(Struct, frozen=True, kw_only=True):
    """Errors of a GPU that keep it from being granted, for how long, and what becomes of the containers on it."""

    events: Annotated[
        Events,
        about(
            "GPUs whose error events are waited for: those that containers hold, all, or none. While they are waited "
            "for, such a GPU cannot be reset and the driver cannot be unloaded."
        ),
    ] = Events.HELD
    # By default NVIDIA's catalogue says what each XID asks for (health/xids.py).
    ignored_xids: Annotated[
        frozenset[_Xid],
        Meta(max_length=256),
        about("XIDs that say nothing about the GPU, whatever NVIDIA's catalogue and the driver's recovery action say."),
    ] = frozenset()
    fatal_xids: Annotated[
        frozenset[_Xid],
        Meta(max_length=256),
        about(
            "XIDs after which a GPU is bad at once, whatever NVIDIA's catalogue and the driver's recovery action say; "
            "hold_down_s without trouble ends it."
        ),
    ] = frozenset()
    other_xids: Annotated[
        OtherXids,
        about(
            "suspect: XIDs that neither the lists nor NVIDIA's catalogue have make a GPU suspect, which stays granted. "
            "ignore, bad: what all XIDs do that the lists do not have."
        ),
    ] = OtherXids.SUSPECT
    reset: Annotated[
        ResetBy,
        about(
            "What ends the withholding after an XID whose action is a reset. proof: the driver's recovery action, a "
            "reload of the driver, a finished memory remapping, or `nri-gpu repaired`. quiet: hold_down_s without "
            "trouble."
        ),
    ] = ResetBy.PROOF
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
            "GPUs that show fabric-not-ready, on a machine with NVSwitches or several such GPUs: withhold them as "
            "long as they show it, without stopping containers, or do as fatal_signs and suspect_signs say (signs)."
        ),
    ] = UnreadyFabric.WITHHOLD
    hold_down_s: Annotated[
        int,
        Meta(ge=1, le=86400),
        about("Seconds without trouble after which a bad GPU is granted again, if it needs no reset or was reset."),
    ] = 300
    reprobe_s: Annotated[int, Meta(ge=1, le=3600), about("Seconds between two queries while a GPU is not healthy.")] = (
        30
    )
    containers: Annotated[
        OnBad,
        about(
            "Containers on a GPU that is bad or recovering: report them, or stop them through CRI, so that the "
            "kubelet starts them on another GPU. guard.cri_socket and guard.stop_grace_s apply."
        ),
    ] = OnBad.REPORT

    @property
    def ignored(self) -> frozenset[int]:
        """Return the operator's own list: a list that earlier versions' files wrote out counts as not given."""
        return frozenset() if self.ignored_xids == SHIPPED_IGNORED else self.ignored_xids

    @property
    def fatal(self) -> frozenset[int]:
        """Return the operator's own list, likewise."""
        return frozenset() if self.fatal_xids == SHIPPED_FATAL else self.fatal_xids


def health_faults(health: HealthSettings) -> Iterator[tuple[str, str]]:
    """Yield the faults between keys: key path and sentence of each."""
    for key, one, among, other in (
        ("fatal_xids", health.fatal, "ignored_xids", health.ignored),
        ("suspect_signs", health.suspect_signs, "fatal_signs", health.fatal_signs),
    ):
        if both := sorted(map(str, one & other)):
            yield f"health.{key}", f"{', '.join(both)}: in {among} too"


def shipped_lists(health: HealthSettings) -> Iterator[Finding]:
    """Yield a finding for each list that an earlier version's file wrote out."""
    for key, found, shipped in (
        ("ignored_xids", health.ignored_xids, SHIPPED_IGNORED),
        ("fatal_xids", health.fatal_xids, SHIPPED_FATAL),
    ):
        if found == shipped:
            yield in_policy(
                f"health.{key} is the list that an earlier version's policy file came with, and counts as not given: "
                "NVIDIA's catalogue says what each XID asks for; remove the key",
                f"health.{key}",
            )
