"""Which pods a manifest has, what they are called, and what of them `nri-gpu explain` cannot know."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from tests.unit.cli.conftest import Explain, NriGpuCall, containers

MANIFESTS = Path(__file__).parents[2] / "fixtures/manifests"
TEMPLATE = '{metadata: {annotations: {gpu.nri.io: "1"}}, spec: {containers: [{name: main}]}}'
NAMED = "{name: web, namespace: ml}"


def job(metadata: str = NAMED, kind: str = "Job") -> str:
    return f"kind: {kind}\nmetadata: {metadata}\nspec: {{template: {TEMPLATE}}}\n"


def pods(explain: Explain, manifest: str, *options: str) -> list[str]:
    return [f"{line['namespace']}/{line['pod']}" for line in containers(explain, manifest, *options)]


def notes(explain: Explain, manifest: str, policy: str = "") -> str:
    return "\n".join(note for line in containers(explain, manifest, policy=policy) for note in line["notes"])


OWNERS = {
    "Job": (job(), "ml/web-xxxxx"),
    "DaemonSet": (job(kind="DaemonSet"), "ml/web-xxxxx"),
    "StatefulSet": (job(kind="StatefulSet"), "ml/web-0"),
    "Deployment": (job(kind="Deployment"), "ml/web-xxxxxxxxxx-xxxxx"),
    "CronJob": (
        f"kind: CronJob\nmetadata: {NAMED}\nspec: {{jobTemplate: {{spec: {{template: {TEMPLATE}}}}}}}",
        "ml/web-xxxxx",
    ),
    "PodTemplate": (f"kind: PodTemplate\nmetadata: {NAMED}\ntemplate: {TEMPLATE}", "ml/web-xxxxx"),
    "an object that is a pod": (f"kind: Revision\nmetadata: {NAMED}\nspec: {{containers: [{{}}]}}", "ml/web-xxxxx"),
    "a generated Job": (job("{generateName: run-}"), "some/run-xxxxx-xxxxx"),
    "a generated pod": ("kind: Pod\nmetadata: {generateName: run-}\nspec: {containers: [{}]}", "some/run-xxxxx"),
    "a long name": (job(f"{{name: {'a' * 60}}}", "Deployment"), f"some/{'a' * 58}xxxxx"),
    "without a name": (f"spec: {{template: {TEMPLATE}}}", "some/pod-1"),
    "the outermost namespace": (
        job().replace("{annotations", "{namespace: inner, name: inner, annotations"),
        "ml/web-xxxxx",
    ),
    "a template's namespace": (
        job("{name: web}").replace("{annotations", "{namespace: inner, annotations"),
        "inner/web-xxxxx",
    ),
}


@pytest.mark.parametrize(("manifest", "pod"), OWNERS.values(), ids=OWNERS)
def test_names_are_those_that_the_controller_gives(explain: Explain, manifest: str, pod: str) -> None:
    assert pods(explain, manifest, "-n", "some") == [pod]


def test_rules_pools_and_limits_follow_the_namespace(explain: Explain) -> None:
    assert explain(job(), policy='[namespaces]\nallow = ["ml"]\n').code == Exit.OK
    assert "[not-allowed]" in explain(job(), policy='[namespaces]\ndeny = ["ml"]\n').out
    assert "[not-allowed]" in explain(job("{name: web}"), policy='[namespaces]\nallow = ["ml"]\n').out
    assert explain(job("{name: web}"), "--namespace", "ml", policy='[namespaces]\nallow = ["ml"]\n').code == Exit.OK
    assert (
        explain(job(), policy='[[pool]]\nname = "all"\ndevice = ["0", "1", "2", "3"]\nnamespaces = ["ml"]\n').code == 0
    )
    one = "[limits]\ngpus_per_namespace = 1\n"
    other = job("{name: web, namespace: other}")
    assert (explain(f"{job()}---\n{other}", policy=one).code, explain(f"{job()}---\n{job()}", policy=one).code) == (
        0,
        1,
    )


@pytest.mark.parametrize(
    ("pattern", "noted"),
    [
        ("web-*", False),
        ("*", False),
        ("web*", False),
        ("other-*", False),
        ("web", False),
        ("web-xxx*", True),
        ("web-?????", True),
        ("web-worker-*", True),
        ("web-abcde", True),
        ("*-gpu", True),
    ],
)
def test_a_rule_that_matches_by_what_is_made_up_is_noted(explain: Explain, pattern: str, noted: bool) -> None:
    policy = f'[[rule]]\nname = "some"\npod = "{pattern}"\nallow = true\n'
    assert ('rule[0] "some" depends on a part of the pod\'s name' in notes(explain, job(), policy)) is noted
    assert "depends on" not in notes(explain, job(kind="StatefulSet"), policy)
    assert "depends on" not in notes(explain, job(), f'[[rule]]\nnamespace = "ml"\nallow = true\n{policy}')
    assert "depends on" not in notes(explain, job(), policy.replace("allow", 'container = "other"\nallow'))


INIT = """
kind: Pod
metadata: {name: a, annotations: {gpu.nri.io: "1"}}
spec:
  initContainers: [{name: one}, {name: two}, {name: three}]
  containers: [{name: main}]
"""
OTHER = '---\nkind: Pod\nmetadata: {name: b, annotations: {gpu.nri.io: "1"}}\nspec: {containers: [{name: main}]}\n'
ONE = "[limits]\ngpus_per_pod = 1\n"


def test_init_containers_end_and_sidecars_stay(explain: Explain) -> None:
    assert explain(INIT, policy=ONE).code == Exit.OK
    sidecar = INIT.replace("{name: two}", "{name: two, restartPolicy: Always}")
    decisions = [line["decision"] for line in containers(explain, sidecar, policy=ONE)]
    assert decisions == ["inject", "inject", "refuse", "refuse"]
    first, second = (containers(explain, each + OTHER)[-1]["gpu_uuids"] for each in (INIT, sidecar))
    assert first != second


def test_a_wait_after_a_release_is_noted(explain: Explain) -> None:
    ends = INIT.replace("gpu.nri.io:", "gpu.nri.io/container.main: none, gpu.nri.io:")
    assert "this container has to wait" in notes(explain, ends + OTHER)
    assert "has to wait" not in notes(explain, ends + OTHER, "[handover]\nwait = false\n") + notes(explain, ends)
    shared = (ends + OTHER).replace('"1"', '"1;mode=shared"')
    assert "has to wait" not in notes(explain, shared)


def test_what_has_no_pod_is_passed_over(explain: Explain) -> None:
    service = "kind: Service\nspec: {ports: []}\n---\n"
    manifest = f"{service}{service}text\n---\n{job()}"
    assert pods(explain, manifest) == ["ml/web-xxxxx"]
    said = "3 documents without a pod are passed over: 2 Service, 1 without a kind"
    assert explain(manifest, "-o", "json").document["notes"] == [said]
    assert explain(manifest).out.endswith(f"pod.yaml\n  note    {said}\n")
    in_a_list = "kind: List\nitems:\n- {kind: Service}\n- {kind: Pod, spec: {containers: [{}]}}\n"
    assert explain(in_a_list, "-o", "json").document["notes"] == ["1 document without a pod is passed over: 1 Service"]
    nested = in_a_list.replace("- {kind: Service}", "- {kind: List, items: [&s {kind: Service}, {kind: Role}]}\n- *s")
    (said,) = explain(nested, "-o", "json").document["notes"]
    assert said == "3 documents without a pod are passed over: 2 Service, 1 Role"
    assert "document 1 holds no pod" in explain("&l {kind: List, items: [*l]}").err
    repeated = f"kind: List\nitems: [&j {{kind: Job, spec: {{template: {TEMPLATE}}}}}, *j]\n"
    assert "passed over" not in explain(repeated).out
    assert "is passed over: 1 List\n" in explain(f"kind: List\nitems: []\n---\n{job()}").out


FORMS = {
    "helm": ["inference/serving-xxxxxxxxxx-xxxxx"] * 3
    + ["inference/cache-0", "default/exporter-xxxxx", "inference/serving-smoke"],
    "jobset": ["ml/pretrain-xxxxx"] * 4,
    "kubectl": ["ml/prepared"] * 4 + ["ml/evaluate"] * 3 + ["ml/wrong", "default/plain"],
    "kubeflow": ["vision/finetune-xxxxx"] * 2 + ["default/torch-distributed-xxxxx", "vision/lab-xxxxx"],
    "kueue": ["ml/sample-xxxxx-xxxxx", "batch/nightly-xxxxx"],
}


@pytest.mark.parametrize("form", FORMS)
def test_manifests_in_the_form_of_others(explain: Explain, form: str) -> None:
    """Decisions: tests/conformance/test_explain.py."""
    assert pods(explain, (MANIFESTS / f"{form}.yaml").read_text()) == FORMS[form]


def test_an_annotation_around_a_template_is_noted(explain: Explain) -> None:
    annotated = "{name: web, annotations: {gpu.nri.io: '1', other: x}}"
    without = job(annotated, "Deployment").replace('gpu.nri.io: "1"', "a: b")
    said = "annotation gpu.nri.io of Deployment web has no effect: requests are read from the annotations of the pod"
    assert notes(explain, without).startswith(said)
    assert notes(explain, without).count("no effect") == 1
    assert "no effect" not in notes(explain, job(annotated))


ENV = (
    'kind: Pod\nmetadata: {name: a, annotations: {gpu.nri.io: "REQUEST"}}\nspec: {containers: [{name: b, SETTINGS}]}\n'
)
NOT_SHOWN = {
    "valueFrom": ("env: [{name: LD_LIBRARY_PATH, valueFrom: {fieldRef: {}}}]", "LD_LIBRARY_PATH is not known"),
    "put together": ("env: [{name: NVIDIA_REQUIRE_CUDA, value: cuda>=$(V)}]", "NVIDIA_REQUIRE_CUDA is not known"),
    "envFrom": ("envFrom: [{configMapRef: {name: c}}]", "which variables come by envFrom"),
    "the kubelet's": ("resources: {limits: {nvidia.com/gpu: 1}}", "the kubelet allocates to it (nvidia.com/gpu)"),
    "a claim's": ("resources: {claims: [{name: c}]}", "which devices its ResourceClaims bring"),
}


@pytest.mark.parametrize(("settings", "said"), NOT_SHOWN.values(), ids=NOT_SHOWN)
def test_what_a_manifest_does_not_show_is_noted(explain: Explain, settings: str, said: str) -> None:
    for request in ("1", "none"):
        assert said in notes(explain, ENV.replace("SETTINGS", settings).replace("REQUEST", request))


def test_variables_of_an_image_are_noted_where_they_count(explain: Explain) -> None:
    def said(request: str, policy: str = "") -> bool:
        manifest = ENV.replace("SETTINGS", "env: [{name: T, valueFrom: {}}]").replace("REQUEST", request)
        return "the variables of its image" in notes(explain, manifest, policy)

    assert (said("1"), said("none")) == (True, False)
    assert said("none", '[environment]\nmay_ask = ["default"]\n')
    assert not said("none", '[environment]\nmay_ask = ["other"]\n')
    assert said("none", '[environment]\ndisarm = "all"\n')


def test_variables_are_read_as_on_a_node(explain: Explain) -> None:
    """A requirement past what is checked is refused, and a variable that means nothing to us arms nothing."""
    long = " ".join(["cuda>=12.0"] * 3000)
    manifest = ENV.replace("SETTINGS", f"env: [{{name: NVIDIA_REQUIRE_CUDA, value: '{long}'}}]").replace("REQUEST", "1")
    assert "[requirement-not-met]" in explain(manifest).out


def test_users_of_mps_count(explain: Explain) -> None:
    policy = "[mps]\nenabled = true\n"
    pod = ENV.replace("REQUEST", "device=0;mode=mps")
    root, other = (pod.replace("SETTINGS", f"securityContext: {{runAsUser: {uid}}}") for uid in (1000, 2000))
    assert explain(f"{root}---\n{root}", policy=policy).code == Exit.OK
    assert "user" in containers(explain, f"{root}---\n{other}", policy=policy)[1]["reason"]


@pytest.mark.parametrize(("volume", "code"), [("hostPath: {path: /dev/shm}", 0), ("emptyDir: {}", 1)])
def test_the_hosts_own_shm_is_in_no_way(explain: Explain, volume: str, code: int) -> None:
    pod = ENV.replace("REQUEST", "device=0;mode=mps").replace(
        "SETTINGS", "volumeMounts: [{name: s, mountPath: /dev/shm}]"
    )
    mounting = pod.replace("spec: {", f"spec: {{volumes: [{{name: s, {volume}}}], ")
    assert explain(mounting, policy="[mps]\nenabled = true\n").code == code


def test_json_is_read_as_json(explain: Explain) -> None:
    """YAML takes no escaped surrogates or slashes; braces alone make no JSON."""
    described = {"kind": "Job", "metadata": {"name": "web", "namespace": "ml"}, "note": "\N{ROCKET} a/b"}
    text = json.dumps(described | {"spec": {"template": {"spec": {"containers": [{}]}}}})
    assert pods(explain, text.replace("/", r"\/")) == ["ml/web-xxxxx"]
    assert pods(explain, "{metadata: {name: flow}, spec: {containers: [{}]}}\n---\n" + job()) == [
        "default/flow",
        "ml/web-xxxxx",
    ]
    assert "is not YAML" in explain("{").err
    for between in ("", "\n", " \n\n"):
        assert pods(explain, between.join([text.replace("/", r"\/")] * 3) + between) == ["ml/web-xxxxx"] * 3
    assert "is not YAML" in explain(text + "{").err


LINE = "- {kind: Pod, metadata: {name: p}, spec: {containers: [{}]}}\n"
ARGS = ", ".join(['"--some=argument"'] * 390)
PODS = ", ".join([f'{{"spec": {{"containers": [{{"args": [{ARGS}]}}]}}}}'] * 2001)  # just below 16 MB


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("# " + "x" * 16_000_000, "is larger than 16 MB"),
        ("kind: List\nitems:\n" + LINE * 2001, "holds more than 2,000 pods"),
        ("---\n".join([job()] * 2001), "holds more than 2,000 pods"),
        (f"spec:\n containers: [{'{}, ' * 10_001}]", "holds more than 10,000 containers"),
        ("[" * 1_000_000, "nests values more than 200 levels deep"),
        ("{a: " * 1_000_000, "nests values more than 200 levels deep"),
        ('{"a": ' * 201 + "[]" + "}" * 201, "nests values more than 200 levels deep"),
        ('{"a": ' * 5_000 + "[]" + "}" * 5_000, "nests values more than 200 levels deep"),
        (f'{{"kind": "List", "items": [{PODS}]}}', "holds more than 2,000 pods"),
    ],
    ids=[
        "bytes",
        "a list of pods",
        "pods",
        "containers",
        "deep lists",
        "deep mappings",
        "JSON",
        "deep JSON",
        "pods in JSON",
    ],
)
def test_what_is_too_much_names_the_bound_within_a_second(explain: Explain, manifest: str, words: str) -> None:
    began = time.process_time()
    done = explain(manifest)
    assert (done.code, done.out, words in done.err) == (Exit.CONFIGURATION, "", True)
    assert time.process_time() - began < 1


def test_standard_input_is_read_up_to_the_bound(nri_gpu: NriGpuCall, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/zero").open() as endless:
        monkeypatch.setattr("sys.stdin", endless)
        assert "is larger than 16 MB" in nri_gpu("explain", "-").err
    assert "is larger than 16 MB" in nri_gpu("explain", "/dev/zero").err


def test_few_pods_among_many_documents(explain: Explain) -> None:
    many = "kind: ConfigMap\n---\n" * 9_990 + "---\n".join([job()] * 10)
    assert "\n  note    9,990 documents without a pod are passed over: 9,990 ConfigMap\n" in explain(many).out


LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20))
MERGES = "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 20))
ITSELF = "kind: Job\nmetadata: {name: web}\nspec: &s\n  template: &t {spec: {template: *t, jobTemplate: *s}}\n"


def test_each_mapping_is_visited_once(explain: Explain) -> None:
    once = f"a0: &a0 {{template: {TEMPLATE}}}\n{LAUGHS}"
    assert pods(explain, once) == ["default/pod-1"]
    assert "document 1 holds no pod" in explain(ITSELF).err
    assert pods(explain, ITSELF.replace("*s", "*s, containers: [{}]")) == ["default/web-xxxxx"]
    assert "merge keys" in explain(f"a0: &a0 {{b: 1}}\n{MERGES}").err
    both = f"kind: MPIJob\nmetadata: {{name: web}}\nspec: {{one: {{template: &t {TEMPLATE}}}, two: {{template: *t}}}}"
    assert len(pods(explain, both)) == 1
    assert "that YAML aliases repeat is explained once" in explain(both).out
    assert "aliases" not in explain("a: [&a {b: 1}, *a]\n" + job()).out
    merged = "a: &a {namespace: ml, name: a}\n" + job("{<<: *a, name: b}")
    assert pods(explain, merged) == ["ml/b-xxxxx"]


def test_plain_words_that_are_text_to_kubernetes(explain: Explain) -> None:
    """A date, and the `=` in the enumerations of some CustomResourceDefinitions."""
    assert pods(explain, f"kind: Definition\nenum: [=, '!=']\n---\n{job()}") == ["ml/web-xxxxx"]
    dated = job().replace("gpu.nri.io:", "built: 2026-11-01, gpu.nri.io:")
    assert explain(dated).code == Exit.OK
