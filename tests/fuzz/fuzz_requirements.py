"""Invariant: whatever an image's variables say is met or refused in a sentence; what is no condition is never met."""

from __future__ import annotations

import re
from typing import Final

from nri_gpu.request.image_requirements import (
    BRANDS,
    CUDA_VERSION,
    DIFFERENT_MAX,
    DISABLE,
    PREFIX,
    REQUIRE_CUDA,
    TOTAL_MAX,
    GpuFacts,
    RequirementFacts,
    unmet,
)
from tests.fuzz.target import Target
from tests.unit.request.required import MALFORMED, NOT_TRUE, REAL, TRUE

GRAMMAR: Final = (
    *("cuda", "driver", "arch", "brand", "=", "!=", "<", "<=", ">", ">=", ",", " ", "12", "12.4", "470", "9.0", "."),
    *BRANDS,
)
NODES: Final = (
    RequirementFacts("560.35.03", "12.6", (GpuFacts((9, 0), "nvidia"), GpuFacts((7, 0), "tesla"))),
    RequirementFacts("470.57.02", "11.4", ()),
    RequirementFacts("", "", (GpuFacts((0, 0), ""),)),
)
CONDITION: Final = re.compile(
    r"(?:(?:cuda|driver|arch)(?:=|!=|<=?|>=?)\d[\d.]*|brand!?=[\w.-]+)", re.ASCII | re.IGNORECASE
)
VERSIONS: Final = ("abc", "12.4.1", "12.4.1rc1", "v12.4", "-1.0", "cu121", "12.04", "12.4.1.2")


def check(value: str) -> bool:
    """Whether the first node meets it, as NVIDIA_REQUIRE_CUDA; any exception comes out as it is."""
    for node in NODES:
        for env in ({REQUIRE_CUDA: value}, {CUDA_VERSION: value}, {f"{PREFIX}{value}": "cuda>=99"}):
            said = refusal(env, node)
            assert said or set(env) != {REQUIRE_CUDA} or well_formed(value)
            assert bool(refusal(env | {DISABLE: value}, node)) is bool(said), "only policy lets it be turned off"
        assert refusal({REQUIRE_CUDA: "cuda>=99", DISABLE: value}, node)
        assert refusal({REQUIRE_CUDA: f"{value} bogus>=1"}, node)
        assert refusal({REQUIRE_CUDA: f"cuda>=99,{value}".replace(" ", ",")}, node)
    return not refusal({REQUIRE_CUDA: value}, NODES[0])


def refusal(env: dict[str, str], node: RequirementFacts, *, may_disable: bool = False) -> str:
    """What it says, looked at; empty when all is met."""
    found = unmet(env, node, may_disable=may_disable)
    if found is None:
        return ""
    for text in (found.variable, found.condition, found.clause):
        assert text.isascii()
        assert not text or text.isprintable()
    assert found.variable
    assert 0 < len(found.clause) < 400
    assert max(len(found.variable), len(found.condition)) <= 48 + len("...")
    return found.clause


def well_formed(value: str) -> bool:
    pieces = set(filter(None, value.replace(" ", ",").split(",")))
    fits = len(value) <= TOTAL_MAX and len(pieces) <= DIFFERENT_MAX
    return fits and all(CONDITION.fullmatch(piece) for piece in pieces)


REQUIREMENTS: Final = Target(
    lambda data: check(data.decode(errors="surrogateescape")),
    good=[value.encode() for value in ("", "cuda<13", "arch>7.5 cuda<13", "CUDA>=12,Driver!=470.57.02")],
    bad=[value.encode(errors="surrogatepass") for value in MALFORMED.values()],
    pieces=(*GRAMMAR, *VERSIONS, *TRUE, *NOT_TRUE, *dict.fromkeys(value for value, _, _ in REAL.values())),
)
TARGETS: Final = {"requirements": REQUIREMENTS}
