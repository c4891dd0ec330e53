"""What a topology file says of how GPUs are set up, and of the driver's kernel modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, TypeVar

from msgspec import Struct

from nri_gpu.domain.gpu import ComputeMode, Ecc, Fabric, FabricState
from nri_gpu.inventory.facts import ADDRESSING, ARCHITECTURES, MODULES
from nri_gpu.inventory.identity import parse_cluster, parse_module_version
from nri_gpu.inventory.numa import parse_cpulist
from nri_gpu.inventory.table import Table

UINT_MAX: Final = 2**32 - 1
E = TypeVar("E", bound=StrEnum)


class Facts(Struct, frozen=True, kw_only=True):
    """Of one GPU, as in `Gpu`."""

    architecture: str
    cpus: str
    compute_mode: ComputeMode | None
    persistence: bool | None
    ecc: Ecc | None
    addressing: str
    fabric: Fabric | None


def read_facts(table: Table) -> Facts:
    """All of them are optional."""
    return Facts(
        architecture=table.parsed("architecture", _maybe(_one_of(ARCHITECTURES.values())), default="") or "",
        cpus=table.parsed("cpus", _maybe(parse_cpulist), default="") or "",
        compute_mode=_word(table, "compute_mode", ComputeMode),
        persistence=table.maybe_flag("persistence"),
        ecc=_ecc(table),
        addressing=table.parsed("addressing", _maybe(_one_of(ADDRESSING)), default="") or "",
        fabric=_fabric(table.table("fabric")) if table.has("fabric") else None,
    )


def read_modules(table: Table) -> dict[str, str]:
    """`[node.modules]`: versions by the kernel's names."""
    found = {name: table.parsed(name, parse_module_version) or "" for name in MODULES if table.has(name)}
    table.done()
    return found


def _ecc(table: Table) -> Ecc | None:
    """`ecc_pending` is the same as `ecc` where it is left out."""
    current, pending = table.maybe_flag("ecc"), table.maybe_flag("ecc_pending")
    if current is None:
        if pending is not None:
            table.wrong("ecc_pending", "says what becomes of `ecc`, which is missing")
        return None
    return Ecc(current, current if pending is None else pending)


def _fabric(table: Table) -> Fabric | None:
    state = _word(table, "state", FabricState, optional=False)
    fabric = Fabric(
        state=state or FabricState.COMPLETED,
        status=table.number("status", 0, UINT_MAX, optional=True) or 0,
        cluster=table.parsed("cluster", parse_cluster, default="") or "",
        clique=table.number("clique", 0, UINT_MAX, optional=True) or 0,
        health_mask=table.number("health_mask", 0, UINT_MAX, optional=True),
    )
    table.done()
    return fabric


def _word(table: Table, key: str, words: type[E], *, optional: bool = True) -> E | None:
    if optional and not table.has(key):
        return None
    found = table.parsed(key, _one_of(words))
    return None if found is None else words(found)


def _one_of(words: Iterable[str]) -> Callable[[str], str]:
    known = tuple(words)

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text[:64]!r} is none of {', '.join(known)}")
        return text

    return parse


def _maybe(parse: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: parse(text) if text else ""
