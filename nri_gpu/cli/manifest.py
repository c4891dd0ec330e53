"""The pods of a Kubernetes manifest, as the containers that a runtime would show us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.errors import CommandError, Exit

_COUNTED: Final = ("cpu", "memory")  # other resources give no class (kubernetes: pkg/apis/core/v1/helper/qos)


def read_pods(text: str, file: str) -> Iterator[tuple[Container, ...]]:
    """The containers of every pod or pod template in a manifest. Raises: CommandError."""
    try:
        import yaml  # an extra that only this verb needs
    except ImportError:
        raise CommandError(Exit.USAGE, "reading manifests needs PyYAML: pip install 'nri-gpu[explain]'") from None
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except Exception as error:  # PyYAML lets through what its constructors raise: KeyError for `!!bool x`
        raise CommandError(Exit.USAGE, f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not documents:
        raise CommandError(Exit.USAGE, f"{file} is empty")
    for number, document in enumerate(documents, 1):
        where = f"{file}, document {number}"
        yield tuple(_containers(*_pod_of(document, where), number, where))


def _pod_of(document: object, where: str) -> tuple[object, Mapping[str, object]]:
    """Metadata and spec of the pod itself, or of the template of a Deployment, Job, CronJob and their like."""
    found = document
    for _ in range(4):
        match found:
            case {"spec": {"containers": list()} as spec, **rest}:
                return rest.get("metadata"), spec
            case {"spec": {} as spec}:
                found = spec.get("template") or spec.get("jobTemplate")
    raise CommandError(Exit.USAGE, f"{where} holds no pod: no spec.containers, and no template with them")


def _containers(found: object, spec: Mapping[str, object], number: int, where: str) -> Iterator[Container]:
    metadata = _mapping(found, f"{where}: metadata")
    init = _list(spec.get("initContainers"), f"{where}: spec.initContainers")
    both = (*init, *_list(spec["containers"], where))
    containers = [_mapping(item, f"{where}: a container") for item in both]
    pod = Pod(
        id=PodId(f"pod-{number}"),
        uid=PodUid(f"pod-{number}"),
        name=_text(metadata.get("name")) or _text(metadata.get("generateName")) or f"pod-{number}",
        namespace=_text(metadata.get("namespace")) or "default",
        annotations=_annotations(metadata, where),
        # A RuntimeClass mostly has its handler's name; the class itself is not in the manifest.
        runtime_handler=_text(spec.get("runtimeClassName")),
        labels={_text(k): _text(v) for k, v in _mapping(metadata.get("labels"), f"{where}: metadata.labels").items()},
        cgroup_parent=cgroup_of([each.get("resources") for each in containers]),
    )
    hosts_dev = _hosts_dev(_list(spec.get("volumes"), f"{where}: spec.volumes"))
    for container in containers:
        name = _text(container.get("name")) or "unnamed"
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


def _annotations(metadata: Mapping[str, object], where: str) -> dict[str, str]:
    """Raises: CommandError: one is not text; Kubernetes would not take the pod."""
    annotations = {}
    for key, value in _mapping(metadata.get("annotations"), f"{where}: metadata.annotations").items():
        if not isinstance(value, str):
            raise CommandError(
                Exit.USAGE,
                f'{where}: annotation {_text(key)} is not text; Kubernetes wants it in quotes: "{_text(value)}"',
            )
        annotations[_text(key)] = value
    return annotations


def _env(entries: list[object]) -> dict[str, str]:
    return {_text(e["name"]): _text(e.get("value")) for e in entries if isinstance(e, Mapping) and "name" in e}


def _hosts_dev(volumes: list[object]) -> frozenset[str]:
    """Names of volumes that are the host's /dev. Mounted at /dev, they hide nothing."""
    paths = {_text(v.get("name")): v.get("hostPath") for v in volumes if isinstance(v, Mapping)}
    return frozenset(name for name, path in paths.items() if isinstance(path, Mapping) and path.get("path") == "/dev")


def _mounts(entries: list[object], hosts_dev: frozenset[str]) -> frozenset[str]:
    named = [(_text(e.get("mountPath")), _text(e.get("name"))) for e in entries if isinstance(e, Mapping)]
    return frozenset(path for path, name in named if path and not (path == "/dev" and name in hosts_dev))


def _text(value: object) -> str:
    """A scalar as text; empty for anything else: lists of aliases of lists would be a text without an end."""
    if value is None or isinstance(value, Mapping | list | set):
        return ""
    # Python refuses thousands of decimal digits.
    return hex(value) if isinstance(value, int) and value.bit_length() > 64 else str(value)


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise CommandError(Exit.USAGE, f"{where} is not a mapping")


def _list(value: object, where: str) -> list[object]:
    if value is None or isinstance(value, list):
        return value or []
    raise CommandError(Exit.USAGE, f"{where} is not a list")


def cgroup_of(resources: Sequence[object]) -> str:
    """The parent of a pod's cgroup, by its QoS class. Quantities are compared as written, so `1` is not `1000m`.

    resources: of each of its containers.
    """
    if not any(_counted(each, kind) for each in resources for kind in ("requests", "limits")):
        return "/kubepods/besteffort/pod"
    return "/kubepods/pod" if all(map(_guaranteed, resources)) else "/kubepods/burstable/pod"


def _guaranteed(resources: object) -> bool:
    """Limits of both kinds, and requests that are the same or left out."""
    limits = _counted(resources, "limits")
    return len(limits) == len(_COUNTED) and {**limits, **_counted(resources, "requests")} == limits


def _counted(resources: object, kind: str) -> dict[str, str]:
    found = resources.get(kind) if isinstance(resources, Mapping) else None
    items = found.items() if isinstance(found, Mapping) else ()
    return {_text(name): _text(value) for name, value in items if name in _COUNTED and _text(value) != "0"}
