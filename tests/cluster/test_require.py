"""Pods that ask require us, by the chart's MutatingAdmissionPolicy on a real API server and containerd's validator."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import BUSYBOX, NAMESPACE, ROOT, Cluster, jobs, pod, wait_for
from tests.support.helm import Release, documents

pytestmark = pytest.mark.cluster

KEY = "required-plugins.noderesource.dev"
OURS = '["nri-gpu"]'
GIVEN = {f"{KEY}/pod": OURS}
ON = {"enabled": True}
NOT_THERE = {f"{KEY}/pod": '["nri-gpu-not-there"]'}
PAGE = (ROOT / "docs" / "kubernetes-install.md").read_text()
(VALIDATOR,) = re.findall(r"```\n(\[plugins[^`]*)```", PAGE)
(TRIAL,) = re.findall(r"<<'END'\n([^`]*nri-gpu-not-there.*?)END\n", PAGE, re.DOTALL)
POLICY = """\
[dra]
pool = "cluster"
[[pool]]
name = "by-annotation"
device = ["0", "1", "2"]
namespaces = ["default"]
[[pool]]
name = "cluster"
model = ["*"]
"""
Object = dict[str, Any]


def require(cluster: Cluster, release: Release | None = None, **values: Any) -> None:  # noqa: ANN401 - the chart's values
    """Only the chart's two policies, in force."""
    found = documents(release, requirePlugin=ON, admission={"enabled": False}, **values)
    cluster.apply(*(each for each in found if "AdmissionPolicy" in each["kind"]))
    (bound,) = (each for each in found if each["kind"] == "ValidatingAdmissionPolicyBinding")
    first, warned = (pod("a", annotations=each | {"gpu.nri.io": "1"}) for each in ({}, NOT_THERE))
    wait_for("the warning", lambda: bound["metadata"]["name"] in dry(cluster, warned)[1])
    wait_for("the key", lambda: bool(required(dry(cluster, first)[0])))


def dry(cluster: Cluster, made: Object, namespace: str = "default") -> tuple[Object, str]:
    """What would be created, and what is said of it. Raises: HarnessError: it is refused."""
    text = cluster.apply(made, options=("--server-side", "--dry-run=server", "-o", "json", "-n", namespace))
    found, end = json.JSONDecoder().raw_decode(text)
    return found, text[end:].strip()


def annotations(found: Object) -> dict[str, str]:
    given: dict[str, str] = found["metadata"].get("annotations") or {}
    return given


def required(found: Object) -> dict[str, str]:
    return {key: value for key, value in annotations(found).items() if key.startswith(KEY)}


def asking(given: dict[str, str], *beside: str, init: str = "") -> Object:
    """A pod with these annotations and containers beside `main`."""
    made = pod("a", annotations=given)
    made["spec"]["containers"] += [{"name": name, "image": "a"} for name in beside]
    if init:
        made["spec"]["initContainers"] = [{"name": init, "image": "a", "restartPolicy": "Always"}]
    return made


ASK: dict[str, Object] = {
    "the bare key": asking({"gpu.nri.io": "1"}),
    "the pod's": asking({"gpu.nri.io/pod": "all;mode=exclusive"}),
    "a container's": asking({"gpu.nri.io/container.main": "1"}),
    "a sidecar's": asking({"gpu.nri.io/container.early": "1"}, init="early"),
    "all but one": asking({"gpu.nri.io": "1", "gpu.nri.io/container.main": "none"}, "beside"),
    "what no node accepts": asking({"gpu.nri.io": "nonesuch"}),
}
DO_NOT: dict[str, Object] = {
    "none": asking({"gpu.nri.io": " none ; "}),
    "the pod's none before the bare key": asking({"gpu.nri.io": "1", "gpu.nri.io/pod": "none"}),
    "each none": asking({"gpu.nri.io": "1", "gpu.nri.io/container.main": "none"}),
    "for nobody": asking({"gpu.nri.io/container.other": "1"}),
    "a requirement alone": asking({KEY: '["topology-aware"]', f"{KEY}/container.main": "[]"}),
}
# A tenant's own keys -> which are there afterwards, and the one that is warned of.
OWN: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "the pod's": ({f"{KEY}/pod": "[]"}, {f"{KEY}/pod": "[]"}, f"{KEY}/pod stays"),
    "the bare key": ({KEY: '["a"]'}, {KEY: '["a"]'}, f"{KEY} stays"),
    "ours as the bare key": ({KEY: OURS}, {KEY: OURS}, ""),
    "of another container": ({f"{KEY}/container.other": "[]"}, {f"{KEY}/container.other": "[]"} | GIVEN, ""),
    "of a name like it": ({f"{KEY}/pods": "[]"}, {f"{KEY}/pods": "[]"} | GIVEN, ""),
    "of its container": (
        {f"{KEY}/container.main": "[]"},
        {f"{KEY}/container.main": "[]"} | GIVEN,
        f"{KEY}/container.main stays",
    ),
}


@pytest.mark.short
def test_pods_that_ask_require_us(cluster: Cluster) -> None:
    require(cluster)
    for name, made in ASK.items():
        found, said = dry(cluster, made)
        assert (required(found), said) == (GIVEN, ""), name
    for name, made in DO_NOT.items():
        found, said = dry(cluster, made, "kube-system")
        assert (annotations(found), said) == (made["metadata"]["annotations"], ""), name
    for name, (own, there, warning) in OWN.items():
        found, said = dry(cluster, asking(own | {"gpu.nri.io": "1"}))
        assert required(found) == there, name
        assert (warning in said) if warning else not said, (name, said)
    (policy,) = cluster.get("validatingadmissionpolicy")
    assert policy["status"]["typeChecking"] == {}  # no expressionWarnings

    cluster.apply(asking({"gpu.nri.io": "1"}))
    cluster.kubectl("annotate", "pod", "a", f"{KEY}/pod-")
    assert required(cluster.get("pod", "a")) == GIVEN


def test_other_pods_are_as_they_were(cluster: Cluster) -> None:
    plain, empty, named = (pod("a") for _ in range(3))
    del plain["metadata"]["annotations"]
    empty["metadata"] = {"generateName": "a-", "annotations": {}}
    named["metadata"] = {"generateName": "a-"}
    for each in (plain, empty, named):
        each["spec"]["automountServiceAccountToken"] = False  # its volume's name is never the same twice
    options = ("-f", "-", "-o", "json", "--dry-run=server", "--warnings-as-errors")

    def taken() -> Iterator[Object]:
        for namespace in ("default", "kube-system"):
            for each in (plain, empty, named):
                found = json.loads(cluster.kubectl("create", *options, "-n", namespace, given=json.dumps(each)))
                for key in ("uid", "creationTimestamp", "managedFields"):
                    found["metadata"].pop(key, None)
                if each is not plain:
                    del found["metadata"]["name"]
                yield found

    before = list(taken())
    require(cluster)
    assert list(taken()) == before

    (job,) = jobs(["train"], "true")
    del job["spec"]["template"]["spec"]["containers"][0]["resources"]
    template = {"metadata": {"labels": {"app": "a"}}, "spec": pod("a")["spec"]}
    spec = {"selector": {"matchLabels": {"app": "a"}}, "template": template}
    made = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "a"}, "spec": spec}
    made_of = (("job", "train"), ("daemonset", "a"))
    for namespace in ("default", "kube-system"):
        said = cluster.apply(job, made, options=("-n", namespace))
        assert "Warning" not in said

        def done(namespace: str = namespace) -> bool:
            ended, ready = (cluster.get(kind, name, "-n", namespace)["status"] for kind, name in made_of)
            return bool(ended.get("succeeded") == 1 and ready.get("numberReady") == 1)

        wait_for("their pods", done, explain=lambda: cluster.kubectl("describe", "pods", "-A"))
        pods = cluster.get("pods", "", "-n", namespace)
        assert [annotations(each) for each in pods] == [{}, {}]


def test_what_it_costs_is_within_the_budget(cluster: Cluster) -> None:
    """Also where each value has the length of the grammar's limit; more of them than 256 KiB no pod can have."""
    require(cluster)
    names = [f"c{number:03}{'x' * 36}" for number in range(199)]
    keys = [f"gpu.nri.io/container.{name}" for name in names]
    for last, wanted in ("none", {}), ("nonf", GIVEN):
        values = {key: " " * 4092 + "none" for key in keys[:62]} | {"gpu.nri.io": " " * 4092 + last}
        found, said = dry(cluster, asking(values, *names))
        assert (required(found), said) == (wanted, "")
        values = {key: " " * 1100 + last for key in keys} | {"gpu.nri.io/pod": "none"}
        found, said = dry(cluster, asking(values, *names))
        assert (required(found), said) == (wanted, "")


def test_of_two_releases_one_name_counts_and_the_other_is_warned_of(cluster: Cluster) -> None:
    require(cluster)
    require(cluster, Release("two", "elsewhere"), pluginName="other")
    found, said = dry(cluster, ASK["the bare key"])
    assert required(found) in (GIVEN, {f"{KEY}/pod": '["other"]'})
    assert said.count(f"its own annotation {KEY}/pod stays") == 1


@pytest.fixture
def validating(cluster: Cluster) -> Iterator[Cluster]:
    """Its containerd has the two lines of the install page."""
    file = cluster.place / "containerd.toml"
    before = file.read_text()

    def restart_with(text: str) -> None:
        file.write_text(text)
        cluster.stop("containerd")
        cluster.start("containerd")
        wait_for("containerd", lambda: bool(cluster.verb("ctr", "namespaces", "ls", check=False)))

    try:
        restart_with(before + VALIDATOR)
        yield cluster
    finally:
        restart_with(before)


def test_nothing_starts_wrong_with_no_process_of_ours(validating: Cluster, image: None) -> None:
    cluster = validating
    values: Object = {"policy": POLICY, "kubelet": {"enabled": False}, "dra": {"enabled": True}}
    values |= {"requirePlugin": ON, "pluginName": "caf"}
    cluster.install(cluster.reach, **values)
    cluster.apply(pod("before", annotations={"gpu.nri.io": "1"}))
    cluster.wait_running("before")
    held = cluster.minors("before")
    assert len(held) == 1

    cluster.kubectl("delete", "daemonsets", "--all", "-n", NAMESPACE)
    running = "--field-selector=status.phase=Running"  # not the Job's that checked the policy
    wait_for("nothing of ours", lambda: not cluster.get("pods", "", "-n", NAMESPACE, running))
    cluster.apply(pod("asks", annotations={"gpu.nri.io": "1"}), pod("plain"))
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", given=TRIAL.replace("image: busybox", f"image: {BUSYBOX}"))
    cluster.wait_running("plain")
    cluster.wait_said("asks", 'required plugin "caf" not present')
    assert waiting(cluster.get("pod", "asks")) == "CreateContainerError"

    def held_back() -> bool:
        found = cluster.get("pods", "", "-n", NAMESPACE, "-l", "app=not-there")
        return [waiting(each) for each in found] == ["CreateContainerError"]

    wait_for("the trial", held_back)
    assert cluster.minors("before") == held

    cluster.kubectl("delete", "daemonset", "not-there", "-n", NAMESPACE)
    cluster.install(cluster.reach, **values)
    cluster.wait_running("asks")
    assert len(cluster.minors("asks") - held) == 1


def waiting(found: Object) -> str:
    """Why a pod's container does not run."""
    (status,) = found["status"].get("containerStatuses") or [{}]
    return str(status.get("state", {}).get("waiting", {}).get("reason", ""))
