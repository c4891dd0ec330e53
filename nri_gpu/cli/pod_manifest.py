"""The pods of a Kubernetes manifest, as the containers that a runtime would show us."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from itertools import islice
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.mps import SHM_PLACE
from nri_gpu.domain.names import BASE_KEY, KEY_PREFIX
from nri_gpu.domain.text import counted, listed, quoted, shown
from nri_gpu.nri.convert import read_env
from nri_gpu.system.yaml_documents import CONTAINERS_MAX, PODS_MAX, read_documents, too_many

_COUNTED: Final = ("cpu", "memory")  # other resources give no class (kubernetes: pkg/apis/core/v1/helper/qos)
_QUANTITY: Final = re.compile(
    r"([+-]?(?:\d{1,40}\.?\d{0,40}|\.\d{1,40}))(?:([numkMGTPE]?)|([KMGTPE])i|[eE]([+-]?\d{1,3}))"
)
_POWERS: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
# The end of a pod's name, after its owner's. StatefulSets count, other kinds let the API server add five characters
# to at most 58 (kubernetes: staging/src/k8s.io/apiserver/pkg/storage/names).
_SUFFIXES: Final = {"StatefulSet": "-0", "Deployment": "-xxxxxxxxxx-xxxxx"}
_RANDOM: Final = "xxxxx"
_GENERATED_MAX: Final = 58
_Amounts = Mapping[str, Decimal]


class Name(Struct, frozen=True):
    """A name. known: so many of its characters; an `x` stands for each character behind them."""

    text: str = ""
    known: int = 0

    def with_suffix(self, suffix: str) -> Name:
        """Return the name of a pod that the owner with this name makes."""
        whole = self.known == len(self.text)
        if not suffix.endswith(_RANDOM):
            return Name(self.text + suffix, self.known + whole * len(suffix))
        base = f"{self.text}{suffix}".removesuffix(_RANDOM)[:_GENERATED_MAX]
        return Name(base + _RANDOM, min(self.known + whole, len(base)))  # the dash behind a known name is known


CLAIM: Final = "ResourceClaim"
TEMPLATE: Final = "ResourceClaimTemplate"
ClaimObject = tuple[str, str, str]  # kind, namespace and name of a ResourceClaim or ResourceClaimTemplate


class ClaimUse(Struct, frozen=True):
    """A claim that a container names. entry: its name in the pod. request: the container's part, or empty for all."""

    found: ClaimObject
    entry: str
    request: str


class ManifestContainer(Struct, frozen=True):
    """A container of a manifest."""

    container: Container
    ends: bool  # before the next container of its pod is created
    name: Name  # its pod's
    resources: Mapping[str, int]  # that it is limited to, of device plugins
    claims: tuple[ClaimUse, ...]
    notes: tuple[str, ...]  # on what a manifest does not show, or what has no effect


class Manifest(Struct, frozen=True):
    """The pods of a manifest, in its order. notes: on documents without a pod, and on repeated pods."""

    pods: tuple[tuple[ManifestContainer, ...], ...]
    notes: tuple[str, ...]
    claims: Mapping[ClaimObject, Mapping[object, object]]  # `devices` of each spec


class _Around(Struct, frozen=True):
    """The objects around a pod template."""

    namespace: str = ""  # of the outermost object that has one
    kind: str = ""  # of the innermost object with a name
    name: Name = Name()  # likewise
    annotated: tuple[str, ...] = ()  # our annotations on the objects, which nobody reads

    def within(self, found: Mapping[object, object]) -> _Around:
        """Return the objects with `found` as the innermost; a mapping without metadata is no object."""
        metadata = found.get("metadata")
        if not isinstance(metadata, Mapping):
            return self
        own, kind = _own_name(metadata), _text(found.get("kind"))
        named = own.text and (kind or not self.name.text)
        who = " ".join(filter(None, (shown(kind), shown(own.text)))) or "an object around it"
        annotations = metadata.get("annotations")
        ours = [f"{shown(key)} of {who}" for key in _ours(annotations if isinstance(annotations, Mapping) else {})]
        return _Around(
            namespace=self.namespace or _text(metadata.get("namespace")),
            kind=kind if named else self.kind,
            name=own if named else self.name,
            annotated=(*self.annotated, *ours),
        )


def read_pods(text: str, file: str, namespace: str = "default") -> Manifest:
    """Return all pods and pod templates. namespace: of those that name none. Raises: CommandError."""
    documents, seen = read_documents(text, file), dict[int, bool]()
    pods: list[tuple[ManifestContainer, ...]] = []
    claims: dict[ClaimObject, Mapping[object, object]] = {}
    without: Counter[str] = Counter()
    left, aliased = CONTAINERS_MAX, False
    for number, document in enumerate(documents, 1):
        for item in _items(document, set()):
            holds = bool(claim := _claim_object(item, namespace))
            claims.update(claim)
            for found, around in _pods(item, _Around(), seen):
                holds = True
                if found is None:
                    aliased = True
                    continue
                if len(pods) == PODS_MAX:
                    raise too_many(file, f"{PODS_MAX:,} pods")
                of_pod = _containers(found, around, namespace, len(pods) + 1, f"{file}, document {number}")
                pods.append(tuple(islice(of_pod, left + 1)))
                left -= len(pods[-1])
                if left < 0:
                    raise too_many(file, f"{CONTAINERS_MAX:,} containers")
            if not holds:
                without[shown(_text(item.get("kind"))) if isinstance(item, Mapping) else ""] += 1
    if not pods:
        where = f"documents 1 to {len(documents)} hold" if len(documents) > 1 else "document 1 holds"
        raise CommandError(Exit.CONFIGURATION, f"{file}, {where} no pod: no spec.containers, and no template with them")
    return Manifest(tuple(pods), tuple(_notes(without, aliased=aliased)), claims)


def _notes(without: Counter[str], *, aliased: bool) -> Iterator[str]:
    """Yield notes on a file. without: kinds of documents without a pod. aliased: a YAML alias repeats a pod."""
    if aliased:
        yield "a pod that YAML aliases repeat is explained once, at its first place: write it out to see each"
    if without:
        kinds = listed(f"{times:,} {kind or 'without a kind'}" for kind, times in without.most_common())
        number, plural = without.total(), without.total() > 1
        yield f"{counted(number, 'document')} without a pod {'are' if plural else 'is'} passed over: {kinds}"


def _items(document: object, seen: set[int]) -> Iterator[object]:
    """Yield the items of a List, PodList and so on, nested ones too, or any other document itself. seen: the Lists."""
    match document:
        case {"kind": str(kind), "items": list(items)} if items and kind.endswith("List") and id(items) not in seen:
            seen.add(id(items))
            for item in items:
                yield from _items(item, seen)
        case _:
            yield document


def _pods(
    found: object, around: _Around, seen: dict[int, bool]
) -> Iterator[tuple[Mapping[str, object] | None, _Around]]:
    """Yield pods and pod templates, however nested, with what is around each; None for an alias of some.

    seen: each mapping and list is visited once. Its value: whether there are pods in it.
    """
    if not isinstance(found, Mapping | list):
        return
    if id(found) in seen:
        if seen[id(found)]:
            yield None, around
        return
    seen[id(found)] = False
    if isinstance(found, list):
        inner, values = around, found
    else:
        if isinstance(spec := found.get("spec"), Mapping) and isinstance(spec.get("containers"), list):
            seen[id(found)] = True
            yield found, around
        inner, values = around.within(found), list(found.values())
    for value in values:
        if isinstance(value, dict | list):  # scalars are most, and cost a generator each
            for each in _pods(value, inner, seen):
                seen[id(found)] = True
                yield each


def _own_name(metadata: Mapping[str, object]) -> Name:
    if name := _text(metadata.get("name")):
        return Name(name, len(name))
    base = _text(metadata.get("generateName"))[:_GENERATED_MAX]
    return Name(base + _RANDOM, len(base)) if base else Name()


def _pod_name(found: Mapping[str, object], metadata: Mapping[str, object], around: _Around, number: int) -> Name:
    """Return the pod's own name, or for a template the name by the controller of the object around it."""
    kind, own = _text(found.get("kind")), _own_name(metadata)
    if kind and kind != "Pod" and own.text:  # an object whose own spec is a pod's
        return own.with_suffix(f"-{_RANDOM}")
    if around.name.text and kind != "Pod":
        return around.name.with_suffix(_SUFFIXES.get(around.kind, f"-{_RANDOM}"))
    fallback = f"pod-{number}"
    return own if own.text else Name(fallback, len(fallback))


def _containers(
    found: Mapping[str, object], around: _Around, namespace: str, number: int, where: str
) -> Iterator[ManifestContainer]:
    metadata, spec = _mapping(found.get("metadata"), f"{where}: metadata"), _mapping(found["spec"], where)
    init = _mappings(spec.get("initContainers"), f"{where}: spec.initContainers")
    main = _mappings(spec["containers"], where)
    debug = _mappings(spec.get("ephemeralContainers"), f"{where}: spec.ephemeralContainers")
    name = _pod_name(found, metadata, around, number)
    pod = Pod(
        id=PodId(f"pod-{number}"),
        uid=PodUid(f"pod-{number}"),
        name=name.text,
        namespace=around.namespace or _text(metadata.get("namespace")) or namespace,
        annotations=_annotations(metadata, where),
        # A RuntimeClass mostly has its handler's name; the class itself is not in the manifest.
        runtime_handler=_text(spec.get("runtimeClassName")),
        labels={_text(k): _text(v) for k, v in _mapping(metadata.get("labels"), f"{where}: metadata.labels").items()},
        cgroup_parent=_cgroup(spec.get("resources"), init, main),
    )
    entries = _claim_entries(spec.get("resourceClaims"), pod.namespace)
    hosts = _host_paths(_list(spec.get("volumes"), f"{where}: spec.volumes"))
    unread = [
        f"annotation {each} has no effect: requests are read from the annotations of the pod template"
        for each in around.annotated
        if not any(_ours(pod.annotations))
    ]
    of_pod = _mapping(spec.get("securityContext"), f"{where}: spec.securityContext").get("runAsUser")
    for at, container in enumerate((*init, *main, *debug)):
        of = f"of container {shown(_text(container.get('name'))) or 'unnamed'}"
        security = _mapping(container.get("securityContext"), f"{where}: securityContext {of}")
        env, unknown = _env(container, f"{where}: env {of}")
        read, twice, required = read_env(env)
        user = security.get("runAsUser", of_pod)
        resources = container.get("resources")
        yield ManifestContainer(
            Container(
                id=ContainerId(f"{pod.id}/{at}"),
                name=_text(container.get("name")) or "unnamed",
                pod=pod,
                env=read,
                env_twice=twice,
                requirement_chars=required,
                mounts=_mounts(_list(container.get("volumeMounts"), f"{where}: volumeMounts {of}"), hosts),
                privileged=security.get("privileged") is True,
                uid=user if isinstance(user, int) else None,
            ),
            ends=at < len(init) and not _is_sidecar(container),
            name=name,
            resources={
                key: int(amount) for key, amount in _amounts(resources, "limits").items() if "/" in key and amount >= 1
            },
            claims=tuple(_claims(resources, entries)),
            notes=(*unread, *unknown),
        )


def _annotations(metadata: Mapping[str, object], where: str) -> dict[str, str]:
    """Return the annotations. Raises: CommandError, if a value is not text; Kubernetes would not take the pod."""
    annotations = {}
    for key, value in _mapping(metadata.get("annotations"), f"{where}: metadata.annotations").items():
        if not isinstance(value, str):
            written = f"{where}: annotation {shown(_text(key))}"
            raise CommandError(
                Exit.CONFIGURATION, f"{written} is not text; Kubernetes wants it in quotes: {quoted(_text(value))}"
            )
        annotations[_text(key)] = value
    return annotations


def _ours(annotations: Iterable[object]) -> Iterator[str]:
    """Yield the keys by which pods ask."""
    return (key for key in map(_text, annotations) if key == BASE_KEY or key.startswith(KEY_PREFIX))


def _env(container: Mapping[str, object], where: str) -> tuple[list[str], list[str]]:
    """Return the variables as `NAME=value`, and notes on those that we would read and that a manifest does not show."""
    values: dict[str, str] = {}
    notes = []
    for each in _list(container.get("env"), where):
        if not isinstance(each, Mapping) or "name" not in each:
            continue
        name, value = _text(each["name"]), _text(each.get("value"))
        values.pop(name, None)
        if not each.get("valueFrom") and "$(" not in value:
            values[name] = value
        elif read_env([f"{name}="])[0]:
            notes.append(f"{shown(name)} is not known: a manifest does not show the kubelet's value")
    if container.get("envFrom"):
        notes.append("a manifest does not show which variables come by envFrom")
    return [f"{name}={value}" for name, value in values.items()], notes


def _claim_object(item: object, namespace: str) -> Mapping[ClaimObject, Mapping[object, object]]:
    """Return the `devices` of a ResourceClaim's spec, or of a template's, by what pods name it; empty for others."""
    kind, metadata, spec = (
        item.get(key) if isinstance(item, Mapping) else None for key in ("kind", "metadata", "spec")
    )
    spec = spec.get("spec") if kind == TEMPLATE and isinstance(spec, Mapping) else spec
    devices = spec.get("devices") if isinstance(spec, Mapping) else None
    if kind not in (CLAIM, TEMPLATE) or not isinstance(metadata, Mapping) or not isinstance(devices, Mapping):
        return {}
    return {(kind, _text(metadata.get("namespace")) or namespace, _text(metadata.get("name"))): devices}


def _claim_entries(entries: object, namespace: str) -> Mapping[str, ClaimObject]:
    """Map the names of a pod's `resourceClaims` to what each stands for."""
    found = {}
    for each in entries if isinstance(entries, list) else ():
        if isinstance(each, Mapping):
            template = _text(each.get("resourceClaimTemplateName"))
            name = template or _text(each.get("resourceClaimName"))
            found[_text(each.get("name"))] = (TEMPLATE if template else CLAIM, namespace, name)
    return found


def _claims(resources: object, entries: Mapping[str, ClaimObject]) -> Iterator[ClaimUse]:
    """Yield the claims that a container names. entries: of its pod."""
    named = resources.get("claims") if isinstance(resources, Mapping) else None
    for each in named if isinstance(named, list) else ():
        if isinstance(each, Mapping):
            entry = _text(each.get("name"))
            yield ClaimUse(entries.get(entry, ("", "", "")), entry, _text(each.get("request")))


def _host_paths(volumes: list[object]) -> Mapping[str, str]:
    """Return the host's paths by the names of their volumes."""
    paths = {_text(v.get("name")): v.get("hostPath") for v in volumes if isinstance(v, Mapping)}
    return {name: _text(path.get("path")) for name, path in paths.items() if isinstance(path, Mapping)}


def _mounts(entries: list[object], hosts: Mapping[str, str]) -> frozenset[str]:
    """Return where volumes are mounted; the host's /dev and /dev/shm hide nothing in their own places."""
    named = [(_text(e.get("mountPath")), _text(e.get("name"))) for e in entries if isinstance(e, Mapping)]
    return frozenset(
        path for path, name in named if path and not (path in ("/dev", SHM_PLACE) and hosts.get(name) == path)
    )


def _text(value: object) -> str:
    """Return a scalar as text, or empty for any other value: aliased lists of lists would be a text without an end."""
    if value is None or isinstance(value, Mapping | list | set):
        return ""
    # Python refuses thousands of decimal digits.
    return hex(value) if isinstance(value, int) and value.bit_length() > 64 else str(value)


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise CommandError(Exit.CONFIGURATION, f"{where} is not a mapping")


def _list(value: object, where: str) -> list[object]:
    if value is None or isinstance(value, list):
        return value or []
    raise CommandError(Exit.CONFIGURATION, f"{where} is not a list")


def _mappings(value: object, where: str) -> list[Mapping[str, object]]:
    return [_mapping(item, f"{where}: a container") for item in _list(value, where)]


def _is_sidecar(container: Mapping[str, object]) -> bool:
    """Return whether an init container goes on beside the other containers."""
    return container.get("restartPolicy") == "Always"


def _cgroup(of_pod: object, init: list[Mapping[str, object]], main: list[Mapping[str, object]]) -> str:
    """Return the parent of a pod's cgroup, by its QoS class. of_pod: the pod's own resources, which decide alone."""
    each = [_limits_and_requests(container.get("resources")) for container in (*init, *main)]
    if isinstance(of_pod, Mapping):
        # A pod's missing request is its containers', else its limit (kubernetes: pkg/apis/core/v1/defaults).
        requests = [requests for _, requests in each]
        asked = _together(list(zip(requests, map(_is_sidecar, init), strict=False)), requests[len(init) :])
        limits, _ = _limits_and_requests(of_pod)
        each = [(limits, {**(limits and {**limits, **asked}), **_amounts(of_pod, "requests")})]
    counted = [(_positive(limits), _positive(requests)) for limits, requests in each]
    if not any(limits or requests for limits, requests in counted):
        return "/kubepods/besteffort/pod"
    guaranteed = all(len(limits) == len(_COUNTED) and requests == limits for limits, requests in counted)
    return "/kubepods/pod" if guaranteed else "/kubepods/burstable/pod"


def _limits_and_requests(resources: object) -> tuple[_Amounts, _Amounts]:
    """Return limits and requests. A request that is left out is the limit."""
    limits = _amounts(resources, "limits")
    return limits, {**limits, **_amounts(resources, "requests")}


def _together(init: list[tuple[_Amounts, bool]], main: list[_Amounts]) -> _Amounts:
    """Return the most that containers request at one time. init: each with whether it is a sidecar, which goes on.

    An init container that ends runs beside the sidecars before it, and the main containers beside all sidecars
    (kubernetes: staging/src/k8s.io/component-helpers/resource, AggregateContainerRequests).
    """
    total: dict[str, Decimal] = {}
    for name in {name for each in (*(each for each, _ in init), *main) for name in each}.intersection(_COUNTED):
        sidecars = most = Decimal(0)
        for requests, is_sidecar in init:
            now = sidecars + requests.get(name, 0)
            most = max(most, now)
            sidecars = now if is_sidecar else sidecars
        total[name] = max(most, sidecars + sum(each.get(name, 0) for each in main))
    return total


def _positive(amounts: _Amounts) -> _Amounts:
    return {name: amount for name, amount in amounts.items() if name in _COUNTED and amount > 0}


def _amounts(resources: object, kind: str) -> _Amounts:
    """Return the amounts that are quantities; Kubernetes takes no pod with any other."""
    found = resources.get(kind) if isinstance(resources, Mapping) else None
    items = found.items() if isinstance(found, Mapping) else ()
    parsed = {_text(name): _quantity(_text(value)) for name, value in items}
    return {name: amount for name, amount in parsed.items() if amount is not None}


def _quantity(text: str) -> Decimal | None:
    """Parse `500m`, `1Gi`, `1e3` (kubernetes: staging/src/k8s.io/apimachinery/pkg/api/resource), or return None."""
    if not (match := _QUANTITY.fullmatch(text)):
        return None
    number, decimal, binary, exponent = match.groups()
    if binary:
        return Decimal(number) * Decimal(2) ** (10 * (1 + "KMGTPE".index(binary)))
    return Decimal(number).scaleb(int(exponent or _POWERS[decimal or ""]))
