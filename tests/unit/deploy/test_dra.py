"""The chart's DRA driver: a process of its own, with the only token, the fewest rights, and a policy on its writes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import pytest

from nri_gpu.cli.main import _parser
from nri_gpu.cli.run import _overrides
from nri_gpu.daemon.policy_file import PolicyText, build_policy
from nri_gpu.dra.api_access import SERVICE_ACCOUNT
from nri_gpu.policy.model import Policy
from tests.support import builders as make
from tests.support.helm import RefusedError, Release, documents, values
from tests.unit.deploy.test_chart import SCHEMA, arguments, container, daemon_sets, host_paths, mount, pod, policy_of

CLAIMS = "claims"  # the variant of the chart with the driver
ELSEWHERE = Release("other", "elsewhere")


def rendered(release: Release | None = None, **changed: object) -> list[dict[str, Any]]:
    given = values(**{"kubelet": {"enabled": False}, "dra": {"enabled": True}, **changed})
    jsonschema.validate(given, SCHEMA)
    return documents(given, release)


def one(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (only,) = (each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return only


# --- whether ---------------------------------------------------------------------------------------------------------


def test_the_value_decides_whether_the_daemon_serves_it_whatever_the_policy_says() -> None:
    assert not policy_of("defaults").dra.enabled
    assert policy_of(CLAIMS).dra.enabled
    for enabled in (True, False):
        found = rendered(policy=f"[dra]\nenabled = {str(not enabled).lower()}\n", dra={"enabled": enabled})
        (daemon,) = one(found, "DaemonSet", "nri-gpu")["spec"]["template"]["spec"]["containers"]
        text = one(found, "ConfigMap", "nri-gpu-policy")["data"]["policy.toml"]
        overrides = _overrides(_parser().parse_args(daemon["args"]))
        assert build_policy(PolicyText("values.yaml", text), overrides).dra.enabled is enabled


def test_without_the_value_nothing_of_it_is_there() -> None:
    names = {each["metadata"]["name"] for each in documents(values())}
    assert not [name for name in names if name.endswith("-dra") or "gpu.nri.io" in name]


def test_by_default_claims_get_every_gpu_and_annotations_none() -> None:
    policy = policy_of(CLAIMS)
    inventory = make.inventory((make.gpu(0), make.mig_gpu(1)))
    members = policy.pool.members(inventory)
    assert {members[unit.uuid].name for unit in inventory.units} == {policy.dra.pool}
    assert not any(pool.namespaces for pool in policy.pool.pools)


def test_two_doors_to_every_gpu_are_refused_with_a_sentence() -> None:
    with pytest.raises(RefusedError, match=r"kubelet\.enabled=false, or give each a pool"):
        rendered(kubelet={"enabled": True})
    both = '[kubelet]\npool = "a"\n[dra]\npool = "b"\n[[pool]]\nname = "a"\ndevice = ["0"]\n'
    both += '[[pool]]\nname = "b"\nmodel = ["*"]\n'
    assert rendered(kubelet={"enabled": True}, policy=both)
    assert build_policy(PolicyText("values.yaml", both))


# --- the process -----------------------------------------------------------------------------------------------------


def test_it_is_root_and_nothing_more() -> None:
    chosen = container("dra", CLAIMS)
    assert chosen["securityContext"] == container("guard")["securityContext"]
    assert not {"hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace"} & pod("dra", CLAIMS).keys()


def test_it_takes_its_arguments() -> None:
    args = arguments("dra", CLAIMS)
    (state,) = (each["mountPath"] for each in container("dra", CLAIMS)["volumeMounts"] if each["name"] == "state")
    assert (args.module, args.state_dir, args.kubeconfig) == ("nri_gpu.cli.dra", state, None)
    (name,) = (each for each in container("dra", CLAIMS)["env"] if each["name"] == "NODE_NAME")
    assert name["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert args.node_name == f"$({name['name']})"  # the kubelet puts it in
    assert mount("dra", CLAIMS, name="token")["mountPath"] == str(SERVICE_ACCOUNT)


def test_its_host_paths_are_those_that_are_needed() -> None:
    kubelet = "/var/lib/kubelet"
    sockets = {f"{kubelet}/plugins": "rw", f"{kubelet}/plugins_registry": "rw"}
    assert host_paths("dra", CLAIMS) == {"/run/nri-gpu": "ro", "/var/run/cdi": "rw", **sockets}
    types = {each["name"]: each.get("hostPath", {}).get("type") for each in pod("dra", CLAIMS)["volumes"]}
    assert types["plugins"] == types["plugins-registry"] == "Directory"  # the kubelet makes them


def test_the_folders_are_where_it_looks() -> None:
    policy = Policy.default()
    inside = {each["mountPath"] for each in container("dra", CLAIMS)["volumeMounts"]}
    assert {policy.dra.dir, policy.kubelet.registry_dir, policy.kubelet.cdi_dir} <= inside
    assert mount("dra", CLAIMS, name="state") == {"name": "state", "mountPath": "/run/nri-gpu", "readOnly": True}


def test_the_kubelet_dials_the_socket_by_its_own_path() -> None:
    found = rendered(kubelet={"enabled": False, "root": "/data/kubelet"})
    spec = one(found, "DaemonSet", "nri-gpu-dra")["spec"]["template"]["spec"]
    outside = {each["name"]: each.get("hostPath", {}).get("path") for each in spec["volumes"]}
    inside = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    assert outside["plugins"] == inside["plugins"] == "/data/kubelet/plugins"
    assert outside["plugins-registry"] == "/data/kubelet/plugins_registry"


def test_the_next_is_there_before_the_last_goes() -> None:
    """They lock the driver's folder, so that one at a time serves."""
    spec = daemon_sets(CLAIMS)["dra"]["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": values()["maxSurge"], "maxUnavailable": 0}
    assert spec["minReadySeconds"] > 0
    assert "ports" not in container("dra", CLAIMS)


# --- its rights ------------------------------------------------------------------------------------------------------


def test_only_its_pod_has_a_token_and_that_one_is_bound_to_it() -> None:
    for component in daemon_sets(CLAIMS):
        volumes = pod(component, CLAIMS)["volumes"]
        assert pod(component, CLAIMS)["automountServiceAccountToken"] is False
        assert [each["name"] for each in volumes if "projected" in each] == (["token"] if component == "dra" else [])
    (token,) = (each for each in pod("dra", CLAIMS)["volumes"] if each["name"] == "token")
    first, second = token["projected"]["sources"]
    assert first == {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
    assert second["configMap"]["name"] == "kube-root-ca.crt"


def test_its_rights_are_these_and_no_others() -> None:
    found = rendered(ELSEWHERE)
    role, binding = (one(found, kind, "other-dra") for kind in ("ClusterRole", "ClusterRoleBinding"))
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    verbs = ("get", "list", "watch", "create", "update", "delete")
    slices = {("resource.k8s.io", "resourceslices", verb) for verb in verbs}
    assert granted == slices | {("resource.k8s.io", "resourceclaims", "get"), ("", "nodes", "get")}
    assert all(rule.keys() == {"apiGroups", "resources", "verbs"} for rule in role["rules"])
    account = {"kind": "ServiceAccount", "name": "other-dra", "namespace": "elsewhere"}
    assert (binding["roleRef"]["name"], binding["subjects"]) == ("other-dra", [account])
    assert Counter(each["kind"] for each in found)["ClusterRoleBinding"] == 1
    driver = one(found, "DaemonSet", "other-dra")["spec"]["template"]["spec"]
    assert driver["serviceAccountName"] == account["name"]
    others = {each["spec"]["template"]["spec"]["serviceAccountName"] for each in found if each["kind"] == "DaemonSet"}
    assert others == {"other", "other-dra"}


def test_what_it_writes_is_bound_to_its_own_node() -> None:
    """That the API server reads the expressions so is tried on a real one."""
    found = rendered(ELSEWHERE)
    policy, binding = (one(found, f"ValidatingAdmissionPolicy{kind}", "other-dra")["spec"] for kind in ("", "Binding"))
    assert binding == {"policyName": "other-dra", "validationActions": ["Deny"]}
    assert policy["failurePolicy"] == "Fail"
    (rule,) = policy["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["resourceslices"], ["CREATE", "UPDATE", "DELETE"])
    (whose,) = policy["matchConditions"]
    assert whose["expression"] == "request.userInfo.username == 'system:serviceaccount:elsewhere:other-dra'"
    said = {each["name"]: each["expression"] for each in policy["variables"]}
    assert "authentication.kubernetes.io/node-name" in said["node"]
    assert "oldObject" in said["slices"]
    some, node, driver = (each["expression"] for each in policy["validations"])
    assert some == "variables.node != ''"
    assert node == "variables.slices.all(each, each.spec.?nodeName.orValue('') == variables.node)"
    assert driver == "variables.slices.all(each, each.spec.driver == 'gpu.nri.io')"


# --- what pods name --------------------------------------------------------------------------------------------------


def classes(**dra: object) -> dict[str, dict[str, Any]]:
    found = rendered(dra={"enabled": True, **dra})
    return {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "DeviceClass"}


def test_the_classes_are_of_the_drivers_name() -> None:
    assert values()["dra"]["driver"] == Policy.default().dra.driver
    for driver in ("gpu.nri.io", "gpu.example.com"):
        found = classes(driver=driver)
        assert set(found) == {driver, f"mig.{driver}"}
        for (name, spec), kind in zip(found.items(), ("gpu", "mig"), strict=True):
            (selector,) = spec["selectors"]
            wanted = f"device.driver == '{driver}' && device.attributes['{driver}'].type == '{kind}'"
            assert selector["cel"]["expression"] == wanted, name


def test_a_second_release_makes_no_classes() -> None:
    assert not classes(deviceClasses=False)


def test_old_manifests_get_whole_gpus_where_the_value_says_so() -> None:
    assert not [spec for spec in classes().values() if "extendedResourceName" in spec]
    found = classes(extendedResource="nvidia.com/gpu")
    assert found["gpu.nri.io"]["extendedResourceName"] == "nvidia.com/gpu"
    assert "extendedResourceName" not in found["mig.gpu.nri.io"]
