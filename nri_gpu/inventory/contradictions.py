"""What cannot be true of one node at once, although each part of it could. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import Gpu, Inventory, Link, MigDevice

SLICES_MAX: Final = 7  # compute slices of a GPU that MIG can cut (NVIDIA's MIG guide); some have fewer
NVLINKS_MAX: Final = 36  # NVML_NVLINK_MAX_LINKS
_PROFILE: Final = re.compile(r"(?:(\d)c\.)?(\d)g\.(\d+)gb")


class Contradiction(Struct, frozen=True):
    """One of them.

    kind: `majors`, `mig`, `drm` or `link`. where: (GPU's index, MIG device's index), (GPU's index, graphics node's
    name), or a link's ends; empty for the node. key: the one to correct.
    """

    kind: str
    where: tuple[int | str, ...]
    key: str
    message: str


def contradictions(inventory: Inventory) -> tuple[Contradiction, ...]:
    """All of them, each at the later of the two that do not fit."""
    mig = (found for gpu in inventory.gpus for found in (*_memory(gpu), *_slices(gpu)))
    return (*_majors(inventory), *_uuids(inventory), *_minors(inventory), *mig, *_drm(inventory), *_links(inventory))


def _majors(inventory: Inventory) -> Iterator[Contradiction]:
    """A major is one driver's alone."""
    met: dict[int, str] = {}
    for name in ("nvidia", "nvidia_uvm", "nvidia_caps"):
        major = getattr(inventory.majors, name)
        if major is not None and (first := met.setdefault(major, name)) != name:
            yield Contradiction("majors", (), name, f"{major} is {first}'s already")


def _uuids(inventory: Inventory) -> Iterator[Contradiction]:
    met: dict[str, str] = {}
    for part in inventory.parts:
        if (first := met.setdefault(part.uuid, part.place)) != part.place:
            where = (part.gpu.index, part.device.index)
            yield Contradiction("mig", where, "uuid", f"{part.uuid} is MIG device {first}'s already")


def _minors(inventory: Inventory) -> Iterator[Contradiction]:
    """One capability node is of one instance; all compute instances of a GPU instance share that one's."""
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
                yield Contradiction("mig", where, key, f"{minor} is {name} already")
        if device.gpu_instance_minor is not None:
            known = seen.setdefault(instance, device.gpu_instance_minor)
            if known != device.gpu_instance_minor:
                message = f"{device.gpu_instance_minor}, where another part of GPU instance {instance[1]} says {known}"
                yield Contradiction("mig", where, "gi_minor", message)


def _instances(gpu: Gpu) -> dict[int, list[MigDevice]]:
    found: dict[int, list[MigDevice]] = defaultdict(list)
    for device in gpu.mig:
        found[device.gpu_instance_id].append(device)
    return found


def _memory(gpu: Gpu) -> Iterator[Contradiction]:
    """GPU instances have their memory each for itself."""
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
                message = f"{node.major}:{node.minor} is {first}'s already"
                yield Contradiction("drm", (gpu.index, node.name), "minor", message)


def _links(inventory: Inventory) -> Iterator[Contradiction]:
    """Links from GPU to GPU add up; through switches each pair has as many as the lesser of both has."""
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
        if odd := _odd([link for link in inventory.links if among >= {link.a, link.b}], most):
            message = (
                f"GPU {index} has {total} NVLinks, and no GPU has more than {NVLINKS_MAX}; "
                f"through switches this pair would have {min(most[odd.a], most[odd.b])}"
            )
            yield Contradiction("link", (odd.a, odd.b), "nvlink", message)
            return


def _odd(links: Sequence[Link], most: dict[int, int]) -> Link | None:
    return next((link for link in links if link.nvlink not in (0, min(most[link.a], most[link.b]))), None)
