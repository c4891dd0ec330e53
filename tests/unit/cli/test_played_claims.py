"""What `nri-gpu explain` says of pods with ResourceClaims, whose templates the file has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.daemon import TOPOLOGIES, UUIDS
from tests.unit.cli.conftest import Explain, containers
from tests.unit.cli.test_played_node import ENABLED, limited, pod, said

MANUAL = (Path(__file__).parents[3] / "docs/dra.md").read_text()
DRA = "[dra]\nenabled = true\n"
PARAMETERS = "apiVersion: gpu.nri.io/v1, kind: GpuConfig"
Named = tuple[str, str]


def template(requests: str, config: str = "", name: str = "t") -> str:
    devices = f"{{requests: [{requests}], config: [{config}]}}"
    return f"{{kind: ResourceClaimTemplate, metadata: {{name: {name}}}, spec: {{spec: {{devices: {devices}}}}}}}\n---\n"


def claim(requests: str, name: str = "shared") -> str:
    made = template(requests, name=name).replace("ResourceClaimTemplate", "ResourceClaim")
    return made.replace("spec: {spec: {", "spec: {", 1).replace("}}}}\n", "}}}\n")


def exactly(more: str = "", name: str = "gpu", kind: str = "gpu.nri.io") -> str:
    return f"{{name: {name}, exactly: {{deviceClassName: {kind}{more}}}}}"


def configured(words: str) -> str:
    return f"{{opaque: {{driver: gpu.nri.io, parameters: {{{PARAMETERS}, {words}}}}}}}"


def naming(entry: str = "c", name: str = "main", request: str = "") -> str:
    part = f", request: {request}" if request else ""
    return f"{{name: {name}, resources: {{claims: [{{name: {entry}{part}}}]}}}}"


def claiming(name: str, *of: str, annotation: str = "", init: str = "", claims: str = "") -> str:
    entries = claims or "{name: c, resourceClaimTemplateName: t}"
    made = pod(name, *(of or (naming(),)), annotation=annotation, init=init)
    return made.replace("spec: {", f"spec: {{resourceClaims: [{entries}], ", 1)


ONE, TWO = template(exactly()), template(exactly(", count: 2"))
SHARED = "{name: c, resourceClaimName: shared}"
CLASS = "deviceClassName: gpu.nri.io"
FIRST = f"{{name: gpu, firstAvailable: [{{name: many, {CLASS}, count: 3}}, {{name: one, {CLASS}}}]}}"
ADMIN = template(exactly(", adminAccess: true, allocationMode: All"), name="watch")
WATCHING = "{name: c, resourceClaimTemplateName: watch}"
ALIASES = "&a [1, 1, 1, 1, 1, 1, 1, 1, 1]"
for letter, before in zip("bcdefghi", "abcdefgh", strict=True):
    ALIASES = f"{ALIASES}, &{letter} [{', '.join([f'*{before}'] * 9)}]"
POOLS = f'[[pool]]\nname = "a"\ndevice = ["{UUIDS[0]}"]\n[[pool]]\nname = "b"\ndevice = ["{UUIDS[2]}"]\n'
# Policy, manifest, and what each container gets.
PLAYED = {
    "one, and none beside it": (DRA, ONE + claiming("a", naming(), "{name: b}"), ["exclusive 0", "pass"]),
    "one for each pod": (DRA, ONE + claiming("a") + claiming("b"), ["exclusive 0", "exclusive 1"]),
    "two, for two containers": (DRA, TWO + claiming("a", naming(), naming(name="b")), ["exclusive 0,1"] * 2),
    "its parts": (
        DRA,
        template(f"{exactly(name='x')}, {exactly(name='y')}")
        + claiming("a", naming(request="y"), naming(name="b", request="x")),
        ["exclusive 1", "exclusive 0"],
    ),
    "an init container's stays the pod's": (
        DRA,
        ONE + claiming("a", init=naming(name="i")) + claiming("b"),
        ["exclusive 0", "exclusive 0", "exclusive 1"],
    ),
    "several pods of one": (DRA, claim(exactly()) + claiming("a", claims=SHARED) * 2, ["exclusive 0"] * 2),
    "as v1beta1 has it": (DRA, template("{name: g, deviceClassName: gpu.nri.io}") + claiming("a"), ["exclusive 0"]),
    "all": (DRA, template(exactly(", allocationMode: All")) + claiming("a"), ["exclusive 0,1,2,3"]),
    "the first alternative": (DRA, template(FIRST) + claiming("a"), ["exclusive 0,1,2"]),
    "the next alternative": (DRA, template(FIRST) + claiming("a") * 2, ["exclusive 0,1,2", "exclusive 3"]),
    "more than there are": (
        DRA,
        template(exactly(", count: 5")) + claiming("a", naming(), "{name: b}"),
        ["gpu-busy"] * 2,
    ),
    "what is refused holds nothing": (
        DRA,
        template(f"{exactly(', count: 3', 'x')}, {exactly(', count: 2', 'y')}", name="t")
        + ONE.replace("name: t}", "name: u}")
        + claiming("a")
        + claiming("b", claims="{name: c, resourceClaimTemplateName: u}"),
        ["gpu-busy", "exclusive 0"],
    ),
    "beside one by annotation": (
        DRA,
        pod("a", "{name: main}", annotation="device=0") + TWO + claiming("b") + claiming("c"),
        ["exclusive 0", "exclusive 1,2", "gpu-busy"],
    ),
    "kept from annotations": (
        DRA,
        TWO + claiming("a") + pod("b", "{name: main}", annotation="device=0"),
        ["exclusive 0,1", "gpu-busy"],
    ),
    "for monitoring": (
        DRA,
        ONE + claiming("a") + ADMIN + claiming("b", claims=WATCHING),
        ["exclusive 0", "none 0,1,2,3"],
    ),
    "configured": (DRA, template(exactly(), configured("mode: shared")) + claiming("a"), ["shared 0"]),
    "configured wrongly": (DRA, template(exactly(), configured("mode: some")) + claiming("a"), ["bad-request"]),
    "configured without an end": (
        DRA,
        template(exactly(), configured(f"extras: [{ALIASES}]")) + claiming("a"),
        ["bad-request"],
    ),
    "configured with what JSON has not": (
        DRA,
        template(exactly(), configured(f"sharing: {{threads: 0x{'f' * 40}}}")) + claiming("a"),
        ["bad-request"],
    ),
    "shaped": (DRA, ONE + claiming("a", annotation="all;capabilities=compute"), ["exclusive 0"]),
    "opted out": (DRA, ONE + claiming("a", annotation="none"), ["none "]),
    "shares": (f"{DRA}replicas = 2\n", ONE + claiming("a") * 3, ["shared 0", "shared 0", "shared 1"]),
    "denied": (f'{DRA}[namespaces]\ndeny = ["*"]\n', ONE + claiming("a"), ["not-allowed"]),
    "limits, too": (
        f'{DRA}pool = "a"\n{ENABLED}pool = "b"\n{POOLS}',
        ONE + claiming("a", naming()[:-2] + ", limits: {nvidia.com/gpu: 1}}}") + pod("b", limited(1)),
        ["bad-request", "gpu-busy"],
    ),
    "another driver's": ("", template(exactly(kind="gpu.nvidia.com")) + claiming("a"), ["pass"]),
    "beside another driver's": (
        DRA,
        template(f"{exactly(kind='nic.example.com', name='nic')}, {exactly()}")
        + claiming("a", naming(), naming(name="b", request="nic"), annotation="all")
        + claiming("c", naming(request="gpu")),
        ["exclusive 0", "none ", "exclusive 1"],
    ),
    "not in the file": ("", claiming("a"), ["pass"]),
}


@pytest.mark.parametrize(("policy", "manifest", "expected"), PLAYED.values(), ids=PLAYED)
def test_the_scheduler_allocates_before_the_daemon_decides(
    explain: Explain, policy: str, manifest: str, expected: list[str]
) -> None:
    lines = containers(explain, manifest, policy=policy)
    assert [said(line) for line in lines] == expected
    assert ("played here on an empty node, without selectors" in str(lines)) is ("pass" not in expected[0])


def test_limits_are_claims_where_only_dra_allocates(explain: Explain) -> None:
    """A DeviceClass with extendedResourceName: the scheduler sees the pool of claims, and no device plugin is there."""
    policy = f'{DRA}pool = "a"\n[[pool]]\nname = "a"\ndevice = ["2", "3"]\n'
    manifest = pod("a", limited(1), "{name: b}") + pod("c", limited(2)) + ONE + claiming("d")
    lines = containers(explain, manifest, policy=policy)
    assert [said(line) for line in lines] == ["exclusive 2", "pass", "gpu-busy", "exclusive 3"]
    assert "run --kubelet" not in str(lines)


@pytest.mark.parametrize("name", re.findall(r"kind: ResourceClaimTemplate\nmetadata:\n  name: (\S+)", MANUAL))
def test_the_templates_of_the_manual(explain: Explain, name: str) -> None:
    block = next(each for each in re.findall(r"```yaml\n(.*?)```", MANUAL, re.S) if f"name: {name}\n" in each)
    manifest = f"{block}---\n{claiming('a', claims=f'{{name: c, resourceClaimTemplateName: {name}}}')}"
    policy = f'{DRA}[extras]\nallowed = ["rdma"]\n'
    topology, kind = (TOPOLOGIES / "mig-a100.toml", "MIG-") if "mig" in name else (TOPOLOGIES / "hgx-h100.toml", "GPU-")
    *_, line = containers(explain, manifest, "--gpus", topology, policy=policy)
    assert {uuid[:4] for uuid in line["gpu_uuids"]} == {kind}


def test_without_dra_in_the_policy_it_is_explained_as_with_the_option(explain: Explain) -> None:
    (line,) = containers(explain, ONE + claiming("a"))
    assert said(line) == "exclusive 0"
    assert "policy leaves DRA off (dra.enabled): this is the answer of `run --dra`" in line["notes"]


@pytest.mark.parametrize("policy", ["", DRA, ENABLED], ids=["neither in the file", "one way", "the other"])
def test_options_that_would_offer_each_gpu_twice_are_the_bad_policy_that_run_has(explain: Explain, policy: str) -> None:
    """The notes say `run --dra` and `run --kubelet`; with DRA in the file, limits are the scheduler's."""
    lines = containers(explain, ONE + claiming("a") + pod("b", limited(1)), policy=policy)
    twice = ["dra.enabled and kubelet.enabled would both offer" in str(line.get("reason")) for line in lines]
    assert twice == ([False, False] if policy == DRA else [True, True])


def test_the_scheduler_s_refusal_names_the_request(explain: Explain) -> None:
    (line,) = containers(explain, template(exactly(", count: 5")) + claiming("a"))
    assert line["reason"] == (
        "nri-gpu [gpu-busy]: this node has too few free devices for request gpu of ResourceClaim t: ask for fewer, or "
        "run the pod on another node."
    )


def test_monitoring_is_told_from_no_gpu(explain: Explain) -> None:
    done = explain(ADMIN + claiming("a", claims=WATCHING) + pod("b", "{name: main}", annotation="none"))
    assert "  granted GPU 0, 1, 2, 3, for monitoring (by namespaces.allow[0])\n" in done.out
    assert "  granted no GPU, as it asked\n" in done.out


MALFORMED = {
    "no requests": ("{}", "pass"),
    "requests of another kind": ("{requests: {a: b}}", "pass"),
    "a request that is a list": ("{requests: [[]]}", "pass"),
    "a class that is a list": ("{requests: [{exactly: {deviceClassName: [gpu.nri.io]}}]}", "pass"),
    "a count that is text": (f"{{requests: [{exactly(', count: x')}]}}", "exclusive 0"),
    "a count below one": (f"{{requests: [{exactly(', count: -1')}]}}", "exclusive 0"),
    "alternatives of another kind": (f"{{requests: [{{name: a, {CLASS}, firstAvailable: 5}}]}}", "exclusive 0"),
    "a configuration of another kind": (f"{{requests: [{exactly()}], config: 5}}", "exclusive 0"),
    "a configuration without a driver": (f"{{requests: [{exactly()}], config: [{{opaque: {{}}}}]}}", "bad-request"),
}


@pytest.mark.parametrize(("devices", "expected"), MALFORMED.values(), ids=MALFORMED)
def test_a_claim_that_kubernetes_would_not_take_is_no_bug(explain: Explain, devices: str, expected: str) -> None:
    made = f"{{kind: ResourceClaimTemplate, metadata: {{name: t}}, spec: {{spec: {{devices: {devices}}}}}}}\n---\n"
    (line,) = containers(explain, made + claiming("a"), policy=DRA)
    assert said(line) == expected
