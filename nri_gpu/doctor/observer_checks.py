"""The checks of an observer, on a node where no daemon answers and an observer does: it grants nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.daemon.answers import DaemonStatus, ObserverStatus
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import is_enabled
from nri_gpu.domain.finding import Finding, note, ok, unseen, warning
from nri_gpu.domain.finding_kind import FindingKind
from nri_gpu.domain.text import counted

SUBJECT: Final = "observer"
LATE_S: Final = 60.0  # after the next look was due
_LOG: Final = "journalctl -u nri-gpu-observe -e    # in a cluster: the log of its pod"


def observed_alone(seen: Examined) -> bool:
    """Return whether an observer answers where nobody means to run the daemon."""
    return seen.observer is not None and not is_enabled(seen, "nri-gpu.service")


def observer_findings(seen: Examined) -> Iterator[Finding]:
    """Say that an observer answers, what it cannot see, and what it found; nothing where none answers."""
    status = seen.observer
    if status is None or status.observer is None:
        return
    yield note(
        SUBJECT,
        f"an observer answers, and no daemon in {seen.state_dir}: it grants nothing, refuses nothing and changes "
        "nothing; `nri-gpu status` shows who was given which GPU",
    )
    if observed_alone(seen):
        yield from _policy(seen, status)
    yield from _looks(seen, status.observer)
    yield from _sources(seen, status, status.observer)
    for found in status.observer.findings:
        level = note if found.kind == FindingKind.PRIVILEGED else warning  # that may be meant
        yield level(found.kind, found.message)


def _policy(seen: Examined, status: DaemonStatus) -> Iterator[Finding]:
    """Check the policy, of which an observer reads a few sections."""
    files = seen.policy_error.faults if seen.policy_error else ()
    faults = [f"{each}" for each in files if not each.denied] or [status.policy.fault or status.policy.rejected]
    if any(faults):
        what = f"{faults[0]}: the observer goes on with the last good policy, or the defaults"
        yield warning("policy", what, "nri-gpu check")
    else:
        yield ok("policy", f"the observer reads {status.policy.source}")


def _looks(seen: Examined, observer: ObserverStatus) -> Iterator[Finding]:
    """Check when it looked, and report what it could not look at."""
    if observer.looked_s is None:
        yield unseen(SUBJECT, "it has not looked at containers and processes yet", _LOG)
    else:
        age_s = max(0.0, seen.now_s - observer.looked_s)
        given = counted(len(observer.allocations), "allocation")
        sentence = f"it looked at containers and processes {age_s:.0f} s ago, and knows {given}"
        late = age_s > seen.policy.observe.look_s + LATE_S
        yield warning(SUBJECT, f"{sentence}: its next look is late", _LOG) if late else ok(SUBJECT, sentence)
    for sentence in observer.unseen:
        yield unseen(SUBJECT, sentence)
    if not observer.unseen:
        yield ok(SUBJECT, "it sees bundles, processes and device rules of all containers")


def _sources(seen: Examined, status: DaemonStatus, observer: ObserverStatus) -> Iterator[Finding]:
    """Check the driver and the kubelet, of which an observer may have neither."""
    known = f"the observer knows {counted(sum(each.kind == 'gpu' for each in status.gpus), 'GPU')}"
    if fault := status.node.inventory_fault:
        yield unseen("GPUs", f"{known}, and the driver cannot be asked: {fault}")
    else:
        yield ok("GPUs", known)
    if not observer.kubelet:
        yield ok("kubelet", "none here: containers are known by their bundles")
    elif observer.kubelet_s is None:
        yield unseen("kubelet", "it has not told the observer yet what it allocated", _LOG)
    else:
        yield ok("kubelet", f"told what it allocated {max(0.0, seen.now_s - observer.kubelet_s):.0f} s ago")
