"""`nri-gpu explain`: every manifest that holds pods, decided as `run` would, and every one that does not."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from tests.support import compat
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.driver_root import make_driver_root
from tests.support.loading import LIBRARIES
from tests.unit.cli.conftest import Explain, NriGpuCall, containers

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
DEPLOYMENT = """
kind: Deployment
metadata: {name: outer}
spec:
  template:
    metadata: {annotations: {gpu.nri.io: "1"}}
    spec: {containers: [{name: main}]}
"""


def test_a_pod_as_text(explain: Explain) -> None:
    done = explain(POD)
    assert (done.code, done.err) == (Exit.OK, "")
    headline, first, main, helper = done.out.split("\n\n")
    assert headline.startswith("SIMULATED: ")
    heads = [each.splitlines()[0] for each in (first, main, helper)]
    assert heads == [f"ml/train container {name}" for name in ("first", "main", "helper")]
    assert "  granted GPU 0, 1, shared (by namespaces.allow[0])" in main
    assert "  device  c 195:1 rw  /dev/nvidia1" in main
    assert f"  env     LD_LIBRARY_PATH={LIBRARIES}:/opt/lib" in main
    assert "  links   NV4 x1\n" in main
    assert "  granted no GPU, as it asked" in helper
    assert "hunter2" not in done.out
    assert "  links" not in explain(POD.replace("device=0,1;", "device=0;")).out
    none = {"decision": "inject", "mode": "none", "gpu_uuids": [], "links": {}}
    assert containers(explain, POD)[2].items() >= none.items()


def test_cpus_and_memory_near_the_gpus(explain: Explain) -> None:
    near = explain(POD, policy='[placement]\nnuma = "both"\n').out
    assert near.count("  cpuset  cpus 0-31,64-95\n  cpuset  mems 0\n") == 2
    assert "cpuset" not in explain(POD).out


def test_requirements_are_checked_on_a_simulated_node_too(explain: Explain) -> None:
    requiring = POD.replace("name: SECRET", "name: NVIDIA_REQUIRE_CUDA").replace("hunter2", "cuda>=99")
    done = explain(requiring)
    assert done.code == Exit.FINDING
    why = "REFUSED nri-gpu [requirement-not-met]: NVIDIA_REQUIRE_CUDA needs cuda>=99; this node has CUDA 13.0"
    assert why in done.out
    assert explain(requiring.replace("cuda>=99", "'cuda>=99 brand=nvidia,driver>=580'")).code == Exit.OK
    assert explain(requiring, policy="[requirements]\ncheck = false\n").code == Exit.OK


def test_one_ledger_for_all_pods_and_the_policy_of_the_file(explain: Explain) -> None:
    done = explain(POD.replace("device=0,1;mode=shared", "all") + "---\n" + DEPLOYMENT)
    assert (done.code, "[gpu-busy]" in done.out) == (Exit.FINDING, True)
    done = explain(POD, policy='[namespaces]\nallow = ["prod"]\n')
    assert (done.code, "[not-allowed]" in done.out) == (Exit.FINDING, True)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("", "is empty"),
        ("---\n---\n", "is empty"),
        ("a: [", "is not YAML"),
        ("- 1\n- 2\n", "document 1 holds no pod"),
        ("just text", "document 1 holds no pod"),
        ("kind: Service\n---\nkind: List\nitems: []\n", "documents 1 to 2 hold no pod"),
        ("spec: {containers: [], template: 5}", ""),
        ("metadata: text\nspec: {containers: [{name: a}]}", "metadata"),
        ("metadata: {annotations: [a]}\nspec: {containers: [{name: a}]}", "annotations"),
        ("spec: {containers: [{name: a}], initContainers: 5}", "initContainers"),
        ("spec: {containers: [{name: a, env: 5}]}", "env of container a is not a list"),
        ("spec: {containers: [a]}", "a container is not a mapping"),
        ("spec: {containers: [{}, {env: [1, {name: x}]}]}", ""),
        ("metadata: {annotations: {gpu.nri.io: 2}}\nspec: {containers: [{}]}", 'wants it in quotes: "2"'),
        ("metadata: {name: LONG, labels: {? LONG : LONG}}\nspec: {containers: [{name: LONG}]}", ""),
        ("metadata: {annotations: {? LONG : LONG}}\nspec: {containers: [{}]}", 'wants it in quotes: "0xfff'),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_what_is_no_manifest_is_78_and_never_a_traceback(explain: Explain, manifest: str, words: str) -> None:
    done = explain(manifest.replace("LONG", f"0x{'f' * 5000}"))  # Python writes no decimal number of that length
    assert done.code == (Exit.CONFIGURATION if words else Exit.OK)
    assert words in done.err
    assert "Traceback" not in done.err


HOSTILE = {
    "a name": 'metadata: {name: "NAME"}\nspec: {containers: [{}]}',
    "a container": 'spec: {containers: [{name: "NAME"}]}',
    "a variable": 'metadata: {annotations: {gpu.nri.io: "1"}}\n'
    'spec: {containers: [{env: [{name: LD_LIBRARY_PATH, value: "NAME"}]}]}',
    "an error": 'spec: {containers: [{name: "NAME", env: 5}]}',
    "an annotation": 'metadata: {annotations: {"NAME": 5}}\nspec: {containers: [{}]}',
}


@pytest.mark.parametrize("manifest", HOSTILE.values(), ids=HOSTILE)
def test_what_a_terminal_would_obey_is_escaped(explain: Explain, manifest: str) -> None:
    """Escapes, and a line that looks like one of ours."""
    done = explain(manifest.replace("NAME", r"\e[2J\nprod/train container main"))
    said = done.out + done.err
    assert ("\x1b" in said, "\nprod/train" in said) == (False, False)
    assert r"\x1b[2J\nprod/train" in said


def test_what_cannot_be_read(explain: Explain, tmp_path: Path, nri_gpu: NriGpuCall) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("bytes.yaml", "none.yaml"):
        done = nri_gpu("explain", tmp_path / name, "--gpus", FOUR_GPUS)
        assert (done.code, name in done.err) == (Exit.CONFIGURATION, True)
    done = explain(POD, policy="[plugin]\nindex = 5\n")
    assert (done.code, done.out, "policy.toml:2: plugin.index" in done.err) == (Exit.CONFIGURATION, "", True)
    done = explain(POD, "--gpus", tmp_path / "none.toml")
    assert (done.code, "none.toml" in done.err) == (Exit.CONFIGURATION, True)


def test_from_standard_input(nri_gpu: NriGpuCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PLAIN))
    done = nri_gpu("explain", "-", "--gpus", FOUR_GPUS)
    assert (done.code, "default/web container nginx" in done.out) == (Exit.OK, True)


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
def test_volumes_count_as_on_a_node(explain: Explain, name: str, path: str, refused: bool) -> None:
    done = explain(VOLUMES.replace("NAME", name).replace("PATH", path))
    assert ("[volume-in-the-way]" in done.out) is refused
    assert done.code == (Exit.FINDING if refused else Exit.OK)


def test_extras(explain: Explain) -> None:
    pod = POD.replace("device=0,1;mode=shared", "1;capabilities=graphics;extras=drm,profile,rdma,imex:3")
    gpus = ("--gpus", TOPOLOGIES / "hgx-h100.toml")
    done = explain(pod, *gpus)
    assert (done.code, "extras rdma, imex may not be asked for" in done.out) == (Exit.FINDING, True)
    allowed = '[extras]\nallowed = ["drm", "rdma", "imex"]\n'
    done = explain(pod.replace("drm,", ""), *gpus, policy=allowed)
    assert (done.code, done.err) == (Exit.OK, "")
    assert "device  c 1523:3 rw  /dev/nvidia-caps-imex-channels/channel3" in done.out
    assert "rlimit  RLIMIT_MEMLOCK=unlimited" in done.out
    assert "extra profile no longer exists" in done.out
    assert containers(explain, pod.replace("drm,", ""), *gpus, policy=allowed)


def test_compatibility_packages(explain: Explain, tmp_path: Path) -> None:
    compat.make_package(tmp_path / "packages", "14.0", "600.10.01", compat.note("14.0", (550, 580)))
    policy = f'[compat]\ndir = "{tmp_path}/packages"\n'
    wanting = POD.replace("name: SECRET", "name: CUDA_VERSION").replace("hunter2", "14.0.1")
    root = make_driver_root(tmp_path / "root", "580.95.05")
    done = explain(wanting, "--driver-root", root, policy=policy)
    assert done.code == Exit.OK
    assert "/580.95.05-" in done.out
    assert "  compat  CUDA 14.0 by libcuda 600.10.01, because CUDA 14.0 is wanted\n" in done.out
    assert "  mount   /opt/nri-gpu/compat  from " in done.out
    assert f"  env     LD_LIBRARY_PATH=/opt/nri-gpu/compat:{LIBRARIES}:/opt/lib\n" in done.out
    assert containers(explain, wanting, policy=policy)[1]["compat"].startswith("CUDA 14.0 by ")
    disabled = wanting.replace("14.0.1", "'14.1'\n    - {name: NVIDIA_DISABLE_REQUIRE, value: '1'}")
    assert "  compat  CUDA 14.1 is wanted, and no package serves (" in explain(disabled, policy=policy).out


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


def test_a_pod_in_a_virtual_machine_is_refused(explain: Explain) -> None:
    done = explain(LABELLED.replace("gpu-runc", "kata-qemu"))
    assert done.code == Exit.FINDING
    assert (
        '  REFUSED nri-gpu [bad-runtime]: its pod\'s runtime handler "kata-qemu" starts a virtual machine' in done.out
    )
    assert 'a manifest does not show the handler of RuntimeClass "kata-qemu": that name is taken for it' in done.out
    assert explain(LABELLED.replace("gpu-runc", "kata-qemu"), policy="[runtimes]\nrefuse = []\n").code == Exit.OK


def test_the_rule_that_decides_is_named(explain: Explain) -> None:
    done = explain(LABELLED, policy=RULES)
    assert done.code == Exit.OK
    assert '(by rule[1] "vision")' in done.out
    assert "  note    it is privileged" in done.out
    done = explain(LABELLED.replace("cpu: 1", "example.com/x: 1"), policy=RULES)
    assert (done.code, 'rule[0] "no-best-effort" in' in done.out) == (Exit.FINDING, True)


CLASSES = {
    "none": ("{}", "besteffort"),
    "requests": ("{requests: {memory: 1Gi}}", "burstable"),
    "half the limits": ("{limits: {cpu: 1}}", "burstable"),
    "limits": ("{limits: {cpu: 1, memory: 1Gi}}", "guaranteed"),
    "limits and requests": ("{limits: {cpu: 1, memory: 1Gi}, requests: {cpu: 1}}", "guaranteed"),
    "lower requests": ("{limits: {cpu: 2, memory: 1Gi}, requests: {cpu: 1}}", "burstable"),
    "zero": ("{requests: {cpu: 0}}", "besteffort"),
    "zero of a limit": ("{limits: {cpu: 1, memory: 1Gi}, requests: {cpu: 0m}}", "burstable"),
    "written otherwise": (
        "{limits: {cpu: 1, memory: 1Gi}, requests: {cpu: 1000m, memory: '1.073741824e9'}}",
        "guaranteed",
    ),
    "a tenth": ("{limits: {cpu: 0.1, memory: 1e3}, requests: {cpu: 100m, memory: 1k}}", "guaranteed"),
    "nonsense": ("[1]", "besteffort"),
}


@pytest.mark.parametrize(("resources", "qos"), CLASSES.values(), ids=CLASSES)
def test_the_qos_class_is_the_kubelets(explain: Explain, resources: str, qos: str) -> None:
    policy = f'[namespaces]\nallow = []\n[[rule]]\nqos = "{qos}"\nallow = true\n'
    assert explain(LABELLED.replace("{requests: {cpu: 1}}", resources), policy=policy).code == Exit.OK


OF_PODS = {
    "instead of containers'": ("{limits: {cpu: 1, memory: 1Gi}}", "{}", "guaranteed"),
    "empty": ("{}", "{requests: {cpu: 1}}", "besteffort"),
    "half": ("{limits: {cpu: 1}}", "{limits: {cpu: 1, memory: 1Gi}}", "burstable"),
    "containers request less": ("{limits: {cpu: 2, memory: 1Gi}}", "{requests: {cpu: 1}}", "burstable"),
    "containers request as much": ("{limits: {cpu: 2, memory: 1Gi}}", "{requests: {cpu: 2000m}}", "guaranteed"),
    "requests alone": ("{requests: {cpu: 1}}", "{}", "burstable"),
    "none": ("null", "{limits: {cpu: 1, memory: 1Gi}}", "guaranteed"),
}


@pytest.mark.parametrize(("of_pod", "of_container", "qos"), OF_PODS.values(), ids=OF_PODS)
def test_resources_of_a_pod_decide_its_qos_class(explain: Explain, of_pod: str, of_container: str, qos: str) -> None:
    policy = f'[namespaces]\nallow = []\n[[rule]]\nqos = "{qos}"\nallow = true\n'
    manifest = LABELLED.replace("{requests: {cpu: 1}}", of_container) + f"  resources: {of_pod}\n"
    assert explain(manifest, policy=policy).code == Exit.OK


SIDECAR = "{name: proxy, restartPolicy: Always, resources: {requests: {cpu: 1}}}"
INIT = "{name: fetch, resources: {requests: {cpu: 2}}}"
# The pod is limited to 3 CPUs, and its main container requests 1 (kubernetes: AggregateContainerRequests).
ORDERS = {
    "a sidecar before an init container": (f"{SIDECAR}, {INIT}", "guaranteed"),
    "a sidecar behind it": (f"{INIT}, {SIDECAR}", "burstable"),
    "two sidecars": (f"{SIDECAR}, {SIDECAR}", "guaranteed"),
    "a sidecar between two": (f"{INIT}, {SIDECAR}, {INIT}", "guaranteed"),
    "two init containers": (f"{INIT}, {INIT}", "burstable"),
}


@pytest.mark.parametrize(("init", "qos"), ORDERS.values(), ids=ORDERS)
def test_an_init_container_runs_beside_the_sidecars_before_it(explain: Explain, init: str, qos: str) -> None:
    policy = f'[namespaces]\nallow = []\n[[rule]]\nqos = "{qos}"\nallow = true\n'
    of_pod = f"  initContainers: [{init}]\n  resources: {{limits: {{cpu: 3, memory: 1Gi}}}}\n"
    granted = explain(LABELLED + of_pod, "-o", "json", policy=policy).document["containers"][-1]
    assert granted["decision"] == "inject"


NVIDIAS = """
kind: Pod
metadata: {name: encoder, namespace: ml, annotations: {gpu.nri.io: "device=0"}}
spec:
  runtimeClassName: nvidia
  containers:
  - name: main
    env:
    - {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,video,graphics"}
    - {name: SECRET, value: hunter2}
"""


def test_a_pod_that_comes_from_nvidias_runtime(explain: Explain) -> None:
    """What its variable names counts where policy says so, and what does not come is said; it is injected once."""
    done = explain(NVIDIAS)
    assert done.code == Exit.OK
    assert "  env     NVIDIA_VISIBLE_DEVICES=void\n  env     NRI_GPU_UUIDS=GPU-" in done.out
    note = 'NVIDIA_DRIVER_CAPABILITIES="compute,video,graphics" also names video, graphics: environment.driver_capabi'
    assert f"  note    {note}" in done.out
    assert "nvidia-modeset" not in done.out
    asking = '[environment]\ndriver_capabilities = "ask"\n[capabilities]\nallowed = ["compute", "graphics"]\n'
    (line,) = containers(explain, NVIDIAS, policy=asking)
    (said,) = [each for each in line["notes"] if "also names" in each]
    assert '" also names video: capabilities video may not be asked for: capabilities.allowed in ' in said
    assert "/dev/nvidia-modeset" in {each["path"] for each in line["edits"]["devices"]}
    assert "hunter2" not in done.out
    unknown = explain(NVIDIAS.replace('value: "compute,video,graphics"', "valueFrom: {fieldRef: {fieldPath: a}}"))
    assert "NVIDIA_DRIVER_CAPABILITIES is not known: a manifest does not show the kubelet's value" in unknown.out
