"""The chart by the programs Helm 3 and Helm 4, as far as they need no cluster; tests/cluster/test_helm.py has the rest.

`helm install --dry-run=client` is not tried with Helm 3, which asks a cluster for its version even then.
"""

import pytest

from tests.support.errors import HarnessError
from tests.support.helm import CHART, PROGRAMS, Helm, parsed
from tools.manifests import FOLDER, SETS, as_options

RELEASE = ("nri-gpu", CHART, "--namespace=nri-gpu")
OPTIONS = as_options({})


@pytest.fixture(params=PROGRAMS)
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(request.param, tmp_path_factory.mktemp("helm"))


def kinds(text: str) -> set[str]:
    return {each["kind"] for each in parsed(text)}


def test_lint(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, helm.kube_version)


@pytest.mark.parametrize("name", SETS)
def test_template_makes_what_is_in_the_manifests(helm: Helm, name: str) -> None:
    made = parsed(helm("template", *RELEASE, helm.kube_version, *as_options(SETS[name][1])))
    namespace, *others = parsed((FOLDER / name).read_text())
    assert namespace["kind"] == "Namespace"
    order = lambda each: (each["kind"], each["metadata"]["name"])  # noqa: E731
    assert sorted(made, key=order) == sorted(others, key=order)


@pytest.mark.parametrize(
    ("version", "has_it"), [("1.25", False), ("1.29.9", False), ("1.30.0-rc.1", True), ("1.37", True)]
)
def test_the_admission_policy_is_there_from_kubernetes_1_30_on(helm: Helm, version: str, has_it: bool) -> None:
    made = kinds(helm("template", *RELEASE, *OPTIONS, f"--kube-version={version}"))
    assert {"ConfigMap", "DaemonSet", "ServiceAccount"} <= made
    assert ("ValidatingAdmissionPolicy" in made) == ("ValidatingAdmissionPolicyBinding" in made) == has_it


def test_on_openshift_the_accounts_of_all_daemonsets_may_use_the_constraints(helm: Helm) -> None:
    claims = (*OPTIONS, "--set=kubelet.enabled=false,dra.enabled=true", "--kube-version=1.37")
    elsewhere = parsed(helm("template", *RELEASE, *claims))
    made = parsed(helm("template", *RELEASE, *claims, "--api-versions=security.openshift.io/v1"))
    (binding,) = (each for each in made if each not in elsewhere)
    assert binding["kind"] == "RoleBinding"
    assert binding["roleRef"]["name"] == "system:openshift:scc:privileged"
    accounts = {
        (each["spec"]["template"]["spec"]["serviceAccountName"], each["metadata"]["namespace"])
        for each in made
        if each["kind"] == "DaemonSet"
    }
    assert {(each["name"], each["namespace"]) for each in binding["subjects"]} == accounts
    assert len(accounts) == 2


def test_install_without_a_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = Helm("helm4", tmp_path_factory.mktemp("helm"))("install", *RELEASE, *OPTIONS, "--dry-run=client")
    assert "STATUS: pending-install" in made
    notes = made.partition("NOTES:")[2]
    assert "DESIRED" in notes
    assert "kubectl label node NODE nvidia.com/gpu.present=true" in notes


def test_notes_on_claims_for_old_manifests(tmp_path_factory: pytest.TempPathFactory) -> None:
    claims = "--set=kubelet.enabled=false,dra.enabled=true,dra.extendedResource=nvidia.com/gpu"
    helm = Helm("helm4", tmp_path_factory.mktemp("helm"))
    made = helm("install", *RELEASE, *OPTIONS, claims, "--dry-run=client")
    assert 'docs/dra.md, "From the device plugin"' in made.partition("NOTES:")[2]


def test_notes_on_a_value_of_an_older_chart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is taken, under its name of today."""
    helm = Helm("helm4", tmp_path_factory.mktemp("helm"))
    made = helm("install", *RELEASE, *OPTIONS, "--set=stray.criDir=/run/containerd", "--dry-run=client")
    now = helm("template", *RELEASE, *OPTIONS, "--set=health.criDir=/run/containerd")
    assert "is called health.criDir now" in made.partition("NOTES:")[2]
    assert "mountPath: /run/containerd" in now
    assert parsed(now) == parsed(helm("template", *RELEASE, *OPTIONS, "--set=stray.criDir=/run/containerd"))


def test_what_is_wrong_is_said(helm: Helm) -> None:
    for option, said in {
        "--set=paths.nri=/run/../etc": "/paths/nri",
        "--set=imagee=x": "imagee",
        "--set=image.repository=": "there is no public image",
        "--namespace=default": "--create-namespace",
        "--name-template=a.b": "has a dot",
        "--set=kubelet.enabled=false,dra.enabled=true": "needs Kubernetes 1.34 or newer, and this is v1.33.9",
    }.items():
        with pytest.raises(HarnessError) as refused:
            helm("template", CHART, "--namespace=nri-gpu", *OPTIONS, "--kube-version=1.33.9", option)
        assert said in str(refused.value)
