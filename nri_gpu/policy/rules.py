"""`[[rule]]`, `[[pool]]` and `[limits]`: the GPUs that a container may have, and how many.

The first rule that matches a container decides about it. A GPU belongs to the first pool whose selectors all fit it, or
to none. Limits count distinct GPUs, and a MIG device as one: a pod whose two containers share a GPU holds one.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.domain.bounds import PROFILE
from nri_gpu.domain.container import Container, Qos
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import Capabilities, GpuUuid, MigPart, Unit, whole
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.forms import (
    DEFAULT_EXTRAS,
    NAME_PATTERN,
    NAMESPACES,
    POOL_NAME,
    SIZE,
    UNLIMITED,
    Globs,
    Otherwise,
    about,
    changes,
    labels,
    limit,
    pattern_or_more,
    text,
    unique,
    word_or_more,
)

_LIMIT: Final = limit()
RULES_MAX: Final = 8192

_NAMES: Final = pattern_or_more(NAME_PATTERN)
_LABELS: Final = labels(
    # Kubernetes: a prefix of at most 253 characters, a slash, a name of at most 63.
    text(r"(?:[a-z0-9.-]+/)?[A-Za-z0-9_.-]+", "a label's key, such as app.kubernetes.io/name", 317),
    text(r"[!-~]*", "a pattern of printable ASCII without blanks", 63),
)
_NAME: Final = text(r"[A-Za-z0-9_.+-]+", "letters, digits and _ . + -", 64)
_REASON: Final = text(r"[ -~]+", "printable ASCII on one line", 200)
POOLS_MAX: Final = 64
SELECTORS: Final = ("device", "model", "memory_at_least", "memory_at_most", "mig")
_HEX: Final = "[0-9a-f]"
_UUID: Final = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_Device = Annotated[
    str,
    text(
        rf"(?:0|[1-9][0-9]{{0,2}})(?::(?:0|[1-9][0-9]?))?|(?:GPU|MIG)-{_UUID}|"
        rf"(?:{_HEX}{{4}}|{_HEX}{{8}}|[1-9a-f]{_HEX}{{4,6}}):{_HEX}{{2}}:{_HEX}{{2}}\.{_HEX}",
        "an index (0), a MIG device's (0:1), a whole UUID in lower case (GPU-8f3a...) or a PCI bus id (0000:3b:00.0)",
        64,
    ),
]
_MODEL: Final = pattern_or_more(text(r"[ -~]+", "a pattern of printable ASCII", 96))
_Profile = Annotated[str, text(PROFILE.pattern, "a MIG profile such as 1g.10gb", 40)]


class Limits(Struct, frozen=True, kw_only=True):
    """Numbers of GPUs that may be granted (a MIG device is one); checked when a container is created, never later."""

    gpus_per_container: Annotated[int, _LIMIT, about("GPUs of one container.")] = UNLIMITED
    gpus_per_pod: Annotated[int, _LIMIT, about("Different GPUs of all containers of a pod together.")] = UNLIMITED
    gpus_per_namespace: Annotated[
        int, _LIMIT, about("Different GPUs of all pods of a namespace on this node together.")
    ] = UNLIMITED
    exclusive_gpus_per_namespace: Annotated[
        int, _LIMIT, about("The same, counting only those held in exclusive mode.")
    ] = UNLIMITED
    gpus_per_node: Annotated[
        int, _LIMIT, about("Different GPUs of this node that may be granted at all at one time.")
    ] = UNLIMITED
    containers_per_gpu: Annotated[int, limit(minimum=1), about("Containers that may share one GPU in shared mode.")] = (
        UNLIMITED
    )


NO_LIMITS: Final = Limits()
LIMIT_KEYS: Final = Limits.__struct_fields__


class Rule(Struct, frozen=True, kw_only=True):
    """The containers that are meant (every key given must match), and what they may have."""

    allow: Annotated[bool, about("Whether matching containers may have GPUs: true or false.")]
    name: Annotated[str, _NAME, about("Name of this rule in messages and in the log.")] = ""
    namespace: Annotated[Globs | None, _NAMES, about("Patterns of the pod's namespace.")] = None
    pod: Annotated[Globs | None, _NAMES, about("Patterns of the pod's name.")] = None
    container: Annotated[Globs | None, _NAMES, about("Patterns of the container's name.")] = None
    runtime_handler: Annotated[
        Globs | None, _NAMES, about("Patterns of the runtime handler, which a RuntimeClass names.")
    ] = None
    labels: Annotated[
        tuple[tuple[str, Globs], ...] | None,
        _LABELS,
        about("Labels of the pod, each with a pattern of its value; the creator of the pod writes them."),
    ] = None
    qos: Annotated[
        frozenset[Qos] | None,
        word_or_more(Qos),
        about("The pod's QoS class, derived from its cgroup; pods without a kubelet have none."),
    ] = None
    reason: Annotated[str, _REASON, about("The reason, which a refusal repeats.")] = ""
    otherwise: Annotated[
        Otherwise | None,
        about("With allow = false: refuse the container, or start it without GPUs."),
    ] = None
    default_mode: Annotated[Mode | None, about("In place of defaults.mode.")] = None
    modes: Annotated[
        frozenset[Mode] | None, Meta(min_length=1), about("Modes to ask for, in place of modes.allowed.")
    ] = None
    default_capabilities: Annotated[
        Capabilities | None, Meta(min_length=1), about("In place of defaults.capabilities.")
    ] = None
    capabilities: Annotated[
        Capabilities | None,
        Meta(min_length=1),
        about("Parts of the driver to ask for, in place of capabilities.allowed."),
    ] = None
    default_extras: Annotated[frozenset[Extra] | None, DEFAULT_EXTRAS, about("In place of defaults.extras.")] = None
    extras: Annotated[
        frozenset[Extra] | None,
        about("Extras to ask for, in place of extras.allowed."),
    ] = None
    pool: Annotated[
        Globs | None, pattern_or_more(POOL_NAME), about("Names of the only pools from which they get GPUs.")
    ] = None
    limits: Annotated[
        tuple[tuple[str, int], ...] | None, changes(Limits), about("Limits in place of those in [limits].")
    ] = None

    def matches(self, of: Container) -> bool:
        pod, labels = of.pod, of.pod.labels
        return (
            (self.namespace is None or self.namespace.match(pod.namespace))
            and (self.pod is None or self.pod.match(pod.name))
            and (self.container is None or self.container.match(of.name))
            and (self.runtime_handler is None or self.runtime_handler.match(pod.runtime_handler))
            and (self.qos is None or pod.qos in self.qos)
            and (self.labels is None or all(key in labels and globs.match(labels[key]) for key, globs in self.labels))
        )


class RuleList(Struct, frozen=True):
    """The rules, in the operator's order."""

    rules: tuple[Rule, ...] = ()

    def called(self, index: int) -> str:
        """Return `rule[2] "batch"`."""
        name = self.rules[index].name
        return f'rule[{index}] "{name}"' if name else f"rule[{index}]"


class Pool(Struct, frozen=True, kw_only=True):
    """GPUs set apart: those that fit every selector given. Other containers are not offered them."""

    name: Annotated[str, POOL_NAME, about("Name of this pool in rules and messages.")]
    device: Annotated[
        tuple[_Device, ...] | None,
        unique(256),
        about("GPUs, with their MIG devices, or MIG devices: index, UUID or PCI bus id."),
    ] = None
    model: Annotated[Globs | None, _MODEL, about("Patterns of the model's name; case does not matter.")] = None
    memory_at_least: Annotated[int | None, SIZE, about('Memory of the GPU or MIG device: "40Gi".')] = None
    memory_at_most: Annotated[int | None, SIZE, about('Memory of the GPU or MIG device: "40Gi".')] = None
    mig: Annotated[tuple[_Profile, ...] | None, unique(64), about("Profiles of MIG devices; no whole GPU has one.")] = (
        None
    )
    namespaces: Annotated[
        Globs | None,
        NAMESPACES,
        about("Patterns of namespaces whose containers may have them, in addition to rules that name the pool."),
    ] = None
    containers_per_gpu: Annotated[
        int | None, limit(minimum=1), about("Containers that may share one of its GPUs, whatever limits say.")
    ] = None

    def has(self, unit: Unit) -> bool:
        """Return whether a GPU or a MIG device fits."""
        return (
            (self.device is None or not _called(unit).isdisjoint(self.device))
            and (self.model is None or _matches_model(self.model, unit.model))
            and (self.memory_at_least is None or (unit.memory_bytes or 0) >= self.memory_at_least)
            and (self.memory_at_most is None or 0 < (unit.memory_bytes or 0) <= self.memory_at_most)
            and (self.mig is None or (isinstance(unit, MigPart) and unit.device.profile in self.mig))
        )


class PoolList(Struct, frozen=True):
    """The pools, in the operator's order."""

    pools: tuple[Pool, ...] = ()

    def members(self, inventory: Inventory) -> Mapping[GpuUuid, Pool]:
        """Return which pool each GPU and MIG device is in; a unit in no pool is absent."""
        found = ((unit.uuid, self.of(unit)) for unit in inventory.units)
        return {uuid: pool for uuid, pool in found if pool is not None}

    def of(self, unit: Unit) -> Pool | None:
        """Return the pool that a unit is in: the first that has it."""
        return next((pool for pool in self.pools if pool.has(unit)), None)

    def offers(self, unit: Unit, name: str) -> bool:
        """Return whether a unit is in the pool of that name; any unit is if the name is empty."""
        return not name or ((pool := self.of(unit)) is not None and pool.name == name)


def _matches_model(model: Globs, name: str) -> bool:
    """Return whether a model's name matches, in any case."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in model.patterns)


def _called(unit: Unit) -> frozenset[str]:
    """Return everything by which a `device` list can mean a unit; a MIG device also by what its GPU is called."""
    gpu = whole(unit)
    # Also with nvidia-smi's domain of eight digits.
    of_gpu = frozenset({str(gpu.index), gpu.uuid, gpu.pci_bus_id, gpu.pci_bus_id.zfill(16)})
    return of_gpu | {unit.uuid, unit.place} if isinstance(unit, MigPart) else of_gpu
