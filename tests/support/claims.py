"""A claim written out again in the request grammar: the other half of the round trip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from nri_gpu.domain.edits import NO_EXTRAS, Extra
from nri_gpu.domain.gpu_request import (
    ArchSelector,
    Claim,
    Count,
    Devices,
    Everything,
    MemorySelector,
    MigProfiles,
    ModelSelector,
    Nothing,
    Selector,
    Wanted,
)


def format_claim(claim: Claim) -> str:
    """The claim in one order of clauses, sizes in bytes. Parsing that gives the claim back, but for its `text`."""
    return ";".join(_clauses(claim))


def _clauses(claim: Claim) -> Iterator[str]:
    yield _wanted(claim.wanted)
    if claim.mode is not None:
        yield f"mode={claim.mode}"
    if claim.capabilities is not None:
        yield "capabilities=" + ",".join(sorted(claim.capabilities))
    if claim.extras != NO_EXTRAS:
        words = [*claim.extras.ignored, *sorted(claim.extras.asked - {Extra.IMEX})]
        yield "extras=" + ",".join([*words, *(f"imex:{channel}" for channel in claim.extras.channels)])
    shares = {"memory": f"{claim.sharing.memory_mib}Mi", "threads": str(claim.sharing.threads_percent)}
    if asked := [f"{name}:{share}" for name, share in shares.items() if share not in ("0Mi", "0")]:
        yield "sharing=" + ",".join(asked)
    for selector in claim.selectors:
        yield _selector(selector)


def _wanted(wanted: Wanted) -> str:
    match wanted:
        case Everything():
            return "all"
        case Nothing():
            return "none"
        case Count(gpus):
            return f"count={gpus}"
        case Devices(ids):
            return "device=" + ",".join(ids)
        case MigProfiles(profiles):
            return "mig=" + ",".join(f"{each.profile}:{each.devices}" for each in profiles)
        case never:
            assert_never(never)


def _selector(selector: Selector) -> str:
    match selector:
        case ModelSelector(glob):
            return f"model= {glob}"  # a glob may begin with >=
        case MemorySelector(operator, memory_bytes):
            return f"memory{operator}{memory_bytes}"
        case ArchSelector(operator, (major, minor)):
            return f"arch{operator}{major}.{minor}"
        case never:
            assert_never(never)
