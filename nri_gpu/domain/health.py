"""A GPU's health, and the history of what happened to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntFlag, StrEnum
from typing import Final

from msgspec import Struct, field
from msgspec.structs import asdict

from nri_gpu.domain.value import Recorded


class Sign(StrEnum):
    """A sign that a query of a GPU showed; it ends when the next query does not show it."""

    LOST = "lost"  # NVML: GPU is lost (15), or it was there and can no longer be described
    RESET_REQUIRED = "reset-required"  # NVML: a reset is required (16), or its recovery action says so
    UNREADABLE = "unreadable"  # another call failed without which it cannot be described
    REMAP_FAILED = "remap-failed"  # a row of its memory could not be replaced by a spare one
    REMAP_PENDING = "remap-pending"  # a row will be replaced at its next reset
    FABRIC_NOT_READY = "fabric-not-ready"  # its NVLink fabric is not up, or came up with an error
    THERMAL = "thermal"  # its clocks are held down because it is hot
    POWER_BRAKE = "power-brake"  # its clocks are held down because the power supply says so


class RecoveryAction(StrEnum):
    """The action that the driver wants for a GPU, in the order of nvml.h's numbers; from R570 on."""

    NONE = "none"
    GPU_RESET = "gpu-reset"
    NODE_REBOOT = "node-reboot"
    DRAIN_P2P = "drain-p2p"
    DRAIN_AND_RESET = "drain-and-reset"
    RECOVER_IMEX_DOMAIN = "recover-imex-domain"
    BUS_RESET = "bus-reset"
    SYSTEM_REBOOT = "system-reboot"


# The other actions concern its peers, or nothing.
RESETS: Final = frozenset(
    {
        RecoveryAction.GPU_RESET,
        RecoveryAction.NODE_REBOOT,
        RecoveryAction.DRAIN_AND_RESET,
        RecoveryAction.BUS_RESET,
        RecoveryAction.SYSTEM_REBOOT,
    }
)


class HealthState(StrEnum):
    """The states of a GPU's health, by which it may be granted or not."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # granted
    BAD = "bad"  # not granted
    RECOVERING = "recovering"  # without trouble again, and granted after a while of it


class EventType(IntFlag):
    """NVML's event types, by the bits of nvml.h (nvmlEventType...)."""

    DOUBLE_BIT_ECC = 0x2
    XID = 0x8
    MIG_CHANGED = 0x100
    ECC_STORM = 0x200
    DRAM_RETIRED = 0x400
    DRAM_RETIREMENT_FAILED = 0x800
    POISON = 0x1000
    FATAL_POISON = 0x2000
    UNAVAILABLE = 0x4000
    RECOVERY_ACTION = 0x8000


class Health(Recorded, frozen=True):
    """A GPU's health."""

    state: HealthState = HealthState.HEALTHY
    since: float = 0.0  # when it came into that state; 0 for always; seconds since the epoch
    why: str = ""  # the trouble that brought it there, or that it recovered from
    changes: int = 0  # how often its state changed since it was first seen

    @property
    def severity(self) -> int:
        """Return a number that grows with the trouble."""
        return (HealthState.HEALTHY, HealthState.SUSPECT, HealthState.RECOVERING, HealthState.BAD).index(self.state)

    @property
    def grantable(self) -> bool:
        return self.state in (HealthState.HEALTHY, HealthState.SUSPECT)


WELL: Final = Health()


class GpuEvent(Struct, frozen=True):
    """An NVML event."""

    uuid: str
    kind: int  # of `EventType`, or another bit
    xid: int = 0  # the driver's error number, or 0
    gpu_instance: int | None = None  # id of the GPU instance that it happened to, or None if NVML does not tell
    compute_instance: int | None = None  # id of the compute instance, likewise


class HealthNotes(Struct, frozen=True, kw_only=True):
    """The facts known of a GPU beside its health.

    reset: why it is withheld until it was reset, and what to do, or empty. soon: why it is withheld once nobody holds
    it. xid: its last one, with its meaning, at xid_at_s. namespaces: those under whose containers applications failed
    on it within a day, if that looks as if the GPU were the cause.
    """

    reset: str = ""
    soon: str = ""
    xid: str = ""
    xid_at_s: float | None = None
    namespaces: tuple[str, ...] = ()


NO_NOTES: Final = HealthNotes()


class ScriptedEvent(Recorded, frozen=True):
    """An event of a simulated node."""

    at_s: float  # after the first query of the node; seconds
    gpu: int  # index
    xid: int = 0
    kind: int = EventType.XID.value  # of `EventType`


KEPT: Final = 32  # of each kind, so that a kind that flaps does not push out other kinds


class TransitionKind(StrEnum):
    ANSWER = "answer"  # NVML does not answer any more, or does again
    DRIVER = "driver"  # its version, or that of CUDA
    MODULE = "module"  # of the kernel: its major, or whether it is loaded
    GPU = "gpu"  # one came or went
    DESCRIPTION = "description"  # a GPU cannot be described any more, or can again
    AVAILABLE = "available"  # a GPU or a MIG device cannot be granted any more, or can again
    HEALTH = "health"  # another state of health
    SIGN = "sign"  # a sign appeared or ended
    MIG = "mig"  # mode, or a MIG device came or went
    NUMBER = "number"  # index or minor
    FACTS = "facts"  # anything else that is known


class Transition(Struct, frozen=True, kw_only=True):
    """A change of the node."""

    kind: TransitionKind
    what: str  # a sentence, with the reason if there is one
    uuid: str = ""  # of the GPU or the MIG device; empty for the node, or for a GPU without a name
    index: int | None = None  # of the GPU
    worse: bool = False  # an operator may want to act


class Happened(Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"uuid": "gpu_uuid"}):
    """A transition at its time, as it is published.

    number: 1 for the first, 0 where nobody counts. at_s: seconds since the epoch. kind: a newer daemon may have others.
    """

    number: int = 0
    at_s: float
    kind: str
    uuid: str
    index: int | None
    worse: bool
    what: str

    @classmethod
    def at(cls, at_s: float, transition: Transition, number: int = 0) -> Happened:
        """Return a transition that happened at that time."""
        return cls(at_s=at_s, number=number, **asdict(transition))


class History(Struct, frozen=True, rename={"began_s": "since_s"}):
    """The count of all transitions, and the last of each kind; of one daemon, since it began. It is published as it is.

    began_s: seconds since the epoch. total: also the number of the newest. last: in their order.
    """

    began_s: float = 0.0
    total: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    last: tuple[Happened, ...] = ()

    def having(self, transitions: Iterable[Transition], at_s: float) -> History:
        """Return the history with these, which happened now."""
        total, counts, last = self.total, dict(self.counts), list(self.last)
        for each in transitions:
            total += 1
            counts[each.kind] = counts.get(each.kind, 0) + 1
            last.append(Happened.at(at_s, each, total))
            same = [old for old in last if old.kind == each.kind]
            if len(same) > KEPT:
                last.remove(same[0])
        return History(self.began_s, total, counts, tuple(last))

    def since(self, kinds: frozenset[TransitionKind], uuid: str = "", index: int | None = None) -> float | None:
        """Return when the latest transition of these kinds happened, or None if none is known any more.

        uuid: the GPU or MIG device; empty for the node, or for a GPU known only by `index`.
        """
        found = (
            each.at_s
            for each in reversed(self.last)
            if each.kind in kinds and each.uuid == uuid and (uuid or each.index == index)
        )
        return next(found, None)


NO_HISTORY: Final = History()
