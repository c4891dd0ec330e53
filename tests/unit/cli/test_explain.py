"""`nri-gpu explain`: every manifest that holds pods, decided as `run` would, and every one that does not."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nri_gpu.cli.main import main
from nri_gpu.domain.errors import Exit
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.loading import LIBRARIES
from tests.unit.cli.shapes import EXPLAIN, check_shape

POD = """
apiVersion: v1
kind: Pod
metadata:
  name: train
  namespace: ml
  annotations:
    gpu.nri.io: "device=0,1;mode=shared"
    gpu.nri.io/container.helper: none
spec:
  initContainers:
  - name: first
    image: busybox
  containers:
  - name: main
    image: cuda
    env:
    - name: LD_LIBRARY_PATH
      value: /opt/lib
    - name: SECRET
      value: hunter2
  - name: helper
    image: busybox
"""
PLAIN = "kind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: nginx}]}\n"
GREEDY = POD.replace("device=0,1;mode=shared", "device=9")
DEPLOYMENT = """
kind: Deployment
metadata: {name: outer}
spec:
  template:
    metadata: {annotations: {gpu.nri.io: "1"}, generateName: inner-}
    spec: {containers: [{name: main}]}
"""
CRONJOB = """
kind: CronJob
metadata: {name: nightly}
spec:
  jobTemplate:
    spec:
      template:
        metadata: {annotations: {gpu.nri.io: "4"}}
        spec: {containers: [{name: main}]}
"""

Explain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Explain:
    def run(manifest: str, *arguments: str, policy: str = "") -> tuple[int, str, str]:
        (tmp_path / "policy.toml").write_text(policy)
        (tmp_path / "pod.yaml").write_text(manifest)
        always = ["--gpus", str(FOUR_GPUS), "--policy", str(tmp_path / "policy.toml"), "--driver-root", str(tmp_path)]
        code = main(["explain", str(tmp_path / "pod.yaml"), *always, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def documents(explain: Explain, manifest: str) -> list[dict[str, Any]]:
    _, out, _ = explain(manifest, "-o", "json")
    parsed = json.loads(out)
    check_shape(parsed, EXPLAIN)
    containers: list[dict[str, Any]] = parsed["containers"]
    return containers


def test_a_pod_as_text(explain: Explain) -> None:
    code, text, error = explain(POD)
    assert (code, error) == (Exit.OK, "")
    paragraphs = text.split("\n\n")
    assert [each.splitlines()[0] for each in paragraphs] == [
        "ml/train container first",
        "ml/train container main",
        "ml/train container helper",
    ]
    assert "  granted GPU 0, 1, shared (by namespaces.allow[0])" in paragraphs[1]
    assert "  device  c 195:1 rw  /dev/nvidia1" in paragraphs[1]
    assert f"  env     LD_LIBRARY_PATH={LIBRARIES}:/opt/lib" in paragraphs[1]
    assert "  granted no GPU, as it asked" in paragraphs[2]
    assert "hunter2" not in text


def test_how_its_gpus_are_joined(explain: Explain) -> None:
    _, text, _ = explain(POD)
    assert "  links   NV4 x1\n" in text
    assert explain(POD.replace("device=0,1;", "device=0;"))[1].count("  links") == 0
    _, main_, helper = documents(explain, POD)
    assert (main_["links"], helper["links"]) == ({"NV4": 1}, {})


def test_what_policy_keeps_near_the_gpus(explain: Explain) -> None:
    _, text, _ = explain(POD, policy='[placement]\nnuma = "both"\n')
    assert text.count("  cpuset  cpus 0-31,64-95\n  cpuset  mems 0\n") == 2
    assert "cpuset" not in explain(POD)[1]


def test_a_pod_as_json(explain: Explain) -> None:
    first, main_, helper = documents(explain, POD)
    assert (first["decision"], main_["decision"], helper["decision"]) == ("inject", "inject", "inject")
    assert (main_["namespace"], main_["pod"], main_["container"]) == ("ml", "train", "main")
    assert len(main_["gpu_uuids"]) == 2
    assert {device["path"] for device in main_["edits"]["devices"]} == {
        "/dev/nvidia0",
        "/dev/nvidia1",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    }
    assert (helper["mode"], helper["gpu_uuids"]) == ("none", [])


def test_a_pod_that_asks_for_nothing(explain: Explain) -> None:
    assert explain(PLAIN)[:2] == (Exit.OK, "default/web container nginx\n  passes untouched: no gpu annotation\n")
    (only,) = documents(explain, PLAIN)
    assert (only["decision"], only["edits"]["devices"]) == ("pass", [])


def test_a_refusal_is_1_and_its_sentence_the_one_of_run(explain: Explain) -> None:
    code, text, _ = explain(GREEDY)
    assert code == Exit.FINDING
    assert "  REFUSED nri-gpu [no-such-gpu]: " in text
    refused = [each for each in documents(explain, GREEDY) if each["decision"] == "refuse"]
    assert {each["code"] for each in refused} == {"no-such-gpu"}


def test_what_a_pod_requires_is_checked_on_a_simulated_node_too(explain: Explain) -> None:
    requiring = POD.replace("name: SECRET", "name: NVIDIA_REQUIRE_CUDA").replace("hunter2", "cuda>=99")
    code, text, _ = explain(requiring)
    assert code == Exit.FINDING
    assert "REFUSED nri-gpu [requirement-not-met]: NVIDIA_REQUIRE_CUDA needs cuda>=99; this node has CUDA 13.0" in text
    assert explain(requiring.replace("cuda>=99", "'cuda>=99 brand=nvidia,driver>=580'"))[0] == Exit.OK
    assert explain(requiring, policy="[requirements]\ncheck = false\n")[0] == Exit.OK


def test_the_ledger_goes_on_from_pod_to_pod(explain: Explain) -> None:
    taken = POD.replace("device=0,1;mode=shared", "all")
    code, text, _ = explain(taken + "---\n" + DEPLOYMENT)
    assert code == Exit.FINDING
    assert "[gpu-busy]" in text


@pytest.mark.parametrize(("manifest", "pod"), [(DEPLOYMENT, "inner-"), (CRONJOB, "pod-1")])
def test_templates(explain: Explain, manifest: str, pod: str) -> None:
    (only,) = documents(explain, manifest)
    assert (only["pod"], only["decision"]) == (pod, "inject")


def test_a_policy_decides(explain: Explain) -> None:
    code, text, _ = explain(POD, policy='[namespaces]\nallow = ["prod"]\n')
    assert code == Exit.FINDING
    assert "[not-allowed]" in text


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("", "is empty"),
        ("---\n---\n", "is empty"),
        ("a: [", "is not YAML"),
        ("- 1\n- 2\n", "document 1 holds no pod"),
        ("just text", "document 1 holds no pod"),
        (PLAIN + "---\nkind: Service\nspec: {ports: []}\n", "document 2 holds no pod"),
        ("spec: {containers: [], template: 5}", ""),
        ("metadata: text\nspec: {containers: [{name: a}]}", "metadata"),
        ("metadata: {annotations: [a]}\nspec: {containers: [{name: a}]}", "annotations"),
        ("spec: {containers: [{name: a}], initContainers: 5}", "initContainers"),
        ("spec: {containers: [{name: a, env: 5}]}", "env of container a is not a list"),
        ("spec: {containers: [a]}", "a container is not a mapping"),
        ("spec: {containers: [{}, {env: [1, {name: x}]}]}", ""),
        ("metadata: {annotations: {gpu.nri.io: 2}}\nspec: {containers: [{}]}", 'wants it in quotes: "2"'),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_what_is_no_manifest_is_2_and_never_a_traceback(explain: Explain, manifest: str, words: str) -> None:
    code, _, error = explain(manifest)
    assert code == (Exit.USAGE if words else Exit.OK)
    assert words in error
    assert "Traceback" not in error


def test_bytes_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pod.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["explain", str(tmp_path / "pod.yaml"), "--gpus", str(FOUR_GPUS)]) == Exit.USAGE
    assert "pod.yaml" in capsys.readouterr().err


def test_a_missing_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "none.yaml"), "--gpus", str(FOUR_GPUS)]) == Exit.USAGE
    assert "none.yaml" in capsys.readouterr().err


def test_from_standard_input(
    explain: Explain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PLAIN))
    assert main(["explain", "-", "--gpus", str(FOUR_GPUS)]) == Exit.OK
    assert "default/web container nginx" in capsys.readouterr().out


def test_a_broken_policy_is_78(explain: Explain) -> None:
    code, out, error = explain(POD, policy="[plugin]\nindex = 5\n")
    assert (code, out) == (Exit.CONFIGURATION, "")
    assert "policy.toml:2: plugin.index" in error


def test_a_broken_topology_is_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pod.yaml").write_text(POD)
    assert main(["explain", str(tmp_path / "pod.yaml"), "--gpus", str(tmp_path / "none.toml")]) == Exit.CONFIGURATION
    assert "none.toml" in capsys.readouterr().err


def test_without_yaml_it_says_what_to_install(explain: Explain, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:  # noqa: ANN401 - the signature of __import__
        if name == "yaml":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    code, _, error = explain(POD)
    assert code == Exit.USAGE
    assert "pip install 'nri-gpu[explain]'" in error


VOLUMES = """
kind: Pod
metadata: {name: drawing, annotations: {gpu.nri.io: "device=0;capabilities=graphics"}}
spec:
  volumes:
  - {name: own, emptyDir: {}}
  - {name: hosts, hostPath: {path: /dev}}
  containers:
  - name: main
    volumeMounts: [{name: NAME, mountPath: PATH}]
"""


@pytest.mark.parametrize(
    ("name", "path", "refused"),
    [("own", "/dev/dri", True), ("own", "/dev", True), ("hosts", "/dev", False), ("own", "/data", False)],
)
def test_volumes_count_as_they_would(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, path: str, refused: bool
) -> None:
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(VOLUMES.replace("NAME", name).replace("PATH", path))
    code = main(["explain", str(manifest), "--gpus", str(FOUR_GPUS)])
    assert ("[volume-in-the-way]" in capsys.readouterr().out) is refused
    assert code == (Exit.FINDING if refused else Exit.OK)


def test_extras_are_shown(explain: Explain) -> None:
    pod = POD.replace("device=0,1;mode=shared", "1;capabilities=graphics;extras=drm,profile,rdma,imex:3")
    gpus = ("--gpus", str(TOPOLOGIES / "hgx-h100.toml"))
    code, out, _ = explain(pod, *gpus)
    assert (code, "extras rdma, imex may not be asked for" in out) == (Exit.FINDING, True)
    allowed = '[extras]\nallowed = ["drm", "profile", "rdma", "imex"]\n'
    code, out, err = explain(pod.replace("drm,", ""), *gpus, policy=allowed)
    assert (code, err) == (Exit.OK, "")
    assert "device  c 1523:3 rw  /dev/nvidia-caps-imex-channels/channel3" in out
    assert "rlimit  RLIMIT_MEMLOCK=unlimited" in out
    assert "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf  from" in out
    code, out, _ = explain(pod.replace("drm,", ""), *gpus, "-o", "json", policy=allowed)
    check_shape(json.loads(out), EXPLAIN)
    assert code == Exit.OK


RULES = """
[[rule]]
name = "no-best-effort"
qos = "besteffort"
allow = false
[[rule]]
name = "vision"
labels = { team = "vision" }
runtime_handler = "gpu-*"
allow = true
[privileged]
action = "audit"
"""
LABELLED = """
kind: Pod
metadata: {name: train, labels: {team: vision}, annotations: {gpu.nri.io: "1"}}
spec:
  runtimeClassName: gpu-runc
  containers:
  - name: main
    resources: {requests: {cpu: 1}}
    securityContext: {privileged: true}
"""


def test_the_rule_that_decides_is_named(explain: Explain) -> None:
    code, text, _ = explain(LABELLED, policy=RULES)
    assert code == Exit.OK
    assert '(by rule[1] "vision")' in text
    assert "  note    it is privileged" in text
    code, text, _ = explain(LABELLED.replace("cpu: 1", "example.com/x: 1"), policy=RULES)
    assert code == Exit.FINDING
    assert 'rule[0] "no-best-effort" in' in text


CLASSES = {
    "none": ("{}", "besteffort"),
    "requests": ("{requests: {memory: 1Gi}}", "burstable"),
    "half the limits": ("{limits: {cpu: 1}}", "burstable"),
    "limits": ("{limits: {cpu: 1, memory: 1Gi}}", "guaranteed"),
    "limits and requests": ("{limits: {cpu: 1, memory: 1Gi}, requests: {cpu: 1}}", "guaranteed"),
    "lower requests": ("{limits: {cpu: 2, memory: 1Gi}, requests: {cpu: 1}}", "burstable"),
    "nothing on purpose": ("{requests: {cpu: 0}}", "besteffort"),
    "nonsense": ("[1]", "besteffort"),
}


@pytest.mark.parametrize(("resources", "qos"), CLASSES.values(), ids=CLASSES)
def test_the_service_class_is_the_kubelet_s(explain: Explain, resources: str, qos: str) -> None:
    manifest = LABELLED.replace("{requests: {cpu: 1}}", resources)
    policy = f'[namespaces]\nallow = []\n[[rule]]\nqos = "{qos}"\nallow = true\n'
    assert explain(manifest, policy=policy)[0] == Exit.OK
