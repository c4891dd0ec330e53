"""Where in a topology file something stands that is wrong only beside something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from nri_gpu.domain.errors import Fault
from nri_gpu.domain.gpu import Inventory
from nri_gpu.inventory.contradictions import Contradiction, contradictions
from nri_gpu.inventory.scene import Change, Scene
from nri_gpu.policy.lines import key_lines, line_of

# Of what a contradiction is made: where that has a fault of its own, something else stood in for it.
_READ_BESIDE: Final[Mapping[str, set[str]]] = {"majors": {"majors"}, "link": {"link", "gpu"}}


def contradicting(data: Mapping[str, Any], scene: Scene, faults: Sequence[Fault]) -> Iterator[tuple[str, str]]:
    """Key path and sentence of each contradiction of the node at its beginning, and of what its changes lead to.

    data: as the file has it. faults: those found before; next to one of the same kind nothing can be said for sure.
    """
    wrong = {_kind(fault.key) for fault in faults}
    found = contradictions(scene.inventory)
    for each in found:
        if not wrong & _READ_BESIDE.get(each.kind, {"gpu"}):
            yield _path(data, each), each.message
    if not faults:
        yield from _of_changes(data, scene, set(found))


def with_lines(faults: Sequence[Fault], text: str) -> tuple[Fault, ...]:
    """The same faults, each with the line that its key stands on, or else what it is in."""
    lines = key_lines(text)
    return tuple(replace(fault, line=fault.line or line_of(lines, fault.key)) for fault in faults)


def _kind(path: str) -> str:
    return "majors" if path.startswith("node.majors") else re.split(r"[.\[]", path, maxsplit=1)[0]


def _of_changes(data: Mapping[str, Any], scene: Scene, known: set[Contradiction]) -> Iterator[tuple[str, str]]:
    """What the node contradicts after each change, said where it first comes about."""
    times = [change.get("at_s", 0) for change in data.get("change", ())]
    order = sorted(range(len(times)), key=lambda at: times[at])  # as they are played
    changes = tuple(replace(change, fault=None) for change in scene.changes)
    if len(order) != len(changes):
        return
    for number, place in enumerate(order, 1):
        for each in contradictions(_after(scene.inventory, changes[:number])):
            if each not in known:
                known.add(each)
                below = ".mig" if each.kind == "mig" and "mig" in data["change"][place] else ""
                yield f"change[{place}]{below}", f"from then on: {each.message}"


def _after(inventory: Inventory, changes: tuple[Change, ...]) -> Inventory:
    return Scene(inventory, changes).after(float("inf"))


def _path(data: Mapping[str, Any], found: Contradiction) -> str:
    """By the file's own order."""
    match found.kind:
        case "majors":
            return f"node.majors.{found.key}"
        case "link":
            ends: list[tuple[Any, ...]] = [(link.get("a"), link.get("b")) for link in data["link"]]
            return f"link[{ends.index(found.where)}].{found.key}"
    index, below = found.where
    place = [gpu.get("index") for gpu in data["gpu"]].index(index)
    tables = data["gpu"][place][found.kind]
    if found.kind == "drm":
        names = [table.get("name") for table in tables]
    else:
        names = [table.get("index", at) for at, table in enumerate(tables)]
    return f"gpu[{place}].{found.kind}[{names.index(below)}].{found.key}"
