"""The plan: contributors in one stated order, merged into one set of edits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Final

from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import NO_EDITS, Edits
from nri_gpu.domain.gpu import Capabilities, DriverTree, Gpu, Inventory
from nri_gpu.injection import devices, env, mounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one container is to receive.

    gpus: granted, in NVML order; none for `none`. tree: the staged driver files for its capabilities.
    void: policy keeps NVIDIA_VISIBLE_DEVICES for others on this node. The mark is not ours to add: the shell signs it.
    """

    container: Container
    gpus: tuple[Gpu, ...]
    capabilities: Capabilities
    inventory: Inventory
    tree: DriverTree | None
    void: bool


Contributor = Callable[[Share], Edits]


def plan(share: Share) -> Edits:
    """All that is added to the container, each path and key once."""
    return reduce(Edits.merge, (contribute(share) for contribute in CONTRIBUTORS), NO_EDITS)


def _devices(share: Share) -> Edits:
    return Edits.of(devices=devices.device_nodes(share.gpus, share.capabilities, share.inventory.majors))


def _driver(share: Share) -> Edits:
    if share.tree is None or not share.gpus:
        return NO_EDITS
    folder = f"{mounts.tree_place(share.container.mounts)}/lib64"
    return Edits.of(
        mounts=mounts.tree_mounts(share.tree, share.container.mounts),
        env=env.library_path(folder, share.container.env),
    )


def _visible(share: Share) -> Edits:
    return Edits.of(env=env.visible_devices(share.gpus, void=share.void)) if share.gpus else NO_EDITS


CONTRIBUTORS: Final[tuple[Contributor, ...]] = (_devices, _driver, _visible)
