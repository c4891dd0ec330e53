"""The opaque configuration of a claim: what it is turned into, and what is said of its mistakes."""

from __future__ import annotations

import json

import pytest

from nri_gpu.domain.edits import Extras
from nri_gpu.domain.gpu import Capability
from nri_gpu.domain.gpu_request import Everything, Mode
from nri_gpu.dra.claim_config import BYTES_MAX, FAULTS_MAX, ConfigError, parse_config
from nri_gpu.request.annotation import parse_claim
from tests.support.resource_claims import CONFIG


def text(**fields: object) -> str:
    return parse_config(json.dumps({**CONFIG, **fields}).encode())


def faults(raw: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw.encode())
    return caught.value.faults


def faults_of(**fields: object) -> tuple[str, ...]:
    return faults(json.dumps({**CONFIG, **fields}))


def test_everything_it_can_say_becomes_the_grammar_of_the_annotation() -> None:
    whole = text(
        mode="mps",
        capabilities=["compute", "utility"],
        extras=["rdma", "imex:0", "imex:7"],
        sharing={"memory": "10Gi", "threads": 50},
    )
    assert whole == "mode=mps;capabilities=compute,utility;extras=rdma,imex:0,imex:7;sharing=memory:10Gi,threads:50"
    claim = parse_claim("key", whole, given=True)
    assert (claim.mode, claim.wanted) == (Mode.MPS, Everything())
    assert claim.capabilities == frozenset({Capability.COMPUTE, Capability.UTILITY})
    assert (claim.sharing.memory_mib, claim.sharing.threads_percent, claim.extras.channels) == (10240, 50, (0, 7))


def test_a_former_extra_is_taken() -> None:
    assert parse_claim("KEY", text(extras=["profile"]), given=True).extras == Extras(ignored=("profile",))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"mode": "shar"}, 'mode: unknown mode "shar", known: exclusive, shared, mps (did you mean "shared"?)'),
        ({"mode": 1}, "mode: a whole number is not a string"),
        ({"mode": None}, "mode: null is not a string"),
        ({"mode": "shared;count=8"}, 'mode: "shared;count=8" is not one word'),
        ({"Mode": "shared"}, '"Mode" is no field, known: apiVersion, kind, mode,'),
        ({"count": 2}, '"count" is no field, known: apiVersion, kind, mode,'),
        ({"capabilities": "compute"}, 'capabilities: "compute" is not a list'),
        ({"capabilities": []}, "capabilities: it is empty: leave the field out"),
        ({"capabilities": ["compute,utility"]}, 'capabilities[0]: "compute,utility" is not one word'),
        ({"capabilities": ["utility", "utility"]}, 'capabilities: "utility" is named twice'),
        ({"extras": ["imex"]}, 'extras[0]: "imex" names no IMEX channel: write imex:N'),
        ({"sharing": ["memory"]}, "sharing: a list is not an object"),
        ({"mode": "mps", "sharing": {"threads": True}}, "sharing.threads: a boolean is not a whole number"),
        ({"sharing": {"thread": 5}}, '"sharing.thread" is no field, known: memory, threads (did you mean "threads"?)'),
        ({"sharing": {"threads": 5}}, '"sharing" goes with mode=mps only: in other modes nothing divides a GPU'),
        ({"kind": "GpuConfg"}, 'kind: "GpuConfg" is not known: write GpuConfig'),
        ({"apiVersion": "gpu.nri.io/v2"}, 'apiVersion: "gpu.nri.io/v2" is not known: write gpu.nri.io/v1'),
    ],
)  # fmt: skip
def test_a_mistake_is_explained_with_its_field(fields: dict[str, object], sentence: str) -> None:
    (fault,) = faults_of(**fields)
    assert fault.startswith(sentence)


def test_all_mistakes_are_told_at_once() -> None:
    found = faults('{"mode": "share", "sharing": {"memory": "10", "threads": 0}, "extras": ["drn", 5], "x": {}}')
    assert [each.partition(":")[0] for each in found] == [
        '"x" is no field, known', "apiVersion", "kind", "mode", "extras[0]", "extras[1]",
        "sharing.memory", "sharing.threads",
    ]  # fmt: skip


def test_a_field_that_comes_twice_is_a_mistake_wherever_it_is() -> None:
    start = '{"apiVersion": "gpu.nri.io/v1", "kind": "GpuConfig", "mode": "mps"'
    assert faults(start + ', "mode": "shared"}') == ("mode: is given twice",)
    twice = start + ', "sharing": {"threads": 5, "threads": 6}}'
    assert faults(twice) == ("sharing.threads: is given twice",)


def test_what_is_no_object_or_too_large_is_refused() -> None:
    assert faults("[]")[0] == "parameters: a list is not an object"
    assert faults("null")[0] == "parameters: null is not an object"
    assert faults("{")[0].startswith("it is not JSON")
    assert faults("[" * 5000)[0].startswith("it is not JSON")
    assert "over the limit" in faults(json.dumps({"kind": "x" * BYTES_MAX}))[0]


def test_thousands_of_mistakes_are_not_all_looked_into() -> None:
    for many in (
        ", ".join(f'"capability{number}": 1' for number in range(400)),
        f'"capabilities": [{", ".join(f"{chr(34)}comput{number}{chr(34)}" for number in range(700))}]',
        f'"extras": [{", ".join([chr(34) + "imex:1" + chr(34)] * 900)}]',
    ):
        found = faults(f'{{"apiVersion": "gpu.nri.io/v1", "kind": "GpuConfig", {many}}}')
        assert 0 < len(found) <= FAULTS_MAX
        assert len("; ".join(found)) < 4_000
