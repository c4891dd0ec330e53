"""The plan: contributors in one stated order, merged into one set of edits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Final

from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import NO_EDITS, Edits
from nri_gpu.domain.gpu import Capabilities, Capability, DriverTree, Inventory, Majors, Unit
from nri_gpu.injection import devices, env
from nri_gpu.injection.mounts import Places, free_places, tree_mounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one container is to receive.

    gpus: GPUs and MIG devices, in NVML order; none for `none`. capabilities: closed. tree: the staged driver files for
    them. void: policy keeps NVIDIA_VISIBLE_DEVICES for others on this node. The mark is not ours to add: the shell
    signs it.
    """

    container: Container
    gpus: tuple[Unit, ...]
    capabilities: Capabilities
    inventory: Inventory
    tree: DriverTree | None
    void: bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """All of a share that decides its edits, and nothing else: containers of one kind have the same one."""

    gpus: tuple[Unit, ...]
    capabilities: Capabilities
    majors: Majors
    tree: DriverTree | None
    places: Places
    library_path: str
    void: bool

    def __hash__(self) -> int:
        """By what differs from one to the next on a node; all of it took as long as the rest of planning."""
        return hash((len(self.gpus), self.gpus[0].uuid if self.gpus else "", self.capabilities, self.library_path))


Contributor = Callable[[Recipe], Edits]
# Longer ones are not worth keeping: they come from whoever made the container.
LIBRARY_PATH_KEPT: Final = 512  # characters
MOUNTS_KEPT: Final = 64


def plan(share: Share) -> Edits:
    """All that is added to the container, each path and key once. Containers of one kind get the very same object."""
    recipe = Recipe(
        gpus=share.gpus,
        capabilities=share.capabilities,
        majors=share.inventory.majors,
        tree=share.tree,
        places=_places(share.container.mounts, share.tree),
        library_path=share.container.env.get(env.LIBRARY_PATH, ""),
        void=share.void,
    )
    return _kept(recipe) if len(recipe.library_path) <= LIBRARY_PATH_KEPT else _merged(recipe)


def _places(mounts: frozenset[str], tree: DriverTree | None) -> Places:
    return _kept_places(mounts, tree) if len(mounts) <= MOUNTS_KEPT else free_places(mounts, tree)


def _merged(recipe: Recipe) -> Edits:
    return reduce(Edits.merge, (contribute(recipe) for contribute in CONTRIBUTORS), NO_EDITS)


# Both are pure, so remembering them changes nothing but their cost.
_kept = lru_cache(maxsize=256)(_merged)
_kept_places = lru_cache(maxsize=256)(free_places)


def _devices(recipe: Recipe) -> Edits:
    return Edits.of(devices=devices.device_nodes(recipe.gpus, recipe.capabilities, recipe.majors))


def _driver(recipe: Recipe) -> Edits:
    if recipe.tree is None or not recipe.gpus:
        return NO_EDITS
    # No default folder of a 32-bit loader can take a tree of ours without hiding the image's, so the variable alone
    # leads there; each of the two loaders passes over the other's libraries.
    parts = ("lib64", "lib32") if Capability.COMPAT32 in recipe.capabilities else ("lib64",)
    return Edits.of(
        mounts=tree_mounts(recipe.tree, recipe.places),
        env=env.library_path([f"{recipe.places.tree}/{part}" for part in parts], recipe.library_path),
    )


def _visible(recipe: Recipe) -> Edits:
    return Edits.of(env=env.visible_devices(recipe.gpus, void=recipe.void)) if recipe.gpus else NO_EDITS


CONTRIBUTORS: Final[tuple[Contributor, ...]] = (_devices, _driver, _visible)
