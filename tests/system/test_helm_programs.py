"""The chart by the programs Helm 3 and Helm 4, as far as they need no cluster; tests/cluster/test_helm.py has the rest.

`helm install --dry-run=client` is not tried with Helm 3, which asks a cluster for its version even then.
"""

import shutil
import tarfile
from pathlib import Path

import kubernetes_validate
import pytest

from tests.support.errors import HarnessError
from tests.support.helm import CHART, PROGRAMS, Helm, parsed
from tools.manifests import FOLDER, HELMS, SETS, as_options

RELEASE = ("nri-gpu", CHART, "--namespace=nri-gpu")
TEMPLATE = ("template", *RELEASE, "--skip-tests")  # what an installation makes
OPTIONS = as_options({})
OLDER = Path(__file__).parents[1] / "fixtures" / "chart" / "values-0.1.0.yaml"


@pytest.fixture(params=PROGRAMS)
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(request.param, tmp_path_factory.mktemp("helm"))


def kinds(text: str) -> set[str]:
    return {each["kind"] for each in parsed(text)}


def test_lint(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, helm.kube_version)


@pytest.mark.parametrize("name", SETS)
def test_template_makes_what_is_in_the_manifests(helm: Helm, name: str) -> None:
    made = parsed(helm(*TEMPLATE, helm.kube_version, *as_options(SETS[name][1])))
    namespace, *others = parsed((FOLDER / name).read_text())
    assert namespace["kind"] == "Namespace"
    for each in made:  # which kubectl does not apply for Helm
        for label in HELMS:
            del each["metadata"]["labels"][label.rstrip(":")]
    order = lambda each: (each["kind"], each["metadata"]["name"])  # noqa: E731
    assert sorted(made, key=order) == sorted(others, key=order)


@pytest.mark.parametrize(
    ("version", "has_it"), [("1.25", False), ("1.29.9", False), ("1.30.0-rc.1", True), ("1.37", True)]
)
def test_the_admission_policy_is_there_from_kubernetes_1_30_on(helm: Helm, version: str, has_it: bool) -> None:
    made = kinds(helm(*TEMPLATE, *OPTIONS, f"--kube-version={version}"))
    assert {"ConfigMap", "DaemonSet", "ServiceAccount"} <= made
    assert ("ValidatingAdmissionPolicy" in made) == ("ValidatingAdmissionPolicyBinding" in made) == has_it


def test_on_openshift_the_accounts_of_all_daemonsets_may_use_the_constraints(helm: Helm) -> None:
    claims = (*OPTIONS, "--set=kubelet.enabled=false,dra.enabled=true", "--kube-version=1.37")
    elsewhere = parsed(helm(*TEMPLATE, *claims))
    made = parsed(helm(*TEMPLATE, *claims, "--api-versions=security.openshift.io/v1"))
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


def test_on_openshift_the_jobs_run_as_the_user_that_it_gives_their_accounts(helm: Helm) -> None:
    users = []
    for openshift in ((), ("--api-versions=security.openshift.io/v1",)):
        made = parsed(helm("template", *RELEASE, *OPTIONS, "--set=policy=[limits]", helm.kube_version, *openshift))
        jobs = [each["spec"]["template"]["spec"]["containers"][0] for each in made if each["kind"] == "Job"]
        assert [each["name"] for each in jobs] == ["check", "test"]
        assert all(each["securityContext"]["runAsNonRoot"] for each in jobs)
        users.append([each["securityContext"].get("runAsUser") for each in jobs])
    assert users == [[65534, 65534], [None, None]]


OBSERVE = "--set=mode=observe"
APPARMOR = "container.apparmor.security.beta.kubernetes.io/nri-gpu"


@pytest.mark.parametrize("version", ["1.25.0", "1.29.9", "1.30.0-rc.1", "1.31.0", "1.37.0"])
def test_the_observer_is_unconfined_and_writes_to_no_container_by_what_each_kubernetes_knows(
    helm: Helm, version: str
) -> None:
    made = parsed(helm(*TEMPLATE, *OPTIONS, OBSERVE, f"--kube-version={version}"))
    assert {each["kind"] for each in made} == {"ServiceAccount", "ConfigMap", "DaemonSet"}
    (template,) = (each["spec"]["template"] for each in made if each["kind"] == "DaemonSet")
    (container,) = template["spec"]["containers"]
    (bundles,) = (each for each in container["volumeMounts"] if each["name"] == "bundles-0")
    minor = int(version.split(".")[1])
    field = {"type": "Unconfined"} if minor >= 30 else None
    assert container["securityContext"].get("appArmorProfile") == field
    assert template["metadata"]["annotations"].get(APPARMOR) == (None if field else "unconfined")
    assert bundles.get("recursiveReadOnly") == ("IfPossible" if minor >= 31 else None)
    if minor < 30:  # the oldest schemas there are, which know neither field
        for each in made:
            kubernetes_validate.validate(each, "1.25", strict=True)


def test_on_openshift_the_observer_may_use_the_constraints_and_sees_crio(helm: Helm) -> None:
    made = parsed(helm(*TEMPLATE, *OPTIONS, OBSERVE, helm.kube_version, "--api-versions=security.openshift.io/v1"))
    (binding,) = (each for each in made if each["kind"] == "RoleBinding")
    (spec,) = (each["spec"]["template"]["spec"] for each in made if each["kind"] == "DaemonSet")
    assert [each["name"] for each in binding["subjects"]] == [spec["serviceAccountName"]]
    paths = {each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    assert "/run/containers/storage/overlay-containers" in paths


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("1.34.2+k3s1", "/run/k3s/containerd"),
        ("1.34.2+rke2r1", "/run/k3s/containerd"),
        ("1.34.2+k0s", "/run/k0s/containerd"),
    ],
)
def test_the_observer_sees_the_containerd_that_a_distribution_brings(
    tmp_path_factory: pytest.TempPathFactory, version: str, state: str
) -> None:
    """Helm 3 takes such a version from a cluster alone, and drops its end on the command line."""
    helm = Helm("helm4", tmp_path_factory.mktemp("helm"))
    made = helm(*TEMPLATE, *OPTIONS, OBSERVE, f"--kube-version={version}")
    assert f"path: {state}/io.containerd.runtime.v2.task" in made
    own = helm(*TEMPLATE, *OPTIONS, OBSERVE, f"--kube-version={version}", "--set=observe.runtimes={docker}")
    assert "io.containerd.runtime.v2.task" not in own


def test_notes_on_the_observer(tmp_path_factory: pytest.TempPathFactory) -> None:
    helm = Helm("helm4", tmp_path_factory.mktemp("helm"))
    for options, there, missing in (
        ((), "exec daemonset/nri-gpu-observe -- nri-gpu status", "are privileged"),
        (("--set=observe.nvml=true",), "Its pods are privileged", "not privileged"),
        (("--set=observe.runtimes={docker,podman}",), "the containers of docker, podman.", "exec daemonset/nri-gpu --"),
    ):
        made = helm("install", *RELEASE, *OPTIONS, OBSERVE, *options, "--dry-run=client").partition("NOTES:")[2]
        assert there in made
        assert missing not in made
        assert "leaves nothing on the nodes" in made
        assert "What one node can grant" not in made


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


def test_notes_on_values_of_an_older_chart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each is named with its name of today."""
    helm = Helm("helm4", tmp_path_factory.mktemp("helm"))

    def notes_on(values: str) -> str:
        return helm("install", *RELEASE, *OPTIONS, "--dry-run=client", f"--set={values}").partition("NOTES:")[2]

    notes = notes_on("maxSurge=2,metrics.scrape=none")
    assert "The value metrics.scrape is set, an old name" in notes
    assert "set metrics.annotations and metrics.serviceMonitor.enabled instead" in notes
    assert "set updateStrategy and dra.updateStrategy and observe.updateStrategy instead" in notes
    assert "an old name" not in notes_on("maxSurge=1,metrics.scrape=annotations")


def test_a_package_has_what_its_templates_read(helm: Helm, tmp_path: Path) -> None:
    there = ("--namespace=nri-gpu", helm.kube_version)
    helm("package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.iterdir()
    with tarfile.open(package) as archive:
        names = {name.removeprefix("nri-gpu/") for name in archive.getnames()}
    assert {"README.md", "foreign.yaml", "values.schema.json", "templates/NOTES.txt"} <= names
    with pytest.raises(HarnessError, match=r"toolkit is a value of the GPU Operator\. Here: none"):
        helm("template", package, *there, *OPTIONS, "--set=toolkit.enabled=false")


def test_values_of_an_older_chart_make_what_the_defaults_make(helm: Helm, tmp_path: Path) -> None:
    """As `helm upgrade --reuse-values` has them: instead of the new chart's own."""
    there = ("--namespace=nri-gpu", helm.kube_version)
    reused = tmp_path / "nri-gpu"
    shutil.copytree(CHART, reused)
    shutil.copyfile(OLDER, reused / "values.yaml")
    made = [helm("template", "nri-gpu", chart, *there, *OPTIONS) for chart in (CHART, reused)]
    assert made[0] == made[1]
    surge = tmp_path / "surge.yaml"
    surge.write_text("maxSurge: 2\nmetrics: {enabled: true, scrape: serviceMonitor}\n")
    new = "--set=updateStrategy.type=RollingUpdate,updateStrategy.rollingUpdate.maxSurge=2,metrics.enabled=true"
    options = (new, "--set=updateStrategy.rollingUpdate.maxUnavailable=0,metrics.serviceMonitor.enabled=true")
    old = helm("template", "nri-gpu", reused, *there, *OPTIONS, "-f", surge)
    assert parsed(old) == parsed(helm("template", "nri-gpu", CHART, *there, *OPTIONS, *options))


def test_what_is_made_twice_is_the_same_to_the_byte(helm: Helm) -> None:
    """So Argo CD and Flux see a difference where there is one."""
    options = (
        "--set=kubelet.enabled=false,dra.enabled=true,metrics.enabled=true,maxSurge=2,commonLabels.a=b,podLabels.c=d"
    )
    once, again = (
        helm(
            "template", *RELEASE, "--kube-version=1.37", *OPTIONS, options, "--set=metrics.serviceMonitor.enabled=true"
        )
        for _ in range(2)
    )
    assert "kind: ServiceMonitor" in once
    assert once == again


MONITOR = "--set=metrics.enabled=true,metrics.serviceMonitor.enabled=true"


def test_what_is_wrong_is_said(helm: Helm) -> None:
    for option, said in {
        "--set=paths.nri=/run/../etc": "/paths/nri",
        "--set=imagee=x": "imagee",
        "--set=image.repository=": "there is no public image",
        "--namespace=default": "--create-namespace",
        "--name-template=a.b": "has a dot",
        "--name-template=1a": "1a begins with a digit, which names of Services must not",
        "--set=kubelet.enabled=false,dra.enabled=true": "needs Kubernetes 1.34 or newer, and this is v1.33.9",
        "--set=mode=observer": "/mode",
        "--set=mode=observe,observe.runtimes={lxc}": "/observe/runtimes/0",
        "--set=mode=observe,kubelet.enabled=true": "set kubelet.enabled=auto",
        "--set=mode=observe,dra.enabled=true": "set dra.enabled=false",
        "--set=stray.criDir=/run/containerd": "set health.criDir instead",
        "--set=maxSurge=2,updateStrategy.type=OnDelete": "maxSurge is the old name of updateStrategy, and both are set",
        "--set=gfd.enabled=true,migStrategy=mixed": "migStrategy is a value of NVIDIA's device plugin. Here: the",
    }.items():
        with pytest.raises(HarnessError) as refused:
            helm("template", CHART, "--namespace=nri-gpu", *OPTIONS, MONITOR, "--kube-version=1.33.9", option)
        assert said in str(refused.value)
