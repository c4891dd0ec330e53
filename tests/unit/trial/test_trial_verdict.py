"""What becomes of a pod, as its status and its events tell it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import convert

from nri_gpu.decision.offered import Way
from nri_gpu.trial.trial_pod import Attempt
from nri_gpu.trial.trial_verdict import TrialEvent, TrialOutcome, TrialPod, observers_outcome, outcome_of

KUBELET, CLAIM = Attempt(Way.KUBELET, "nvidia.com/gpu"), Attempt(Way.DRA, "gpu.nri.io")
ANNOTATION = Attempt(Way.ANNOTATION)
UUID = "GPU-2f7c9d3e-0000-4000-8000-000000000001"


def seen(phase: str = "Pending", name: str = "pod", **status: Any) -> TrialPod:  # noqa: ANN401 - parsed JSON
    given = {"metadata": {"name": name}, "spec": {"nodeName": "node1"}, "status": {"phase": phase, **status}}
    return convert(given, TrialPod)


def container(**state: Any) -> TrialPod:  # noqa: ANN401 - parsed JSON
    return seen(containerStatuses=[{"state": state}])


def unscheduled(message: str) -> TrialPod:
    return seen(conditions=[{"type": "PodScheduled", "status": "False", "message": message}])


def ended(code: int, message: str) -> TrialPod:
    return container(terminated={"exitCode": code, "reason": "Completed", "message": message})


def outcome(pod: TrialPod, *warnings: tuple[str, str], of: Attempt = KUBELET) -> TrialOutcome:
    return outcome_of(of, pod, [TrialEvent(*each) for each in warnings], "nri-gpu")


def test_what_it_printed_is_its_gpus_and_the_driver() -> None:
    found = outcome(ended(0, f"{UUID}\nNVRM version: 580\x1b[2J\n"))
    assert found.good
    assert found.final
    assert found.sentence == f"has {UUID} on node node1; NVRM version: 580\\x1b[2J"


@pytest.mark.parametrize("printed", ["", "\nno driver", "void\n", "all\n"])
def test_a_container_that_ran_without_a_gpu_fails(printed: str) -> None:
    found = outcome(ended(0, printed))
    assert (found.good, found.final) == (False, True)
    assert "ran without a GPU" in found.sentence


@pytest.mark.parametrize(
    ("attempt", "pod", "sentence"),
    [
        (KUBELET, unscheduled("0/1: 1 Insufficient nvidia.com/gpu."), "no GPU is free, or none is offered: 0/1: 1"),
        (KUBELET, unscheduled("0/1: 1 Insufficient memory."), "no node takes it: 0/1: 1 Insufficient memory."),
        (CLAIM, unscheduled("0/1: 1 cannot allocate all claims."), "no GPU is free, or none is offered: 0/1: 1"),
        (ANNOTATION, unscheduled("0/1: 1 node(s) didn't match"), "no node takes it: 0/1: 1 node(s)"),
        (
            ANNOTATION,
            container(waiting={"reason": "CreateContainerError", "message": "rpc: nri-gpu [gpu-busy]: GPU 0 is held."}),
            "no GPU is free: GPU 0 is held.",
        ),
        (
            ANNOTATION,
            container(waiting={"reason": "CreateContainerError", "message": "nri-gpu [node-not-ready]: no driver."}),
            "nri-gpu refused it [node-not-ready]: no driver.",
        ),
        (
            KUBELET,
            container(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling image"}),
            "its image cannot be pulled: Back-off pulling image",
        ),
        (KUBELET, container(waiting={"reason": "ContainerCreating"}), "it does not get done (phase Pending): Con"),
    ],
)
def test_what_may_still_change_is_waited_for(attempt: Attempt, pod: TrialPod, sentence: str) -> None:
    found = outcome(pod, of=attempt)
    assert (found.good, found.final) == (False, False)
    assert found.sentence.startswith(sentence)


def test_a_policy_that_says_no_is_said_at_once_wherever_it_is_told() -> None:
    refusal = "nri-gpu [not-allowed]: namespace nri-gpu may not ask."
    waiting = container(waiting={"reason": "CreateContainerError", "message": refusal})
    for found in (outcome(waiting), outcome(seen(), ("FailedPrepareDynamicResources", f"claim: {refusal}"))):
        assert (found.good, found.final) == (False, True)
        assert found.sentence == "the policy does not let the namespace nri-gpu ask: namespace nri-gpu may not ask."


def test_the_end_of_a_pod_is_final() -> None:
    rejected = outcome(seen("Failed", reason="UnexpectedAdmissionError", message="Allocate failed"))
    failed = outcome(ended(9, "NVIDIA-SMI has failed"))
    assert rejected.final
    assert rejected.sentence == "its node did not start it: UnexpectedAdmissionError: Allocate failed"
    assert failed.final
    assert failed.sentence == "its container ended with exit code 9: NVIDIA-SMI has failed"


def test_the_last_warning_says_why_where_the_status_does_not() -> None:
    found = outcome(seen(), ("FailedMount", "no such volume"))
    assert not found.final
    assert found.sentence == "it does not start: FailedMount: no such volume"


def test_every_observer_has_to_be_ready() -> None:
    ready, late = ([{"type": "Ready", "status": each}] for each in ("True", "False"))
    assert not observers_outcome([]).good
    both = observers_outcome([seen(name="a", conditions=ready), seen(name="b", conditions=late)])
    assert (both.good, both.final) == (False, False)
    assert "b on node node1" in both.sentence
    going = convert({"metadata": {"name": "c", "deletionTimestamp": "2026-11-30T00:00:00Z"}}, TrialPod)
    one = observers_outcome([seen(conditions=ready), going])
    assert one == TrialOutcome(True, True, "1 observer ready, on node1")
