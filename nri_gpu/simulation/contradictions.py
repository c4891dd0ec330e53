"""Contradictions in a topology file: values that are each possible and cannot be true of one node together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu, MigDevice
from nri_gpu.domain.node import Inventory, Link
from nri_gpu.inventory.formats import NVLINKS_MAX
from nri_gpu.simulation.scenario import Scenario
from nri_gpu.simulation.tables import ChangeTable, FileTable

MIG_ARCH: Final = (8, 0)  # A100, the first with MIG
ARCHS_WITHOUT_MIG: Final = frozenset({(8, 6), (8, 7), (8, 9)})  # GA10x, Orin, Ada
SLICES_MAX: Final = 7  # compute slices of a GPU with MIG (NVIDIA's MIG guide); some have fewer
_PROFILE: Final = re.compile(r"(?:(\d)c\.)?(\d)g\.(\d+)gb")


def contradictions(file: FileTable, scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Key path and sentence of each, of the node at the beginning and after each change.

    file: without a fault. scenario: what it describes.
    """
    found = [*_references(file, scenario.inventory), *_sequence(file)]
    yield from found
    beginning = tuple(_contradictions(scenario.inventory))
    yield from ((_path(file, each), each.message) for each in beginning)
    if not found:
        yield from _after_changes(file, scenario, set(beginning))


def _references(file: FileTable, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Links, events and changes of GPUs that are not there, or do not support them."""
    gpus, pairs = {gpu.index: gpu for gpu in inventory.gpus}, dict[tuple[int, int], int]()
    named = [(f"link[{place}].{end}", getattr(link, end)) for place, link in enumerate(file.link) for end in "ab"]
    named += [(f"event[{place}].gpu", event.gpu) for place, event in enumerate(file.event)]
    named += [(f"change[{at}].gpu", change.gpu) for at, change in enumerate(file.change) if change.gpu is not None]
    for path, index in named:
        if index not in gpus:
            yield path, f"there is no GPU with index {index}"
    for place, link in enumerate(file.link):
        if (first := pairs.setdefault((link.a, link.b), place)) != place:
            yield f"link[{place}]", f"the same as link[{first}]"
    for place, change in enumerate(file.change):
        gpu = gpus.get(-1 if change.gpu is None else change.gpu)
        if gpu and gpu.arch and change.partition and (gpu.arch < MIG_ARCH or gpu.arch in ARCHS_WITHOUT_MIG):
            why = f"its compute capability is {gpu.arch_text}"
            yield f"change[{place}].mig", f"GPU {gpu.index} does not support MIG: {why}"


def _in_time(file: FileTable) -> list[tuple[int, ChangeTable]]:
    """The changes in the order of the scenario, each with its place in the file."""
    return sorted(enumerate(file.change), key=lambda each: each[1].at_s)


def _sequence(file: FileTable) -> Iterator[tuple[str, str]]:
    """Changes of the same thing at the same time, and of a GPU that is absent, or comes twice."""
    absent: dict[int, float] = {}  # index -> since when
    changed: set[tuple[int | None, float, str]] = set()
    for place, change in _in_time(file):
        path, gpu = f"change[{place}]", change.gpu
        for key in sorted(change.keys):
            if (what := (gpu, change.at_s, key)) in changed:
                yield f"{path}.{key}", f"another change sets it at the same time, {change.at_s:g} s"
            changed.add(what)
        if gpu is None:
            continue
        since_s = absent.get(gpu)
        if change.present is None and since_s is not None:
            yield f"{path}.gpu", f"GPU {gpu} is absent at that time, since {since_s:g} s"
        elif change.present and since_s is None:
            yield f"{path}.present", f"GPU {gpu} is already present at that time"
        elif change.present:
            del absent[gpu]
        elif change.present is False and since_s is not None:
            yield f"{path}.present", f"GPU {gpu} is already absent at that time, since {since_s:g} s"
        elif change.present is False:
            absent[gpu] = change.at_s


def _after_changes(file: FileTable, scenario: Scenario, known: set[Contradiction]) -> Iterator[tuple[str, str]]:
    """Each contradiction at the change that first causes it."""
    changes = tuple(replace(change, fault=None) for change in scenario.changes)
    for number, (place, change) in enumerate(_in_time(file), 1):
        for each in _contradictions(Scenario(scenario.inventory, changes[:number]).after(float("inf"))):
            if each not in known:
                known.add(each)
                below = ".mig" if each.kind == "mig" and "mig" in change.keys else ""
                yield f"change[{place}]{below}", f"from then on: {each.message}"


class Contradiction(Struct, frozen=True):
    """Two values that do not fit.

    kind: `majors`, `mig`, `drm` or `link`. where: the MIG device's UUID, the DRM node's name or the link's ends.
    key: of the later value, the one to correct.
    """

    kind: str
    where: Hashable
    key: str
    message: str


def _path(file: FileTable, found: Contradiction) -> str:
    """The key path, by the file's own order."""
    if found.kind == "majors":
        return f"node.majors.{found.key}"
    places: dict[Hashable, str] = {(link.a, link.b): f"link[{at}]" for at, link in enumerate(file.link)}
    for at, gpu in enumerate(file.gpu):
        places |= {node.name: f"gpu[{at}].drm[{below}]" for below, node in enumerate(gpu.drm)}
        places |= {table.uuid: f"gpu[{at}].mig[{below}]" for below, table in enumerate(gpu.mig_tables)}
    return f"{places[found.where]}.{found.key}"


def _contradictions(inventory: Inventory) -> Iterator[Contradiction]:
    yield from (*_majors(inventory), *_uuids(inventory), *_minors(inventory))
    for gpu in inventory.gpus:
        yield from (*_memory(gpu), *_slices(gpu))
    yield from (*_drm(inventory), *_links(inventory))


def _majors(inventory: Inventory) -> Iterator[Contradiction]:
    """A major belongs to one module."""
    met: dict[int, str] = {}
    for name in ("nvidia", "nvidia_uvm", "nvidia_caps"):
        major = getattr(inventory.majors, name)
        if major is not None and (first := met.setdefault(major, name)) != name:
            yield Contradiction("majors", "", name, f"{major} already belongs to {first}")


def _uuids(inventory: Inventory) -> Iterator[Contradiction]:
    met: dict[str, str] = {}
    for part in inventory.parts:
        if (first := met.setdefault(part.uuid, part.place)) != part.place:
            yield Contradiction("mig", part.uuid, "uuid", f"{part.uuid} is already the UUID of MIG device {first}")


def _minors(inventory: Inventory) -> Iterator[Contradiction]:
    """A capability minor belongs to one instance; all compute instances of a GPU instance share that one's."""
    met: dict[int, tuple[Hashable, str]] = {}
    seen: dict[tuple[int, int], int] = {}
    for part in inventory.parts:
        device = part.device
        instance = (part.gpu.index, device.gpu_instance_id)
        for key, minor, owner in (
            ("gi_minor", device.gpu_instance_minor, instance),
            ("ci_minor", device.compute_instance_minor, (*instance, device.compute_instance_id)),
        ):
            if minor is None:
                continue
            first, name = met.setdefault(minor, (owner, f"{key} of MIG device {part.place}"))
            if first != owner:
                yield Contradiction("mig", part.uuid, key, f"{minor} is already {name}")
        if device.gpu_instance_minor is not None:
            known = seen.setdefault(instance, device.gpu_instance_minor)
            if known != device.gpu_instance_minor:
                message = f"{device.gpu_instance_minor}, where another part of GPU instance {instance[1]} has {known}"
                yield Contradiction("mig", part.uuid, "gi_minor", message)


def _instances(gpu: Gpu) -> dict[int, list[MigDevice]]:
    found: dict[int, list[MigDevice]] = defaultdict(list)
    for device in gpu.mig:
        found[device.gpu_instance_id].append(device)
    return found


def _memory(gpu: Gpu) -> Iterator[Contradiction]:
    """Each GPU instance has memory of its own."""
    total = 0
    for devices in _instances(gpu).values():
        total += max(device.memory_bytes or 0 for device in devices)
        if gpu.memory_bytes and total > gpu.memory_bytes:
            whose = "it has" if devices == list(gpu.mig) else "with those before it"
            message = f"{whose} {total} bytes, and its GPU has {gpu.memory_bytes}"
            yield Contradiction("mig", devices[0].uuid, "memory_bytes", message)
            return


def _slices(gpu: Gpu) -> Iterator[Contradiction]:
    total = 0
    for number, devices in _instances(gpu).items():
        cut = [(device, match) for device in devices if (match := _PROFILE.match(device.profile))]
        if not cut:
            continue
        first = cut[0][1]
        slices, used = int(first[2]), 0
        for device, match in cut:
            if match.group(2, 3) != first.group(2, 3):
                message = f"{device.profile}, where another part of GPU instance {number} is {cut[0][0].profile}"
                yield Contradiction("mig", device.uuid, "profile", message)
                continue
            used += int(match[1] or slices)
            if used > slices:
                message = f"with those before it {used} compute slices, and GPU instance {number} has {slices}"
                yield Contradiction("mig", device.uuid, "profile", message)
        total += slices
        if total > SLICES_MAX:
            message = f"with those before it {total} slices, and no GPU has more than {SLICES_MAX}"
            yield Contradiction("mig", devices[0].uuid, "profile", message)
            return


def _drm(inventory: Inventory) -> Iterator[Contradiction]:
    met: dict[tuple[int, int], str] = {}
    for gpu in inventory.gpus:
        for node in gpu.drm:
            if (first := met.setdefault((node.major, node.minor), node.name)) != node.name:
                message = f"{node.major}:{node.minor} already belongs to {first}"
                yield Contradiction("drm", node.name, "minor", message)


def _links(inventory: Inventory) -> Iterator[Contradiction]:
    """Direct links of a GPU add up; through switches each pair has as many as the GPU with fewer links."""
    of: dict[int, list[Link]] = defaultdict(list)
    for link in inventory.links:
        for end in (link.a, link.b):
            of[end].append(link)
    most = {index: max(link.nvlink for link in links) for index, links in of.items()}
    for index, links in sorted(of.items()):
        total = sum(link.nvlink for link in links)
        if total <= NVLINKS_MAX:
            continue
        among = {end for link in links if link.nvlink for end in (link.a, link.b)}
        if odd := _odd_link([link for link in inventory.links if among >= {link.a, link.b}], most):
            message = (
                f"GPU {index} has {total} NVLinks, and no GPU has more than {NVLINKS_MAX}; "
                f"through switches this pair would have {min(most[odd.a], most[odd.b])}"
            )
            yield Contradiction("link", (odd.a, odd.b), "nvlink", message)
            return


def _odd_link(links: Sequence[Link], most: dict[int, int]) -> Link | None:
    return next((link for link in links if link.nvlink not in (0, min(most[link.a], most[link.b]))), None)
