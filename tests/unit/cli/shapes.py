"""What programs may rely on in our JSON: fields by their type. Fields may be added, so more than these is fine."""

from __future__ import annotations

from typing import Any, Final

import jsonschema  # type: ignore[import-untyped]  # it ships no types

Shape = dict[str, Any]  # a piece of JSON Schema


def fields(*, texts: str = "", numbers: str = "", truths: str = "", maybe_numbers: str = "", **others: Shape) -> Shape:
    """An object with at least these fields: names, separated by blanks, of each of the common types, and others."""
    named = dict.fromkeys(texts.split(), TEXT) | dict.fromkeys(numbers.split(), NUMBER)
    named |= dict.fromkeys(truths.split(), TRUTH) | dict.fromkeys(maybe_numbers.split(), or_null(NUMBER)) | others
    return {"type": "object", "required": list(named), "properties": named}


def array(of: Shape) -> Shape:
    return {"type": "array", "items": of}


def mapping(of: Shape) -> Shape:
    return {"type": "object", "additionalProperties": of}


def or_null(of: Shape) -> Shape:
    return {"anyOf": [{"type": "null"}, of]}


def schema(verb: str) -> Shape:
    return {"const": f"nri-gpu/{verb}/v1"}


TEXT: Final = {"type": "string"}
NUMBER: Final = {"type": "integer"}
TRUTH: Final = {"type": "boolean"}
SECONDS: Final = or_null({"type": "number"})
HEALTH: Final = fields(texts="state why", numbers="changes", since_s=SECONDS, signs=array(TEXT))
MIG: Final = fields(
    texts="uuid profile unavailable",
    numbers="index memory_bytes gpu_instance_id compute_instance_id",
    maybe_numbers="gpu_instance_minor compute_instance_minor processes",
    health=HEALTH,
)
GPU: Final = fields(
    texts="uuid pci_bus_id model brand unavailable architecture cpus addressing",
    numbers="index minor_number memory_bytes",
    truths="mig_enabled",
    maybe_numbers="numa_node processes",
    arch={"type": "string", "pattern": r"^\d+\.\d+$"},
    compute_mode=or_null(TEXT),
    persistence=or_null(TRUTH),
    ecc=or_null(fields(truths="current pending")),
    health=HEALTH,
    drm=array(fields(texts="name", numbers="major minor")),
    fabric=or_null(fields(texts="state cluster", numbers="status clique", maybe_numbers="health_mask")),
    mig=array(MIG),
)
EXTRA: Final = fields(
    texts="lacking", numbers="channels", mounts=array(TEXT), nodes=array(fields(texts="path", numbers="major minor"))
)
GPUS: Final = fields(
    schema=schema("gpus"),
    texts="driver_version cuda_version fault",
    truths="simulated",
    majors=fields(maybe_numbers="nvidia nvidia_uvm nvidia_caps"),
    modeset=or_null(TRUTH),
    modules=mapping(TEXT),
    snapshot=or_null(fields(numbers="number", age_s=SECONDS)),
    extras=mapping(EXTRA),
    gpus=array(GPU),
    unlisted=array(fields(texts="pci_bus_id uuid model reason", maybe_numbers="minor_number")),
    faults=array(fields(texts="uuid pci_bus_id reason", numbers="index")),
    links=array(fields(texts="pcie", numbers="a b nvlink")),
    numa=array(fields(texts="cpus", numbers="node", truths="memory")),
)
CHECK: Final = fields(
    schema=schema("check"),
    faults=array(fields(texts="file key message", maybe_numbers="line")),
    advice=array(TEXT),
    options={"type": "object"},
)
EDITS: Final = fields(
    texts="cpuset_cpus cpuset_mems",
    devices=array(
        fields(
            texts="path",
            numbers="major minor",
            mode={"enum": ["0666", "0444", "0400"]},
            permissions={"const": "rw"},
        )
    ),
    mounts=array(fields(texts="destination source", options=array(TEXT))),
    env=mapping(TEXT),
    rlimits=array(fields(texts="type", numbers="hard soft")),
)
NAMES: Final = "namespace pod container"
DECISIONS: Final = [
    fields(texts=f"{NAMES} reason", decision={"const": "pass"}, edits=EDITS),
    fields(
        texts=f"{NAMES} rule mode",
        decision={"const": "inject"},
        gpu_uuids=array(TEXT),
        links=mapping(NUMBER),
        edits=EDITS,
    ),
    fields(texts=f"{NAMES} code reason", decision={"const": "refuse"}),
]
EXPLAIN: Final = fields(schema=schema("explain"), containers=array({"oneOf": DECISIONS}))


def check_shape(document: object, shape: Shape) -> None:
    """Raises: jsonschema.ValidationError."""
    jsonschema.Draft202012Validator(shape).validate(document)
