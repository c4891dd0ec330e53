"""What `nri-gpu explain` says of pods to which a kubelet allocates devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nri_gpu.domain.errors import Exit
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES, UUIDS
from tests.unit.cli.conftest import Explain, containers

DOCS = Path(__file__).parents[3] / "docs"
# As the chart writes it; the chart says `--kubelet`.
CLUSTER = '[kubelet]\nenabled = true\npool = "cluster"\n[[pool]]\nname = "cluster"\nmodel = ["*"]\n'
ENABLED = "[kubelet]\nenabled = true\n"
KINDS = f'{ENABLED}resources = {{"nvidia.com/l40s" = "l40s"}}\n[[pool]]\nname = "l40s"\ndevice = ["2", "3"]\n'
INJECTING = '[kubelet]\ninject_for = ["nvidia.com/*"]\n'
Line = dict[str, Any]


def pod(name: str, *of: str, annotation: str = "", init: str = "") -> str:
    annotated = f"annotations: {{gpu.nri.io: '{annotation}'}}, " if annotation else ""
    spec = f"initContainers: [{init}], containers: [{', '.join(of)}]"
    return f"{{kind: Pod, metadata: {{{annotated}name: {name}}}, spec: {{{spec}}}}}\n---\n"


def limited(count: int, name: str = "main", resource: str = "nvidia.com/gpu", more: str = "") -> str:
    return f"{{name: {name}, {more}resources: {{limits: {{{resource}: {count}}}}}}}"


def said(line: Line) -> str:
    """`exclusive 0,1`: how and which GPUs; or `pass`, or the code of a refusal."""
    if line["decision"] != "inject":
        return str(line.get("code", "pass"))
    return f"{line['mode']} {','.join(str(UUIDS.index(uuid)) for uuid in line['gpu_uuids'])}"


@pytest.mark.parametrize("policy", ["", ENABLED, CLUSTER], ids=["no policy", "enabled", "the chart's"])
def test_the_first_manifest_of_the_manual_gets_the_kubelets_two(explain: Explain, policy: str) -> None:
    text = (DOCS / "kubernetes.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (line,) = containers(explain, text, policy=policy)
    assert said(line) == "exclusive 0,1"
    assert ("run --kubelet" in str(line["notes"])) is (not policy)


NAMING = "{name: names, env: [{name: NVIDIA_VISIBLE_DEVICES, value: '0'}]}"
SIDECAR = limited(1, "proxy", more="restartPolicy: Always, ")
# Policy, pods, and what each container gets of four GPUs, of which 0 and 1, and 2 and 3, are linked.
PLAYED = {
    "limits alone": (ENABLED, pod("a", limited(2), "{name: beside}"), ["exclusive 0,1", "pass"]),
    "one after the other": (ENABLED, pod("a", limited(1)) + pod("b", limited(2)), ["exclusive 0", "exclusive 2,3"]),
    "an init container's go to the next": (
        CLUSTER,
        pod("a", limited(1), limited(2, "next"), init=limited(2, "first")),
        ["exclusive 0,1", "exclusive 0", "exclusive 1,2"],
    ),
    "a sidecar's do not": (CLUSTER, pod("a", limited(1), init=SIDECAR), ["exclusive 0", "exclusive 1"]),
    "by the resource of a pool": (
        KINDS,
        pod("a", limited(1, resource="nvidia.com/l40s"), limited(2, "other")),
        ["exclusive 2", "exclusive 0,1"],
    ),
    "more than there are": (CLUSTER, pod("a", limited(5), "{name: b}"), ["no-such-gpu"] * 2),
    "more than are left, and what is not admitted holds nothing": (
        CLUSTER,
        pod("a", limited(3)) + pod("b", limited(1), limited(1, "c")) + pod("d", limited(1)),
        ["exclusive 0,1,2", "gpu-busy", "gpu-busy", "exclusive 3"],
    ),
    "beside one by annotation": (
        ENABLED,
        pod("a", "{name: main}", annotation="device=1") + pod("b", limited(2)) + pod("c", limited(2)),
        ["exclusive 1", "exclusive 2,3", "gpu-busy"],
    ),
    "by annotation, beside the kubelet's": (
        ENABLED,
        pod("a", limited(2)) + pod("b", "{name: main}", annotation="device=0"),
        ["exclusive 0,1", "gpu-busy"],
    ),
    "opted out": (CLUSTER, pod("a", limited(2), annotation="none"), ["none "]),
    "shaped beyond": (CLUSTER, pod("a", limited(2), annotation="3"), ["bad-request"]),
    "ignored by policy": (
        f'{ENABLED}[namespaces]\ndeny = ["*"]\notherwise = "ignore"\n',
        pod("a", limited(1)),
        ["not-allowed"],
    ),
    "ignored, left to the guard": (
        f'{ENABLED}fail_closed = "guard"\n[namespaces]\ndeny = ["*"]\notherwise = "ignore"\n',
        pod("a", limited(1)),
        ["pass"],
    ),
    "replicas": (
        f"{ENABLED}replicas = 2\n",
        pod("a", limited(1)) + pod("b", limited(8)) + pod("c", limited(7)),
        ["shared 0", "gpu-busy", "shared 0,1,2,3"],
    ),
    "replicas of another name": (
        f"{ENABLED}replicas = 2\nrename = true\n",
        pod("a", limited(1)) + pod("b", limited(1, resource="nvidia.com/gpu.shared")),
        ["no-such-gpu", "shared 0"],
    ),
    "another resource": (
        f'{ENABLED}resource = "example.com/gpu"\n',
        pod("a", limited(1, resource="example.com/gpu")) + pod("b", limited(1)),
        ["exclusive 0", "pass"],
    ),
    "a variable that names a GPU grants none": (
        ENABLED,
        pod("a", limited(1), NAMING),
        ["exclusive 0", "pass"],
    ),
    "a variable that names what the kubelet passes on": (
        ENABLED,
        pod("a", limited(1), init=NAMING),
        ["exclusive 0", "exclusive 0"],
    ),
    "NVIDIA's device plugin": (INJECTING, pod("a", limited(2), "{name: beside}"), ["exclusive 0,1", "pass"]),
    "NVIDIA's, for an init container": (
        INJECTING,
        pod("a", limited(1), init=limited(1, "first")),
        ["exclusive 0", "exclusive 0"],
    ),
    "NVIDIA's, for an init container alone, beside a sidecar": (
        INJECTING,
        pod("a", "{name: main}", annotation="all", init=f"{SIDECAR}, {limited(1, 'first')}"),
        ["exclusive 0", "bad-request", "none "],
    ),
    "NVIDIA's, and the pod sets its variable": (
        INJECTING,
        pod("a", limited(1, more="env: [{name: NVIDIA_VISIBLE_DEVICES, value: '3'}], ")),
        ["bad-request"],
    ),
    "NVIDIA's, which knows no annotations": (
        INJECTING,
        pod("a", "{name: main}", annotation="device=0") + pod("b", limited(4)) + pod("c", limited(1)),
        ["exclusive 0", "gpu-busy", "gpu-busy"],
    ),
    "NVIDIA's, never asked about": (f'{INJECTING}podresources = ""\n', pod("a", limited(1)), ["node-not-ready"]),
    "both plugins'": (
        '[kubelet]\nenabled = true\nresource = "example.com/gpu"\ninject_for = ["nvidia.com/*"]\n',
        pod("a", "{name: main, resources: {limits: {nvidia.com/gpu: 1, example.com/gpu: 1}}}"),
        ["bad-request"],
    ),
}


@pytest.mark.parametrize(("policy", "manifest", "expected"), PLAYED.values(), ids=PLAYED)
def test_the_kubelet_allocates_before_the_daemon_decides(
    explain: Explain, policy: str, manifest: str, expected: list[str]
) -> None:
    assert [said(line) for line in containers(explain, manifest, policy=policy)] == expected


def test_mig_devices_are_resources_of_their_own(explain: Explain) -> None:
    policy = f'{ENABLED}mig_strategy = "mixed"\n'
    manifest = pod("a", limited(1, resource="nvidia.com/mig-1g.10gb")) + pod(
        "b", limited(1, resource="nvidia.com/mig-9g.5gb")
    )
    some, none = containers(explain, manifest, "--gpus", TOPOLOGIES / "mig-a100.toml", policy=policy)
    assert [uuid[:4] for uuid in some["gpu_uuids"]] == ["MIG-"]
    assert "asks for 1 nvidia.com/mig-9g.5gb, and 0 of the 0 that this node offers" in none["reason"]


def test_what_the_kubelet_may_not_allocate_is_said_with_why(explain: Explain, tmp_path: Path) -> None:
    topology = tmp_path / "lost.toml"
    topology.write_text(FOUR_GPUS.read_text().replace("index = 1\n", 'index = 1\nunavailable = "GPU is lost"\n'))
    done = explain(pod("a", limited(4)), "--gpus", topology, policy=CLUSTER)
    assert done.code == Exit.FINDING
    assert (
        "REFUSED nri-gpu [gpu-busy]: container main asks for 4 nvidia.com/gpu, and 3 of the 4 that this node offers "
        "can be allocated: GPU is lost; ask for fewer, or run the pod on another node."
    ) in done.out


def test_what_no_known_plugin_allocates_is_noted(explain: Explain) -> None:
    unknown = containers(explain, pod("a", limited(1, resource="nvidia.com/mig-1g.5gb")), policy=ENABLED)
    assert unknown[0]["notes"] == [
        "a manifest does not show which GPUs the kubelet allocates to it (nvidia.com/mig-1g.5gb)"
    ]
