"""Which of the devices that the kubelet may choose from go well together: the ledger room's placement. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nri_gpu.allocation.choose import Room, choose
from nri_gpu.allocation.fabric import fabric_of
from nri_gpu.domain.gpu import GpuUuid, MigPart, Unit, nvml_order, whole
from nri_gpu.domain.placement import Strategy
from nri_gpu.kubelet.books import Books


def prefer(
    units: Mapping[str, Unit], available: Sequence[str], must: Sequence[str], size: int, books: Books, *, replicas: bool
) -> tuple[str, ...]:
    """Ids, those that must be included first. units: what the ids are; ids of none are taken last, in order."""
    kept = tuple(dict.fromkeys(sorted(must)))
    open_ones = sorted(set(available) - set(kept))
    number = min(size - len(kept), len(open_ones))
    if number <= 0:
        return kept
    known = [id_ for id_ in open_ones if id_ in units]
    if replicas or any(isinstance(units[id_], MigPart) for id_ in known):
        chosen = _one_by_one(units, known, number, _fullest_first(books) and not replicas)
    else:
        chosen = _together(units, known, [units[id_] for id_ in kept if id_ in units], number, books)
    rest = [id_ for id_ in open_ones if id_ not in chosen]
    return (*kept, *chosen, *rest[: number - len(chosen)])


def _together(
    units: Mapping[str, Unit], ids: Sequence[str], taken: Sequence[Unit], number: int, books: Books
) -> tuple[str, ...]:
    """Whole GPUs: the best linked set, as `allocation.place` chooses for annotations."""
    inventory, used = books.node().inventory, books.used()
    places = fabric_of(inventory).places
    at = {places[units[id_].uuid]: id_ for id_ in ids}
    free = tuple(place for uuid, place in places.items() if uuid not in used)
    chosen = choose(
        fabric_of(inventory),
        min(number, len(at)),
        tuple(sorted(at)),
        taken=tuple(sorted(places[unit.uuid] for unit in taken)),
        room=Room(free=free, strategy=books.policy().placement.strategy),
    )
    return tuple(at[place] for place in sorted(chosen))


def _one_by_one(units: Mapping[str, Unit], ids: Sequence[str], number: int, fullest: bool) -> tuple[str, ...]:
    """MIG devices and replicas: links do not matter, how much of each GPU is in use does, then how much was picked."""
    gpu_of = {id_: whole(unit).uuid for id_, unit in units.items()}
    candidates, sign = set(ids), -1 if fullest else 1
    in_use = Counter(gpu_of[id_] for id_ in units if id_ not in candidates)
    picked: Counter[GpuUuid] = Counter()
    left, chosen = list(ids), list[str]()

    def rank(id_: str) -> tuple[object, ...]:
        gpu = gpu_of[id_]
        return sign * (in_use[gpu] + picked[gpu]), picked[gpu], nvml_order(units[id_]), id_

    while left and len(chosen) < number:
        best = min(left, key=rank)
        left.remove(best)
        chosen.append(best)
        picked[gpu_of[best]] += 1
    return tuple(chosen)


def _fullest_first(books: Books) -> bool:
    return books.policy().placement.strategy is Strategy.PACK
