"""Counts of what has happened since the daemon began: plain integers, so the request path pays an increment each."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from enum import StrEnum
from typing import Final

from nri_gpu.domain.decision import Code, Decision, Inject, Pass

# Upper bounds of the classes of latencies, seconds. The runtime gives up after 2 s.
BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
_BOUNDS_NS: Final = tuple(int(bound * 1e9) for bound in BOUNDS_S)


class Outcome(StrEnum):
    """The answer that a container got."""

    GRANTED = "granted"
    COMPLETED = "completed"  # it got what it lacked to use GPUs of another component
    PASSED = "passed"  # it was looked at, and got nothing
    REFUSED = "refused"  # at its creation
    REJECTED = "rejected"  # when its creation was validated
    START_REFUSED = "start-refused"


REFUSALS: Final = (Outcome.REFUSED, Outcome.REJECTED, Outcome.START_REFUSED)


class Failure(StrEnum):
    """The reason why a request of the runtime was answered with an error that is no decision."""

    LATE = "late"  # its deadline had passed when its turn came
    MALFORMED = "malformed"
    TOO_LARGE = "too-large"
    OUT_OF_ORDER = "out-of-order"
    BUG = "bug"


class Latencies:
    """A histogram of how long answers took."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)  # one more than BOUNDS_S, for what took longer than the last
        self.total_ns = 0

    def add(self, elapsed_ns: int) -> None:
        self.buckets[bisect_left(_BOUNDS_NS, elapsed_ns)] += 1
        self.total_ns += elapsed_ns


class Counts:
    """The counts of one daemon, written in the event loop that answers the runtime."""

    def __init__(self) -> None:
        self.decisions: Counter[tuple[Outcome, Code | None]] = Counter()  # the code only of a refusal
        self.failures: Counter[Failure] = Counter()
        self.create = Latencies()  # from the bytes of a CreateContainer to its answer
        self.reconnects = 0  # connections that ended and were made anew

    def decided(self, decision: Decision) -> None:
        match decision:
            case Inject():
                self.decisions[Outcome.COMPLETED if decision.completes else Outcome.GRANTED, None] += 1
            case Pass():
                self.decisions[Outcome.PASSED, None] += 1
            case _:
                self.refused(decision.reason.code)

    def refused(self, code: Code, outcome: Outcome = Outcome.REFUSED) -> None:
        self.decisions[outcome, code] += 1
