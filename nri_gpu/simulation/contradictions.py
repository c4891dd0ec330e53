"""Contradictions in a topology file: values that are each possible and cannot be true of one node together. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import Fault
from nri_gpu.domain.gpu import Gpu, MigDevice
from nri_gpu.domain.node import Inventory, Link
from nri_gpu.inventory.formats import NVLINKS_MAX
from nri_gpu.policy.lines import key_lines, line_of
from nri_gpu.simulation.scenario import Scenario, ScenarioChange

SLICES_MAX: Final = 7  # compute slices of a GPU with MIG (NVIDIA's MIG guide); some have fewer
_PROFILE: Final = re.compile(r"(?:(\d)c\.)?(\d)g\.(\d+)gb")


class Contradiction(Struct, frozen=True):
    """Two values that do not fit.

    kind: `majors`, `mig`, `drm` or `link`. where: (GPU's index, MIG device's index), (GPU's index, DRM node's name), or
    a link's ends; empty for the node. key: of the later value, the one to correct.
    """

    kind: str
    where: tuple[int | str, ...]
    key: str
    message: str


def contradictions(inventory: Inventory) -> tuple[Contradiction, ...]:
    """All of them."""
    mig = (found for gpu in inventory.gpus for found in (*_memory(gpu), *_slices(gpu)))
    return (*_majors(inventory), *_uuids(inventory), *_minors(inventory), *mig, *_drm(inventory), *_links(inventory))


def _majors(inventory: Inventory) -> Iterator[Contradiction]:
    """A major belongs to one module."""
    met: dict[int, str] = {}
    for name in ("nvidia", "nvidia_uvm", "nvidia_caps"):
        major = getattr(inventory.majors, name)
        if major is not None and (first := met.setdefault(major, name)) != name:
            yield Contradiction("majors", (), name, f"{major} already belongs to {first}")


def _uuids(inventory: Inventory) -> Iterator[Contradiction]:
    met: dict[str, str] = {}
    for part in inventory.parts:
        if (first := met.setdefault(part.uuid, part.place)) != part.place:
            where = (part.gpu.index, part.device.index)
            yield Contradiction("mig", where, "uuid", f"{part.uuid} is already the UUID of MIG device {first}")


def _minors(inventory: Inventory) -> Iterator[Contradiction]:
    """A capability minor belongs to one instance; all compute instances of a GPU instance share that one's."""
    met: dict[int, tuple[Hashable, str]] = {}
    seen: dict[tuple[int, int], int] = {}
    for part in inventory.parts:
        device, where = part.device, (part.gpu.index, part.device.index)
        instance = (part.gpu.index, device.gpu_instance_id)
        for key, minor, owner in (
            ("gi_minor", device.gpu_instance_minor, instance),
            ("ci_minor", device.compute_instance_minor, (*instance, device.compute_instance_id)),
        ):
            if minor is None:
                continue
            first, name = met.setdefault(minor, (owner, f"{key} of MIG device {part.place}"))
            if first != owner:
                yield Contradiction("mig", where, key, f"{minor} is already {name}")
        if device.gpu_instance_minor is not None:
            known = seen.setdefault(instance, device.gpu_instance_minor)
            if known != device.gpu_instance_minor:
                message = f"{device.gpu_instance_minor}, where another part of GPU instance {instance[1]} has {known}"
                yield Contradiction("mig", where, "gi_minor", message)


def _instances(gpu: Gpu) -> dict[int, list[MigDevice]]:
    found: dict[int, list[MigDevice]] = defaultdict(list)
    for device in gpu.mig:
        found[device.gpu_instance_id].append(device)
    return found


def _memory(gpu: Gpu) -> Iterator[Contradiction]:
    """Each GPU instance has memory of its own."""
    total = 0
    for devices in _instances(gpu).values():
        total += max(device.memory_bytes for device in devices)
        if gpu.memory_bytes and total > gpu.memory_bytes and len(gpu.mig) > 1:
            message = f"with those before it {total} bytes, and its GPU has {gpu.memory_bytes}"
            yield Contradiction("mig", (gpu.index, devices[0].index), "memory_bytes", message)
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
            where = (gpu.index, device.index)
            if match.group(2, 3) != first.group(2, 3):
                message = f"{device.profile}, where another part of GPU instance {number} is {cut[0][0].profile}"
                yield Contradiction("mig", where, "profile", message)
                continue
            used += int(match[1] or slices)
            if used > slices:
                message = f"with those before it {used} compute slices, and GPU instance {number} has {slices}"
                yield Contradiction("mig", where, "profile", message)
        total += slices
        if total > SLICES_MAX:
            message = f"with those before it {total} slices, and no GPU has more than {SLICES_MAX}"
            yield Contradiction("mig", (gpu.index, devices[0].index), "profile", message)
            return


def _drm(inventory: Inventory) -> Iterator[Contradiction]:
    met: dict[tuple[int, int], str] = {}
    for gpu in inventory.gpus:
        for node in gpu.drm:
            if (first := met.setdefault((node.major, node.minor), node.name)) != node.name:
                message = f"{node.major}:{node.minor} already belongs to {first}"
                yield Contradiction("drm", (gpu.index, node.name), "minor", message)


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


# What each kind of contradiction is read from. If one of these has a fault, a substitute stood in for its value.
_READ_FROM: Final[Mapping[str, set[str]]] = {"majors": {"majors"}, "link": {"link", "gpu"}}


def find_contradictions(
    data: Mapping[str, Any], scenario: Scenario, faults: Sequence[Fault]
) -> Iterator[tuple[str, str]]:
    """Key path and sentence of each contradiction, of the node at the beginning and after each change.

    data: as the file has it. faults: found before; beside one of the same kind nothing is certain.
    """
    wrong = {_kind(fault.key) for fault in faults}
    found = contradictions(scenario.inventory)
    for each in found:
        if not wrong & _READ_FROM.get(each.kind, {"gpu"}):
            yield _path(data, each), each.message
    if not faults:
        yield from _after_changes(data, scenario, set(found))


def with_lines(faults: Sequence[Fault], text: str) -> tuple[Fault, ...]:
    """The same faults, each with the line of its key, or of the table around it."""
    lines = key_lines(text)
    return tuple(replace(fault, line=fault.line or line_of(lines, fault.key)) for fault in faults)


def _kind(path: str) -> str:
    return "majors" if path.startswith("node.majors") else re.split(r"[.\[]", path, maxsplit=1)[0]


def _after_changes(data: Mapping[str, Any], scenario: Scenario, known: set[Contradiction]) -> Iterator[tuple[str, str]]:
    """Each contradiction at the change that first causes it."""
    times = [change.get("at_s", 0) for change in data.get("change", ())]
    order = sorted(range(len(times)), key=lambda at: times[at])  # the order of the scenario
    changes = tuple(replace(change, fault=None) for change in scenario.changes)
    if len(order) != len(changes):
        return
    for number, place in enumerate(order, 1):
        for each in contradictions(_after(scenario.inventory, changes[:number])):
            if each not in known:
                known.add(each)
                below = ".mig" if each.kind == "mig" and "mig" in data["change"][place] else ""
                yield f"change[{place}]{below}", f"from then on: {each.message}"


def _after(inventory: Inventory, changes: tuple[ScenarioChange, ...]) -> Inventory:
    return Scenario(inventory, changes).after(float("inf"))


def _path(data: Mapping[str, Any], found: Contradiction) -> str:
    """The key path, by the file's own order."""
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
