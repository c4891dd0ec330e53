"""A simulated node and what becomes of it: changes that a topology file plays at times of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, Inventory, Majors, MigDevice
from nri_gpu.domain.health import Sign

LOST: Final = "GPU is lost (played by the topology file)"


class Change(Struct, frozen=True, kw_only=True):
    """What becomes of one GPU, or of the node, at a moment; None: nothing.

    at_s: seconds after whoever reads the file began to. gpu: index; None for the node. present: whether it is in the
    machine. lost: NVML says so, as of a GPU that fell off the bus; false: no longer. unavailable: empty where the GPU
    is well again. signs: all that a look shows from now on. fault: the sentence that asking the driver gives from now
    on; empty where it answers again.
    """

    at_s: float
    gpu: int | None = None
    present: bool | None = None
    lost: bool | None = None
    unavailable: str | None = None
    signs: tuple[Sign, ...] | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigDevice, ...] | None = None
    driver: str | None = None
    cuda: str | None = None
    majors: Majors | None = None
    fault: str | None = None

    @property
    def says(self) -> tuple[str, ...]:
        """What it changes, in the file's words."""
        named = ("present", "lost", "unavailable", "signs", "mig", "driver", "cuda", "majors", "fault")
        return tuple(name for name in named if getattr(self, name) is not None)


class Scene(Struct, frozen=True):
    """A node at its beginning, and its changes in the order of their times."""

    inventory: Inventory
    changes: tuple[Change, ...] = ()

    def after(self, elapsed_s: float) -> Inventory:
        """The node after so many seconds. Raises: InventoryError: by then nobody can ask the driver."""
        due = [change for change in self.changes if change.at_s <= elapsed_s]
        if fault := _last(change.fault for change in due):
            raise InventoryError(fault)
        inventory = self.inventory
        for change in due:
            inventory = _changed(inventory, change)
        return _without(inventory, {change.gpu: change.present for change in due if change.present is not None})


def _last(said: Iterable[str | None]) -> str:
    return next((each for each in reversed(list(said)) if each is not None), "")


def _without(inventory: Inventory, present: dict[int | None, bool]) -> Inventory:
    """Without the GPUs that are not there, and their links; what is left keeps its index."""
    gone = {index for index, there in present.items() if not there}
    if not gone:
        return inventory
    gpus = tuple(gpu for gpu in inventory.gpus if gpu.index not in gone)
    links = tuple(link for link in inventory.links if not gone & {link.a, link.b})
    return replace(inventory, gpus=gpus, links=links)


def _changed(inventory: Inventory, change: Change) -> Inventory:
    if change.gpu is not None:
        gpus = (_gpu(gpu, change) if gpu.index == change.gpu else gpu for gpu in inventory.gpus)
        return replace(inventory, gpus=tuple(gpus))
    return replace(
        inventory,
        driver_version=inventory.driver_version if change.driver is None else change.driver,
        cuda_version=inventory.cuda_version if change.cuda is None else change.cuda,
        majors=inventory.majors if change.majors is None else change.majors,
    )


def _gpu(gpu: Gpu, change: Change) -> Gpu:
    unavailable = gpu.unavailable if change.unavailable is None else change.unavailable
    signs = gpu.signs if change.signs is None else change.signs
    if change.lost is not None:
        unavailable = LOST if change.lost else ""
        signs = tuple(sign for sign in signs if sign is not Sign.LOST)
        signs = (Sign.LOST, *signs) if change.lost else signs
    return replace(
        gpu,
        unavailable=unavailable,
        signs=signs,
        mig_enabled=gpu.mig_enabled if change.mig_enabled is None else change.mig_enabled,
        mig=gpu.mig if change.mig is None else change.mig,
    )
