"""What programs may rely on in our JSON: fields by their type. Fields may be added, so more than these is fine."""

from __future__ import annotations

from typing import Any, Final

import jsonschema  # type: ignore[import-untyped]  # it ships no types


def fields(**types: Any) -> dict[str, Any]:  # noqa: ANN401 - a piece of JSON Schema
    """An object with at least these fields."""
    return {"type": "object", "required": list(types), "properties": types}


def array(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


def schema(verb: str) -> dict[str, Any]:
    return {"const": f"nri-gpu/{verb}/v1"}


TEXT: Final = {"type": "string"}
NUMBER: Final = {"type": "integer"}
TRUTH: Final = {"type": "boolean"}
MAYBE_NUMBER: Final = {"type": ["integer", "null"]}

MAYBE_TRUTH: Final = {"type": ["boolean", "null"]}
HEALTH: Final = fields(state=TEXT, since_s={"type": ["number", "null"]}, why=TEXT, changes=NUMBER, signs=array(TEXT))
GPUS: Final = fields(
    schema=schema("gpus"),
    simulated=TRUTH,
    driver_version=TEXT,
    cuda_version=TEXT,
    fault=TEXT,
    majors=fields(nvidia=MAYBE_NUMBER, nvidia_uvm=MAYBE_NUMBER, nvidia_caps=MAYBE_NUMBER),
    modeset=MAYBE_TRUTH,
    modules={"type": "object", "additionalProperties": TEXT},
    snapshot={"anyOf": [{"type": "null"}, fields(number=NUMBER, age_s={"type": ["number", "null"]})]},
    extras={
        "type": "object",
        "additionalProperties": fields(
            lacking=TEXT,
            nodes=array(fields(path=TEXT, major=NUMBER, minor=NUMBER)),
            mounts=array(TEXT),
            channels=NUMBER,
        ),
    },
    gpus=array(
        fields(
            index=NUMBER,
            minor_number=NUMBER,
            uuid=TEXT,
            pci_bus_id=TEXT,
            model=TEXT,
            memory_bytes=NUMBER,
            arch={"type": "string", "pattern": r"^\d+\.\d+$"},
            brand=TEXT,
            numa_node=MAYBE_NUMBER,
            mig_enabled=TRUTH,
            unavailable=TEXT,
            architecture=TEXT,
            cpus=TEXT,
            compute_mode={"type": ["string", "null"]},
            persistence=MAYBE_TRUTH,
            ecc={"anyOf": [{"type": "null"}, fields(current=TRUTH, pending=TRUTH)]},
            addressing=TEXT,
            processes=MAYBE_NUMBER,
            health=HEALTH,
            drm=array(fields(name=TEXT, major=NUMBER, minor=NUMBER)),
            fabric={
                "anyOf": [
                    {"type": "null"},
                    fields(state=TEXT, status=NUMBER, cluster=TEXT, clique=NUMBER, health_mask=MAYBE_NUMBER),
                ]
            },
            mig=array(
                fields(
                    index=NUMBER,
                    uuid=TEXT,
                    profile=TEXT,
                    memory_bytes=NUMBER,
                    gpu_instance_id=NUMBER,
                    compute_instance_id=NUMBER,
                    gpu_instance_minor=MAYBE_NUMBER,
                    compute_instance_minor=MAYBE_NUMBER,
                    unavailable=TEXT,
                    processes=MAYBE_NUMBER,
                    health=HEALTH,
                )
            ),
        )
    ),
    unlisted=array(fields(pci_bus_id=TEXT, uuid=TEXT, model=TEXT, minor_number=MAYBE_NUMBER, reason=TEXT)),
    faults=array(fields(index=NUMBER, uuid=TEXT, pci_bus_id=TEXT, reason=TEXT)),
    links=array(fields(a=NUMBER, b=NUMBER, pcie=TEXT, nvlink=NUMBER)),
    numa=array(fields(node=NUMBER, cpus=TEXT, memory=TRUTH)),
)
CHECK: Final = fields(
    schema=schema("check"),
    faults=array(fields(file=TEXT, line=MAYBE_NUMBER, key=TEXT, message=TEXT)),
    advice=array(TEXT),
    options={"type": "object"},
)
EDITS: Final = fields(
    devices=array(
        fields(
            path=TEXT, major=NUMBER, minor=NUMBER, mode={"enum": ["0666", "0444", "0400"]}, permissions={"const": "rw"}
        )
    ),
    mounts=array(fields(destination=TEXT, source=TEXT, options=array(TEXT))),
    env={"type": "object", "additionalProperties": TEXT},
    rlimits=array(fields(type=TEXT, hard=NUMBER, soft=NUMBER)),
    cpuset_cpus=TEXT,
    cpuset_mems=TEXT,
)
LINKS: Final = {"type": "object", "additionalProperties": NUMBER}
NAMES: Final = {"namespace": TEXT, "pod": TEXT, "container": TEXT}
EXPLAIN: Final = fields(
    schema=schema("explain"),
    containers=array(
        {
            "oneOf": [
                fields(**NAMES, decision={"const": "pass"}, reason=TEXT, edits=EDITS),
                fields(
                    **NAMES,
                    decision={"const": "inject"},
                    rule=TEXT,
                    gpu_uuids=array(TEXT),
                    mode=TEXT,
                    links=LINKS,
                    edits=EDITS,
                ),
                fields(**NAMES, decision={"const": "refuse"}, code=TEXT, reason=TEXT),
            ]
        }
    ),
)


def check_shape(document: object, shape: dict[str, Any]) -> None:
    """Raises: jsonschema.ValidationError."""
    jsonschema.Draft202012Validator(shape).validate(document)
