"""The pod that asks for a GPU, and its claim: Kubernetes takes them, and they have no more than a user's."""

from __future__ import annotations

import kubernetes_validate
import pytest

from nri_gpu.decision.offered import Way
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import PolicyText, build_policy
from nri_gpu.trial.trial_pod import (
    Attempt,
    JobReference,
    OwnContainer,
    OwnMetadata,
    OwnPod,
    OwnSpec,
    attempts,
    trial_claim,
    trial_pod,
)

JOB = JobReference("batch/v1", "Job", "nri-gpu-test", "uid-1")
OWN = OwnPod(
    OwnMetadata((JOB,)),
    OwnSpec((OwnContainer("registry.example.com/nri-gpu:1", "Always"),), ({"name": "registry"},)),
)
PLACE = {"nodeSelector": {"kubernetes.io/os": "linux"}, "affinity": None, "tolerations": [{"operator": "Exists"}]}
KUBELET, CLAIM = Attempt(Way.KUBELET, "nvidia.com/gpu"), Attempt(Way.DRA, "gpu.nri.io")
ANNOTATION = Attempt(Way.ANNOTATION)


def policy(text: str) -> Policy:
    return build_policy(PolicyText("policy.toml", text))


def test_it_asks_as_the_policy_lets_pods_ask() -> None:
    assert attempts(Policy.default()) == (ANNOTATION,)
    kubelet = '[kubelet]\nenabled = true\nresource = "example.com/gpu"\nreplicas = 2\nrename = true\npool = "a"\n'
    pools = '[[pool]]\nname = "a"\ndevice = ["0"]\n[[pool]]\nname = "b"\ndevice = ["1"]\n'
    both = kubelet + '[dra]\nenabled = true\npool = "b"\n' + pools
    assert attempts(policy(both)) == (Attempt(Way.KUBELET, "example.com/gpu.shared"), CLAIM)


@pytest.mark.parametrize("attempt", [KUBELET, CLAIM, ANNOTATION], ids=str)
def test_kubernetes_takes_a_pod_that_has_no_more_than_a_users(attempt: Attempt) -> None:
    made = trial_pod(attempt, OWN, "test-1", PLACE)
    kubernetes_validate.validate(made, kubernetes_validate.latest_version(), strict=True)
    (container,) = made["spec"]["containers"]
    assert "privileged" not in container["securityContext"]
    assert made["spec"].keys().isdisjoint({"volumes", "hostPID", "hostNetwork", "serviceAccountName"})
    assert made["spec"]["automountServiceAccountToken"] is False
    assert made["metadata"].get("annotations", {}).keys() <= {"gpu.nri.io"}
    assert (container["image"], container["imagePullPolicy"]) == ("registry.example.com/nri-gpu:1", "Always")
    assert made["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert made["spec"].items() >= PLACE.items()
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "nri-gpu-test", "uid": "uid-1"}
    ]


def test_each_way_asks_for_one() -> None:
    limited, claiming, annotated = (trial_pod(each, OWN, "test-1", {}) for each in (KUBELET, CLAIM, ANNOTATION))
    assert limited["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert annotated["metadata"]["annotations"] == {"gpu.nri.io": "1"}
    claim = trial_claim(CLAIM, OWN, "test-1", "resource.k8s.io/v1")
    kubernetes_validate.validate(claim, kubernetes_validate.latest_version(), strict=True)
    (named,) = claiming["spec"]["resourceClaims"]
    assert named["resourceClaimName"] == claim["metadata"]["name"]
    assert claim["metadata"]["ownerReferences"] == claiming["metadata"]["ownerReferences"]
    (request,) = claim["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nri.io"}
