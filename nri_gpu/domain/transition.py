"""What becomes of a node's GPUs: one thing that changed, and the last of them with their times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct, field

KEPT: Final = 32  # of each kind: what flaps must not push out what does not


class Kind(StrEnum):
    """What a transition is about."""

    ANSWER = "answer"  # the driver cannot be asked any more, or can again
    DRIVER = "driver"  # its version, or that of CUDA
    MODULE = "module"  # of the kernel: its major, or whether it is loaded
    GPU = "gpu"  # one came or went
    DESCRIPTION = "description"  # one is there and cannot be described, or can be again
    AVAILABLE = "available"  # a GPU or a MIG device cannot be granted any more, or can again
    HEALTH = "health"  # another state of health
    SIGN = "sign"  # a look shows something odd, or shows it no longer
    MIG = "mig"  # mode, or a MIG device came or went
    NUMBER = "number"  # index or minor
    FACTS = "facts"  # anything else that is known


class Transition(Struct, frozen=True, kw_only=True):
    """One thing that changed.

    what: a sentence, with the reason where there is one. uuid: of the GPU or the MIG device; empty for the node, or for
    a GPU without a name. index: of the GPU. worse: whether somebody may want to act.
    """

    kind: Kind
    what: str
    uuid: str = ""
    index: int | None = None
    worse: bool = False


class Happened(Struct, frozen=True):
    """A transition at its time. number: 1 for the first. at_s: seconds since the epoch."""

    number: int
    at_s: float
    transition: Transition


class History(Struct, frozen=True):
    """All transitions counted, and the last of each kind; of one daemon, since it began.

    began_s: seconds since the epoch. total: also the number of the newest. last: in their order.
    """

    began_s: float = 0.0
    total: int = 0
    counts: Mapping[Kind, int] = field(default_factory=dict)
    last: tuple[Happened, ...] = ()

    def having(self, transitions: Iterable[Transition], at_s: float) -> History:
        """With these, which happened now."""
        total, counts, last = self.total, dict(self.counts), list(self.last)
        for each in transitions:
            total += 1
            counts[each.kind] = counts.get(each.kind, 0) + 1
            last.append(Happened(total, at_s, each))
            same = [old for old in last if old.transition.kind is each.kind]
            if len(same) > KEPT:
                last.remove(same[0])
        return History(self.began_s, total, counts, tuple(last))

    def since(self, kinds: frozenset[Kind], uuid: str = "", index: int | None = None) -> float | None:
        """When the newest of some kinds happened to it; None where none is known any more.

        uuid: whose; without one, the node's, or those of a GPU that has no name, by its index.
        """
        found = (
            each.at_s
            for each in reversed(self.last)
            if (about := each.transition).kind in kinds and about.uuid == uuid and (uuid or about.index == index)
        )
        return next(found, None)


NO_HISTORY: Final = History()
