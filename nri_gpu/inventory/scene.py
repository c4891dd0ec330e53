"""A simulated node and what becomes of it: changes that a topology file plays at times of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, Inventory, MigDevice

LOST: Final = "GPU is lost (played by the topology file)"


class Change(Struct, frozen=True, kw_only=True):
    """What becomes of one GPU, or of the node, at a moment; None: nothing.

    at_s: seconds after whoever reads the file began to. gpu: index; None for the node. unavailable: empty where the
    GPU is well again. fault: the sentence that asking the driver gives from now on; empty where it answers again.
    """

    at_s: float
    gpu: int | None = None
    unavailable: str | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigDevice, ...] | None = None
    driver: str | None = None
    cuda: str | None = None
    fault: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether it changes anything at all."""
        return (self.unavailable, self.mig, self.driver, self.cuda, self.fault) != (None,) * 5


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
        return inventory


def _last(said: Iterable[str | None]) -> str:
    return next((each for each in reversed(list(said)) if each is not None), "")


def _changed(inventory: Inventory, change: Change) -> Inventory:
    if change.gpu is not None:
        gpus = (_gpu(gpu, change) if gpu.index == change.gpu else gpu for gpu in inventory.gpus)
        return replace(inventory, gpus=tuple(gpus))
    return replace(
        inventory,
        driver_version=inventory.driver_version if change.driver is None else change.driver,
        cuda_version=inventory.cuda_version if change.cuda is None else change.cuda,
    )


def _gpu(gpu: Gpu, change: Change) -> Gpu:
    return replace(
        gpu,
        unavailable=gpu.unavailable if change.unavailable is None else change.unavailable,
        mig_enabled=gpu.mig_enabled if change.mig_enabled is None else change.mig_enabled,
        mig=gpu.mig if change.mig is None else change.mig,
    )
