"""The CPUs and the memory nearest to a container's GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from typing import Final

from msgspec import Struct

from nri_gpu.domain.claim import NumaBinding
from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import NO_EDITS, NO_EXTRA_EDITS, Edits, ExtraEdits
from nri_gpu.domain.gpu import Capabilities, Capability, Unit, whole
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import CompatPackage, DriverTree, Inventory, Loader, Majors, NumaNode
from nri_gpu.injection import devices, env
from nri_gpu.injection.mounts import DriverPlaces, compat_mount, free_places, tree_mounts
from nri_gpu.injection.mps import client_edits


class Cpuset(Struct, frozen=True):
    """Lists in the kernel's syntax; empty: not ours to say."""

    cpus: str = ""
    mems: str = ""


UNBOUND: Final = Cpuset()
_CPUS: Final = frozenset({NumaBinding.CPUS, NumaBinding.BOTH})
_MEMORY: Final = frozenset({NumaBinding.MEMORY, NumaBinding.BOTH})


def cpuset_of(units: Iterable[Unit], nodes: Sequence[NumaNode], binding: NumaBinding, *, pinned: bool) -> Cpuset:
    """What a container that is granted these is kept to. pinned: somebody else has set its cpuset.

    Nothing where the node of one GPU is not known: the others' would keep it away from that one. A node without CPUs or
    without memory adds none, and the kernel refuses an empty list.
    """
    if binding is NumaBinding.NONE or pinned:
        return UNBOUND
    wanted = {whole(unit).numa_node for unit in units}
    near = [node for node in nodes if node.number in wanted]
    if len(near) < len(wanted):
        return UNBOUND
    return Cpuset(
        cpus=",".join(node.cpus for node in near if node.cpus) if binding in _CPUS else "",
        mems=",".join(str(node.number) for node in near if node.memory) if binding in _MEMORY else "",
    )


class Share(Struct, frozen=True, kw_only=True):
    """What one container is to receive.

    gpus: GPUs and MIG devices, in NVML order; none for `none`. capabilities: closed. tree: the staged driver files for
    them. loader: how they are found. void: policy keeps NVIDIA_VISIBLE_DEVICES for others on this node. numa: what
    policy keeps to the GPUs' NUMA nodes. extra: what its extras are made of. compat: a newer CUDA than the driver's.
    completes: it holds its GPUs by others' hand, and gets no node of a GPU. mps: its place at a daemon. The mark is not
    ours to add: the shell signs it.
    """

    container: Container
    gpus: tuple[Unit, ...]
    capabilities: Capabilities
    inventory: Inventory
    tree: DriverTree | None
    loader: Loader
    void: bool
    numa: NumaBinding = NumaBinding.NONE
    extra: ExtraEdits = NO_EXTRA_EDITS
    compat: CompatPackage | None = None
    completes: bool = False
    mps: Seat | None = None


class Recipe(Struct, frozen=True):
    """All of a share that decides its edits, and nothing else: containers of one kind have the same one.

    present: of a container that is completed, the shared nodes that it has already; None of all others.
    """

    gpus: tuple[Unit, ...]
    capabilities: Capabilities
    majors: Majors
    tree: DriverTree | None
    places: DriverPlaces
    library_path: str
    void: bool
    cpuset: Cpuset
    extra: ExtraEdits
    compat: CompatPackage | None = None
    present: frozenset[str] | None = None
    mps: Seat | None = None

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
        places=_places(share.loader, share.container.mounts, share.tree),
        library_path=share.container.env.get(env.LIBRARY_PATH, ""),
        void=share.void,
        cpuset=cpuset_of(share.gpus, share.inventory.numa, share.numa, pinned=share.container.pinned),
        extra=share.extra,
        compat=share.compat,
        present=devices.shared_among(share.container.devices) if share.completes else None,
        mps=share.mps,
    )
    return _kept(recipe) if len(recipe.library_path) <= LIBRARY_PATH_KEPT else _merged(recipe)


def _places(loader: Loader, mounts: frozenset[str], tree: DriverTree | None) -> DriverPlaces:
    look = _kept_places if len(mounts) <= MOUNTS_KEPT else free_places
    return look(loader, mounts, tree)


def _merged(recipe: Recipe) -> Edits:
    return reduce(Edits.merge, (contribute(recipe) for contribute in CONTRIBUTORS), NO_EDITS)


# Both are pure, so remembering them changes nothing but their cost.
_kept = lru_cache(maxsize=256)(_merged)
_kept_places = lru_cache(maxsize=256)(free_places)


def _devices(recipe: Recipe) -> Edits:
    if recipe.present is not None:
        shared = devices.shared_nodes(recipe.capabilities, recipe.majors)
        return Edits.of(devices=tuple(node for node in shared if node.path not in recipe.present))
    return Edits.of(devices=devices.device_nodes(recipe.gpus, recipe.capabilities, recipe.majors))


def _driver(recipe: Recipe) -> Edits:
    if recipe.tree is None or not recipe.gpus:
        return NO_EDITS
    folders = recipe.places.search(compatible=Capability.COMPAT32 in recipe.capabilities)
    return Edits.of(
        mounts=tree_mounts(recipe.tree, recipe.places),
        env=env.library_path(folders, recipe.library_path),
    )


def _compat(recipe: Recipe) -> Edits:
    """After the driver's, whose path it leads; glibc takes the first library of a name that it finds there."""
    if recipe.compat is None:
        return NO_EDITS
    mount, behind = compat_mount(recipe.compat), _driver(recipe).env.get(env.LIBRARY_PATH, recipe.library_path)
    return Edits.of(mounts=(mount,), env=env.library_path([mount.destination], behind))


def _visible(recipe: Recipe) -> Edits:
    return Edits.of(env=env.visible_devices(recipe.gpus, void=recipe.void)) if recipe.gpus else NO_EDITS


def _extras(recipe: Recipe) -> Edits:
    parts = recipe.extra
    return Edits.of(devices=parts.nodes, mounts=parts.mounts, rlimits=parts.rlimits) if recipe.gpus else NO_EDITS


def _mps(recipe: Recipe) -> Edits:
    return client_edits(recipe.mps) if recipe.mps and recipe.gpus else NO_EDITS


def _cpuset(recipe: Recipe) -> Edits:
    return Edits.of(cpuset_cpus=recipe.cpuset.cpus, cpuset_mems=recipe.cpuset.mems)


CONTRIBUTORS: Final[tuple[Contributor, ...]] = (_devices, _driver, _compat, _visible, _extras, _mps, _cpuset)
