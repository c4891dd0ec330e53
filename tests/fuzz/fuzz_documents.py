"""What an operator writes, and what may lie in its place: read, or refused with the exception that a verb shows.

policy: PolicyError with printable faults. topology: TopologyError. manifest (`nri-gpu explain`): CommandError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nri_gpu.cli.pod_manifest import read_pods
from nri_gpu.domain.errors import CommandError, Fault, PolicyError
from nri_gpu.inventory.topology_file import TopologyError, load_topology, parse_topology
from nri_gpu.records.policy_file import PolicyText, build_policy, load_policy
from tests.fuzz.target import Target, scratch, words
from tests.support.daemon import TOPOLOGIES
from tests.unit.inventory.files import FORMER, GPU, LINK, MIG, NODE, SECOND

PROJECT: Final = TOPOLOGIES.parents[1]
FILE: Final = scratch() / "document"
SHARED: Final = "drm = [{ name = 'card0', major = 226, minor = 0 }]\nfabric = { state = 'completed' }\necc = true\n"
DEEP: Final = ("[" * 600, "{a=" * 600, "[[" * 300, "- " * 600, "9" * 5000)
# Lists of aliases of lists: as text, 9 ** 9 words.
ALIASES: Final = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9))
MANY: Final = (
    f"l0: &l0 x\n{ALIASES}metadata: {{name: *l8, labels: {{a: *l8}}}}\nspec: {{containers: [{{name: *l8}}]}}\n"
)
MANIFEST: Final = """
apiVersion: v1
kind: Pod
metadata: {name: train, namespace: ml, annotations: {gpu.nri.io: "1;mode=shared"}, labels: {a: b}}
spec:
  runtimeClassName: nvidia
  volumes: [{name: dev, hostPath: {path: /dev}}]
  initContainers: [{name: init}]
  containers:
  - name: main
    env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]
    volumeMounts: [{name: dev, mountPath: /dev}]
    securityContext: {privileged: true}
    resources: {requests: {cpu: 1}, limits: {cpu: 1, memory: 1Gi}}
"""


def policy(data: bytes) -> bool:
    FILE.write_bytes(data)
    try:
        load_policy(FILE)
    except PolicyError as error:
        _check_faults(error.faults)
        return False
    assert build_policy(PolicyText("document", data.decode()))
    return True


def topology(data: bytes) -> bool:
    FILE.write_bytes(data)
    try:
        inventory = load_topology(FILE, boot_clock=lambda: 0.0)
    except TopologyError as error:
        _check_faults(error.faults)
        return False
    assert parse_topology(data.decode(), "document", 0.0) == inventory
    units = [unit.uuid for unit in inventory.units]
    assert len(set(units)) == len(units)
    return True


def manifest(data: bytes) -> bool:
    try:
        pods = read_pods(data.decode(errors="surrogateescape"), "document").pods
    except CommandError as error:
        assert str(error)
        return False
    return bool(pods)


def _check_faults(faults: Sequence[Fault]) -> None:
    assert faults
    for each in faults:
        assert str(each)
        assert each.line is None or each.line >= 1


def _texts(*patterns: str) -> list[bytes]:
    return [path.read_bytes() for pattern in patterns for path in sorted(PROJECT.glob(pattern))]


TARGETS: Final = {
    "policy": Target(
        policy,
        good=_texts("config/policy.toml"),
        bad=[b"\xff", b"[plugin", b"plugin = 1", b"x = " + b"[" * 600, b"x = " + b"9" * 5000],
        pieces=(
            *words('[plugin] [namespaces] "*" [[rules]] "exclusive" [pools. [guard] [mps] [health] [kubelet] [stray]'),
            *words("[dra] [metrics] [control] [environment] inf nan"),
            *("allow = [", "mode = ", "1979-05-27T07:32:00Z", "0x", "\\u0000", '"""', "'''", "= {", "], ", *DEEP),
        ),
        bytes_max=8000,
    ),
    "topology": Target(
        topology,
        good=[
            *_texts(*(f"config/topologies/{name}.toml" for name in ("four-gpus", "mig-a100", "none"))),
            f"{NODE}{GPU}{SECOND}{FORMER}".encode(),
            f"{NODE}{GPU}{SHARED}{MIG}ci_minor = 85\n{SECOND}{LINK}nvlink = 18\n".encode(),
        ],
        bad=[b"\xff", b"", b"schema = 1", b"x = " + b"[" * 600, b"x = " + b"9" * 5000],
        pieces=(
            *words("[node] [[gpu]] [[link]] [[gpu.mig]] [[change]] [[event]] [[fault]] [[extra]] [[numa]]"),
            *("index = ", "uuid = ", "bus_id = ", "majors = ", "at_s = ", "-1", "1e308", "inf", "nan", *DEEP),
        ),
        bytes_max=6000,
    ),
    "manifest": Target(
        manifest,
        good=[MANIFEST.encode(), MANY.encode(), b'{"spec": {"containers": []}}'],
        bad=[
            b"",
            b"\x00",
            b"a: [",
            b"1",
            b"spec: {template: {spec: {template: {}}}}",
            b"[" * 600,
            b"a: !!bool x",
            b"2001-99-99",
        ],
        pieces=(
            *words("metadata: annotations: spec: containers: template: jobTemplate: resources: !!python/none !!set"),
            *words("2001-99-99 2001-12-14t21:59:43.10-05:00 &a *a"),
            *("!!int ", "!!binary ", "!!timestamp ", "<<: "),
            *("? ", "- ", "---\n", "|\n", ">-\n", "0o", "1:2:3", ".inf", "~", *DEEP),
        ),
        bytes_max=4000,
    ),
}
