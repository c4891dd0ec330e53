"""The service class that the kubelet will give a pod of a manifest, as it shows in the pod's cgroup."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.topology import links_among
from nri_gpu.cli.gpus import look
from nri_gpu.daemon.policy_file import load_policy
from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.decision import Decision, Inject, Pass, Refuse
from nri_gpu.domain.edits import UNLIMITED, Edits
from nri_gpu.domain.errors import DriverError, Exit, InventoryError, NriGpuError, PolicyError
from nri_gpu.domain.gpu import MigPart, closed_sets
from nri_gpu.domain.node import CompatPackage, DriverFiles, DriverTree, Node
from nri_gpu.driver.compat import scan_compat
from nri_gpu.driver.profiles import planned_profiles
from nri_gpu.driver.scan import scan
from nri_gpu.driver.stage import planned, tree_name
from nri_gpu.policy.model import Policy

_COUNTED: Final = ("cpu", "memory")  # other resources give no class (kubernetes: pkg/apis/core/v1/helper/qos)
_NOTHING: Final[Mapping[str, Any]] = {}


def cgroup_of(spec: Mapping[str, Any]) -> str:
    """The cgroup's parent. Quantities are compared as they are written: `1` and `1000m` count as different."""
    resources = [each if isinstance(each, Mapping) else _NOTHING for each in _resources(spec)]
    if not any(_counted(each, kind) for each in resources for kind in ("requests", "limits")):
        return "/kubepods/besteffort/pod"
    return "/kubepods/pod" if all(map(_guaranteed, resources)) else "/kubepods/burstable/pod"


def _resources(spec: Mapping[str, Any]) -> Iterator[object]:
    for kind in ("initContainers", "containers"):
        containers = spec.get(kind)
        for container in containers if isinstance(containers, list) else ():
            yield container.get("resources") if isinstance(container, Mapping) else None


def _guaranteed(resources: Mapping[str, Any]) -> bool:
    """Limits of both kinds, and requests that are the same or left out."""
    limits = _counted(resources, "limits")
    return len(limits) == len(_COUNTED) and {**limits, **_counted(resources, "requests")} == limits


def _counted(resources: Mapping[str, Any], kind: str) -> dict[str, str]:
    given = resources.get(kind)
    items = given.items() if isinstance(given, Mapping) else ()
    return {str(name): str(value) for name, value in items if name in _COUNTED and str(value) != "0"}


class ManifestError(NriGpuError):
    """The manifest is not one. Says where."""


class Explained(Struct, frozen=True):
    """One container's decision. links: how many pairs of its GPUs are joined how, `NV18` or `PIX`, the best first."""

    container: Container
    decision: Decision
    links: Mapping[str, int]


def run(args: argparse.Namespace) -> int:
    """Print what each container would get. Returns 1 when one would be refused."""
    try:
        overrides = {"driver.root": args.driver_root} if args.driver_root else {}
        policy = load_policy(Path(args.policy) if args.policy else None, overrides)
        pods = tuple(read_pods(_text(args.file), args.file))
        node = take_node(args.gpus, policy)
    except PolicyError as error:
        print("\n".join(map(str, error.faults)), file=sys.stderr)
        return Exit.CONFIGURATION
    except InventoryError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        return Exit.CONFIGURATION if args.gpus else Exit.UNAVAILABLE
    except (ManifestError, OSError) as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        return Exit.USAGE
    explained = decide_all(pods, node, policy)
    print(json.dumps(to_json(explained), indent=1) if args.output == "json" else to_text(explained, node))
    return Exit.FINDING if any(isinstance(each.decision, Refuse) for each in explained) else Exit.OK


def decide_all(pods: tuple[tuple[Container, ...], ...], node: Node, policy: Policy) -> tuple[Explained, ...]:
    """Decide for all containers in order, one ledger for all."""
    ledger, explained = Ledger(), []
    for container in (container for pod in pods for container in pod):
        decision = decide(container, node, ledger, policy)
        ledger = ledger.after(decision, 0.0)
        explained.append(Explained(container, decision, _links(decision, node)))
    return tuple(explained)


def _links(decision: Decision, node: Node) -> Mapping[str, int]:
    uuids = decision.grant.uuids if isinstance(decision, Inject) else ()
    return links_among([unit for unit in node.inventory.units if unit.uuid in uuids], node.inventory)


def take_node(topology: str | None, policy: Policy) -> Node:
    """A snapshot as `run` would have it; nothing is staged. Raises: InventoryError."""
    inventory = asyncio.run(look(topology, policy.driver.root, policy.driver.library_dirs))
    node = Node(
        number=1,
        inventory=inventory,
        compat=_packages(policy),
        profiles=planned_profiles(Path(policy.driver.stage_dir), (gpu.minor_number for gpu in inventory.gpus)),
    )
    try:
        found = scan(Path(policy.driver.root), library_dirs=policy.driver.library_dirs)
    except DriverError as error:
        if not inventory.simulated:
            return replace(node, driver_fault=f"{error}.")
        return replace(node, driver=_imagined(policy, inventory.driver_version))
    folder = Path(policy.driver.stage_dir, found.generation)
    return replace(node, driver=planned(found, folder))


def _packages(policy: Policy) -> tuple[CompatPackage, ...]:
    """Where staging would put them; a folder that cannot be looked at has none, and `driver` says why."""
    if not policy.compat.dir:
        return ()
    try:
        found = scan_compat(Path(policy.compat.dir)).packages
    except DriverError:
        return ()
    return tuple(each.at(Path(policy.driver.stage_dir, each.generation)) for each in found)


def _imagined(policy: Policy, version: str) -> DriverFiles:
    """The driver's files where staging would put them, for a simulated node on a machine without a driver."""
    base = f"{policy.driver.stage_dir}/{version}-simulated"
    trees = {some: DriverTree(f"{base}/{tree_name(some)}") for some in closed_sets()}
    return DriverFiles(version, f"{version}-simulated", trees, {})


def _text(file: str) -> str:
    """Raises: ManifestError, OSError."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file} is not UTF-8: {error.reason}") from None


def read_pods(text: str, file: str) -> Iterator[tuple[Container, ...]]:
    """The containers of every pod or pod template in a manifest. Raises: ManifestError."""
    try:
        import yaml  # only here: the daemon never pays for it
    except ImportError:
        raise ManifestError("reading manifests needs PyYAML: pip install 'nri-gpu[explain]'") from None
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not documents:
        raise ManifestError(f"{file} is empty")
    for number, document in enumerate(documents, 1):
        where = f"{file}, document {number}"
        yield tuple(_containers(_pod_of(document, where), number, where))


def _pod_of(document: object, where: str) -> Mapping[str, Any]:
    """The pod itself, or the template of a Deployment, Job, CronJob and their like."""
    found = document
    for _ in range(4):
        if not isinstance(found, Mapping) or not isinstance(found.get("spec"), Mapping):
            break
        spec = found["spec"]
        if isinstance(spec.get("containers"), list):
            return found
        found = spec.get("template") or spec.get("jobTemplate")
    raise ManifestError(f"{where} holds no pod: no spec.containers, and no template with them")


def _containers(manifest: Mapping[str, Any], number: int, where: str) -> Iterator[Container]:
    metadata = _mapping(manifest.get("metadata"), f"{where}: metadata")
    spec = manifest["spec"]
    pod = Pod(
        id=PodId(f"pod-{number}"),
        uid=PodUid(f"pod-{number}"),
        name=str(metadata.get("name") or metadata.get("generateName") or f"pod-{number}"),
        namespace=str(metadata.get("namespace") or "default"),
        annotations=_annotations(metadata, where),
        # A RuntimeClass mostly has its handler's name; the class itself is not in the manifest.
        runtime_handler=str(spec.get("runtimeClassName") or ""),
        labels={str(k): str(v) for k, v in _mapping(metadata.get("labels"), f"{where}: metadata.labels").items()},
        cgroup_parent=cgroup_of(spec),
    )
    hosts_dev = _hosts_dev(_list(spec.get("volumes"), f"{where}: spec.volumes"))
    for item in [*_list(spec.get("initContainers"), f"{where}: spec.initContainers"), *spec["containers"]]:
        container = _mapping(item, f"{where}: a container")
        name = str(container.get("name") or "unnamed")
        env = _env(_list(container.get("env"), f"{where}: env of container {name}"))
        volumes = _list(container.get("volumeMounts"), f"{where}: volumeMounts of container {name}")
        security = _mapping(container.get("securityContext"), f"{where}: securityContext of container {name}")
        yield Container(
            id=ContainerId(f"{pod.id}/{name}"),
            name=name,
            pod=pod,
            env=env,
            mounts=_mounts(volumes, hosts_dev),
            privileged=security.get("privileged") is True,
        )


def _annotations(metadata: Mapping[str, Any], where: str) -> dict[str, str]:
    """Raises: ManifestError: one is not text; Kubernetes would not take the pod."""
    annotations = _mapping(metadata.get("annotations"), f"{where}: metadata.annotations")
    for key, value in annotations.items():
        if not isinstance(value, str):
            raise ManifestError(f'{where}: annotation {key} is not text; Kubernetes wants it in quotes: "{value}"')
    return {str(key): value for key, value in annotations.items()}


def _env(entries: list[object]) -> dict[str, str]:
    return {str(e["name"]): str(e.get("value", "")) for e in entries if isinstance(e, Mapping) and "name" in e}


def _hosts_dev(volumes: list[object]) -> frozenset[str]:
    """Names of volumes that are the host's own /dev: mounted there, they are in nobody's way."""
    paths = {str(v.get("name")): v.get("hostPath") for v in volumes if isinstance(v, Mapping)}
    return frozenset(name for name, path in paths.items() if isinstance(path, Mapping) and path.get("path") == "/dev")


def _mounts(entries: list[object], hosts_dev: frozenset[str]) -> frozenset[str]:
    named = [(str(e.get("mountPath", "")), str(e.get("name"))) for e in entries if isinstance(e, Mapping)]
    return frozenset(path for path, name in named if path and not (path == "/dev" and name in hosts_dev))


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise ManifestError(f"{where} is not a mapping")


def _list(value: object, where: str) -> list[object]:
    if value is None or isinstance(value, list):
        return value or []
    raise ManifestError(f"{where} is not a list")


def to_json(explained: tuple[Explained, ...]) -> dict[str, Any]:
    """Schema `nri-gpu/explain/v1`."""
    return {"schema": "nri-gpu/explain/v1", "containers": [_json(each) for each in explained]}


def _json(each: Explained) -> dict[str, Any]:
    pod = each.container.pod
    facts: dict[str, Any] = {"namespace": pod.namespace, "pod": pod.name, "container": each.container.name}
    match each.decision:
        case Pass(edits, why):
            return {**facts, "decision": "pass", "reason": why, "edits": _edits_json(edits)}
        case Inject(edits, grant, rule, _, compat):
            granted = {"gpu_uuids": list(grant.uuids), "mode": grant.mode.value if grant.mode else "none"}
            return {
                **facts,
                "decision": "inject",
                "rule": rule,
                **granted,
                "links": dict(each.links),
                "compat": compat,
                "edits": _edits_json(edits),
            }
        case Refuse(reason):
            return {**facts, "decision": "refuse", "code": reason.code.value, "reason": str(reason)}


def _edits_json(edits: Edits) -> dict[str, Any]:
    return {
        "devices": [
            {"path": d.path, "major": d.major, "minor": d.minor, "mode": f"{d.mode:04o}", "permissions": "rw"}
            for d in edits.devices.values()
        ],
        "mounts": [
            {"destination": m.destination, "source": m.source, "options": list(m.options)}
            for m in edits.mounts.values()
        ],
        "env": dict(edits.env),
        "rlimits": [{"type": each.type, "hard": each.hard, "soft": each.soft} for each in edits.rlimits.values()],
        "cpuset_cpus": edits.cpuset_cpus,
        "cpuset_mems": edits.cpuset_mems,
    }


def to_text(explained: tuple[Explained, ...], node: Node) -> str:
    """One paragraph a container."""
    return "\n\n".join("\n".join(_lines(each, node)) for each in explained)


def _lines(each: Explained, node: Node) -> Iterator[str]:
    pod = each.container.pod
    yield f"{pod.namespace}/{pod.name} container {each.container.name}"
    match each.decision:
        case Pass(edits, why, note):
            yield f"  passes untouched: {why}" if not edits.env else f"  passes, disarmed: {why}"
            yield from _note(note)
        case Refuse(reason):
            yield f"  REFUSED {reason}"
        case Inject(edits, grant, rule, note, compat):
            units = [unit for unit in node.inventory.units if unit.uuid in grant.uuids]
            indices = [unit.place if isinstance(unit, MigPart) else str(unit.index) for unit in units]
            what = f"GPU {', '.join(indices)}, {grant.mode}" if grant.mode else "no GPU, as it asked"
            yield f"  granted {what} (by {rule})"
            if each.links:
                yield f"  links   {', '.join(f'{word} x{pairs}' for word, pairs in each.links.items())}"
            if compat:
                yield f"  compat  {compat}"
            yield from (f"  device  c {d.major}:{d.minor} rw  {d.path}" for d in edits.devices.values())
            yield from (f"  mount   {m.destination}  from {m.source}" for m in edits.mounts.values())
            yield from (f"  env     {key}={value}" for key, value in edits.env.items())
            yield from (f"  rlimit  {each.type}={_shown(each.soft)}" for each in edits.rlimits.values())
            for name, value in (("cpus", edits.cpuset_cpus), ("mems", edits.cpuset_mems)):
                if value:
                    yield f"  cpuset  {name} {value}"
            yield from _note(note)


def _shown(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)


def _note(note: str) -> Iterator[str]:
    if note:
        yield f"  note    {note}"
