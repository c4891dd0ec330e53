"""`helm test` of the chart: what it makes in each mode, whose rights that has, and that nothing of it stays."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest

from nri_gpu.cli.main import parse
from nri_gpu.cli.try_command import ASKING, CLAIMING, LOOKING
from nri_gpu.decision.offered import Way
from nri_gpu.dra.api_access import SERVICE_ACCOUNT
from nri_gpu.policy.document import options_in
from nri_gpu.records.policy_file import PolicyText, build_policy
from nri_gpu.trial.trial_pod import attempts
from tests.support.chart import CLAIMS, ELSEWHERE, one
from tests.support.helm import RefusedError, documents, of_helm_test

MODES: dict[str, tuple[dict[str, Any], str]] = {
    "kubelet": ({}, ASKING),
    "claims": (CLAIMS, f"{ASKING}, {CLAIMING}"),
    "annotations": ({"kubelet": {"enabled": False}}, ASKING),
    "observe": ({"mode": "observe"}, LOOKING),
}


def made(mode: str, **changed: object) -> dict[str, Any]:
    return of_helm_test(ELSEWHERE, **MODES[mode][0], **changed)


def container(objects: dict[str, Any]) -> Any:  # noqa: ANN401 - parsed YAML
    (only,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("mode", MODES)
def test_kubernetes_takes_it_and_nothing_of_it_is_the_releases(mode: str) -> None:
    objects = made(mode)
    assert set(objects) == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    weights = []
    for each in objects.values():
        kubernetes_validate.validate(each, "1.25", strict=True)
        # With a dot, which no release's name has: Helm deletes what has a hook's name, whosever it is.
        name = "other.test" if each["kind"] == "ServiceAccount" else "other-test"
        assert (each["metadata"]["name"], each["metadata"]["namespace"]) == (name, "elsewhere")
        hook = {key.removeprefix("helm.sh/"): value for key, value in each["metadata"]["annotations"].items()}
        assert hook["hook"] == "test"
        assert hook["hook-delete-policy"] == "before-hook-creation,hook-succeeded,hook-failed"
        weights.append(int(hook["hook-weight"]))
    assert weights == sorted(set(weights))
    names = {each["metadata"]["name"] for each in documents(ELSEWHERE, **MODES[mode][0])}
    assert not names & {"other-test", "other.test"}
    for given in ({"serviceAccount": {"name": "other.test"}}, {"dra": {"serviceAccount": {"name": "other.test"}}}):
        with pytest.raises(RefusedError, match=r"other\.test, which helm test makes and deletes"):
            documents(ELSEWHERE, **given)


@pytest.mark.parametrize("mode", MODES)
def test_its_account_may_do_what_the_program_says_that_it_must(mode: str) -> None:
    objects = made(mode)
    rules = [(", ".join(each["verbs"]), each["resources"]) for each in objects["Role"]["rules"]]
    assert all(len(resources) == 1 for _, resources in rules)
    said = ", ".join(f"{verbs} on {resources[0]}" for verbs, resources in rules)
    assert said == MODES[mode][1].replace(" and ", ", ")
    (subject,) = objects["RoleBinding"]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("other.test", "elsewhere")
    assert objects["RoleBinding"]["roleRef"]["name"] == objects["Role"]["metadata"]["name"]


@pytest.mark.parametrize("mode", MODES)
def test_its_token_is_mounted_in_its_one_pod_and_ends_with_that(mode: str) -> None:
    objects = made(mode)
    spec = objects["Job"]["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]
    assert objects["ServiceAccount"]["automountServiceAccountToken"] is False
    assert spec["automountServiceAccountToken"] is False
    mounts = {each["mountPath"]: each for each in container(objects)["volumeMounts"]}
    assert mounts[str(SERVICE_ACCOUNT)]["readOnly"] is True
    (token,) = (each["projected"]["sources"] for each in spec["volumes"] if "projected" in each)
    assert token[0]["serviceAccountToken"]["expirationSeconds"] == 600
    rights = container(objects)["securityContext"]
    assert rights.items() >= {"runAsNonRoot": True, "allowPrivilegeEscalation": False}.items()
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert not any("hostPath" in each for each in spec["volumes"])
    assert objects["Job"]["spec"]["backoffLimit"] == 0
    assert objects["Job"]["spec"]["activeDeadlineSeconds"] < token[0]["serviceAccountToken"]["expirationSeconds"]


@pytest.mark.parametrize("mode", ["kubelet", "claims", "annotations"])
def test_it_asks_as_the_release_lets_pods_ask_on_the_releases_nodes(mode: str) -> None:
    args = parse(*container(made(mode))["args"])
    config = one(documents(ELSEWHERE, **MODES[mode][0]), "ConfigMap", "other-policy")
    policy = build_policy(PolicyText("values.yaml", config["data"]["policy.toml"]), options_in(vars(args)))
    (only,) = attempts(policy)
    ways = {"kubelet": Way.KUBELET, "claims": Way.DRA, "annotations": Way.ANNOTATION}
    assert only.way is ways[mode]
    place = {"nodeSelector": {"kubernetes.io/os": "linux"}, "tolerations": [{"operator": "Exists"}]}
    assert json.loads(args.place).items() >= place.items()
    assert "nvidia.com/gpu.present" in str(json.loads(args.place)["affinity"])


def test_observers_are_found_by_what_selects_them() -> None:
    args = parse(*container(made("observe"))["args"])
    selector = dict(each.split("=") for each in args.observers.split(","))
    observer = one(documents(ELSEWHERE, mode="observe"), "DaemonSet", "other-observe")
    assert selector == observer["spec"]["selector"]["matchLabels"]


def test_without_roles_the_account_is_there_for_one_of_your_own() -> None:
    assert set(made("kubelet", rbac={"create": False})) == {"ServiceAccount", "Job"}


def test_of_the_values_for_pods_it_takes_secrets_tolerations_and_the_keys_of_required_plugins() -> None:
    given = {
        "imagePullSecrets": ["registry"],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "tolerateMissingKeys": ["a.example.com"],
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"team": "gpu"},
        "priorityClassName": "high",
        "extraEnv": [{"name": "A", "value": "b"}],
    }
    template = made("kubelet", **given)["Job"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {"a.example.com": "true"}
    assert "team" not in template["metadata"]["labels"]
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert template["spec"]["tolerations"] == given["tolerations"]
    assert template["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert "priorityClassName" not in template["spec"]
    environment = container({"Job": {"spec": {"template": template}}})["env"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in environment
    assert "A" not in {each["name"] for each in environment}
