"""The end of a pod that asked for a GPU, by its status and events; and whether observers are ready.

All of that is the API server's, and in part a container's: only the fields that are needed are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from nri_gpu.decision.offered import Way
from nri_gpu.domain.decision import REFUSAL_MAX, Code
from nri_gpu.domain.text import counted, listed, shown
from nri_gpu.trial.trial_pod import Attempt

_REFUSAL: Final = re.compile(r"nri-gpu \[([a-z-]+)\]: (.*)", re.DOTALL)
_NO_IMAGE: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"})
_ALL_CLAIMED: Final = "cannot allocate all claims"  # the scheduler's words
_UNIT: Final = re.compile(r"(GPU|MIG)-\S+")


class Waiting(Struct, frozen=True):
    """The reason why a container does not run yet."""

    reason: str = ""
    message: str = ""


class Terminated(Struct, frozen=True, rename="camel"):
    """A container's end. message: what it wrote itself, or why it did not start."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""


class ContainerState(Struct, frozen=True):
    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(Struct, frozen=True):
    state: ContainerState = ContainerState()


class PodCondition(Struct, frozen=True):
    type: str
    status: str
    message: str = ""


class TrialStatus(Struct, frozen=True, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[PodCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class TrialMetadata(Struct, frozen=True, rename="camel"):
    name: str = ""
    deletion_timestamp: str | None = None


class TrialSpec(Struct, frozen=True, rename="camel"):
    node_name: str = ""


class TrialPod(Struct, frozen=True):
    """A pod that the API server has."""

    metadata: TrialMetadata = TrialMetadata()
    spec: TrialSpec = TrialSpec()
    status: TrialStatus = TrialStatus()

    @property
    def state(self) -> ContainerState:
        """Return that of its one container."""
        return next((each.state for each in self.status.container_statuses), ContainerState())

    def condition(self, kind: str) -> PodCondition | None:
        return next((each for each in self.status.conditions if each.type == kind), None)


class TrialEvent(Struct, frozen=True):
    """A warning that regards the pod."""

    reason: str = ""
    message: str = ""


class TrialOutcome(Struct, frozen=True):
    """The end of an attempt, as far as it is seen. final: waiting changes nothing."""

    good: bool
    final: bool
    sentence: str


def outcome_of(attempt: Attempt, pod: TrialPod, warnings: Sequence[TrialEvent], namespace: str) -> TrialOutcome:
    """Return what a pod's status and its events come to at this moment."""
    ended = pod.state.terminated
    if ended and ended.exit_code == 0:
        return _of_success(pod, ended)
    texts = (*(_texts(pod)), *(each.message for each in warnings))
    refusals = [found for text in texts if (found := _REFUSAL.search(text))]
    if refusals:
        return _of_refusal(Code(refusals[0][1]) if refusals[0][1] in tuple(Code) else None, refusals[0], namespace)
    if ended:
        said = ended.message or ended.reason
        return _bad(f"its container ended with exit code {ended.exit_code}", said, final=True)
    if pod.status.phase == "Failed":
        return _bad("its node did not start it", f"{pod.status.reason}: {pod.status.message}", final=True)
    if (waiting := pod.state.waiting) and waiting.reason in _NO_IMAGE:
        return _bad("its image cannot be pulled", waiting.message or waiting.reason)
    scheduled = pod.condition("PodScheduled")
    if scheduled and scheduled.status == "False":
        return _bad(_unscheduled(attempt, scheduled.message), scheduled.message)
    if warnings:
        return _bad("it does not start", f"{warnings[-1].reason}: {warnings[-1].message}")
    why = waiting.message or waiting.reason if waiting else ""
    return _bad(f"it does not get done (phase {pod.status.phase or 'unknown'})", why or "its events tell no reason")


def _of_success(pod: TrialPod, ended: Terminated) -> TrialOutcome:
    first, *rest = [shown(line, REFUSAL_MAX) for line in ended.message.splitlines()] or [""]
    if not _UNIT.match(first):
        return _bad(
            "its container ran without a GPU", f"NVIDIA_VISIBLE_DEVICES there is {first or 'empty'}", final=True
        )
    return TrialOutcome(True, True, "; ".join((f"has {first} on node {shown(pod.spec.node_name)}", *rest)))


def _of_refusal(code: Code | None, refusal: re.Match[str], namespace: str) -> TrialOutcome:
    match code:
        case Code.NOT_ALLOWED:
            what = f"the policy does not let the namespace {namespace} ask"
        case Code.GPU_BUSY:
            what = "no GPU is free"
        case _:
            what = f"nri-gpu refused it [{shown(refusal[1])}]"
    return _bad(what, refusal[2], final=code is Code.NOT_ALLOWED)


def _texts(pod: TrialPod) -> tuple[str, ...]:
    state = pod.state
    of_container = (each.message for each in (state.terminated, state.waiting) if each)
    return tuple(filter(None, (*of_container, pod.status.message)))


def _unscheduled(attempt: Attempt, message: str) -> str:
    lacks = {Way.KUBELET: f"Insufficient {attempt.asked}", Way.DRA: _ALL_CLAIMED}.get(attempt.way)
    return "no GPU is free, or none is offered" if lacks and lacks in message else "no node takes it"


def _bad(what: str, why: str, *, final: bool = False) -> TrialOutcome:
    return TrialOutcome(False, final, f"{what}: {shown(why, REFUSAL_MAX)}")


def observers_outcome(pods: Sequence[TrialPod]) -> TrialOutcome:
    """Return whether there is an observer, and each is ready."""
    there = [pod for pod in pods if pod.metadata.deletion_timestamp is None]
    if not there:
        return _bad("there is no observer", "no node has a label that the value affinity names")
    late = [pod for pod in there if (ready := pod.condition("Ready")) is None or ready.status != "True"]
    if late:
        names = listed([f"{shown(pod.metadata.name)} on node {shown(pod.spec.node_name or '-')}" for pod in late])
        return _bad(
            f"{counted(len(late), 'observer')} of {len(there)} not ready", f"{names}; `kubectl describe` says why"
        )
    return TrialOutcome(
        True,
        True,
        f"{counted(len(there), 'observer')} ready, on {listed(shown(pod.spec.node_name) for pod in there)}",
    )
