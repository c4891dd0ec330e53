"""The life of a simulated node over time: the changes and events that its topology file plays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, MigDevice
from nri_gpu.domain.health import RESETS, RecoveryAction, Sign
from nri_gpu.domain.node import Inventory, Majors

LOST: Final = "GPU is lost (simulated by the topology file)"


class ScenarioChange(Struct, frozen=True, kw_only=True):
    """A change of one GPU, or of the node; None leaves a field as it is."""

    at_s: float  # after the file was first read, in seconds
    gpu: int | None = None  # index, or None for the node
    present: bool | None = None  # in the machine
    lost: bool | None = None  # reported as lost by NVML
    unavailable: str | None = None  # why the GPU is unavailable; empty makes it available again
    signs: tuple[Sign, ...] | None = None  # all that the GPU shows from now on
    recovery_action: RecoveryAction | None = None  # what the driver wants done
    mig_enabled: bool | None = None
    mig: tuple[MigDevice, ...] | None = None
    driver: str | None = None
    cuda: str | None = None
    majors: Majors | None = None
    fault: str | None = None  # why the driver does not answer from now on; empty when it answers again


class Scenario(Struct, frozen=True):
    """A node at the beginning, and its changes in the order of their times."""

    inventory: Inventory
    changes: tuple[ScenarioChange, ...] = ()

    def after(self, elapsed_s: float) -> Inventory:
        """Return the node after so many seconds. Raises: InventoryError, if the driver does not answer by then."""
        due = [change for change in self.changes if change.at_s <= elapsed_s]
        if fault := _last(change.fault for change in due):
            raise InventoryError(fault)
        inventory = self.inventory
        for change in due:
            inventory = _changed(inventory, change)
        return _without_absent(inventory, {change.gpu: change.present for change in due if change.present is not None})


def _last(faults: Iterable[str | None]) -> str:
    return next((fault for fault in reversed(list(faults)) if fault is not None), "")


def _without_absent(inventory: Inventory, present: Mapping[int | None, bool]) -> Inventory:
    """Remove the absent GPUs and their links; the other GPUs keep their index."""
    absent = {index for index, there in present.items() if not there}
    if not absent:
        return inventory
    gpus = tuple(gpu for gpu in inventory.gpus if gpu.index not in absent)
    links = tuple(link for link in inventory.links if not absent & {link.a, link.b})
    return replace(inventory, gpus=gpus, links=links)


def _changed(inventory: Inventory, change: ScenarioChange) -> Inventory:
    if change.gpu is not None:
        gpus = (_changed_gpu(gpu, change) if gpu.index == change.gpu else gpu for gpu in inventory.gpus)
        return replace(inventory, gpus=tuple(gpus))
    return replace(inventory, **_set(driver_version=change.driver, cuda_version=change.cuda, majors=change.majors))


def _set(**values: object) -> dict[str, object]:
    """Return the values that a change sets."""
    return {name: value for name, value in values.items() if value is not None}


def with_recovery(signs: tuple[Sign, ...], action: RecoveryAction | None) -> tuple[Sign, ...]:
    """Return the signs of a GPU with that recovery action, as NVML shows them."""
    if action is None or (action in RESETS) == (Sign.RESET_REQUIRED in signs):
        return signs
    others = tuple(sign for sign in signs if sign is not Sign.RESET_REQUIRED)
    return (*others, Sign.RESET_REQUIRED) if action in RESETS else others


def _changed_gpu(gpu: Gpu, change: ScenarioChange) -> Gpu:
    unavailable, signs = change.unavailable, change.signs
    remap_pending = (
        None
        if signs is None or {*signs, *gpu.signs}.isdisjoint({Sign.REMAP_PENDING})
        else (Sign.REMAP_PENDING in signs)
    )
    if change.recovery_action is not None:
        signs = with_recovery(gpu.signs if signs is None else signs, change.recovery_action)
    if change.lost is not None:
        unavailable = LOST if change.lost else ""
        others = (sign for sign in (gpu.signs if signs is None else signs) if sign is not Sign.LOST)
        signs = (Sign.LOST, *others) if change.lost else tuple(others)
    values = _set(
        unavailable=unavailable,
        signs=signs,
        remap_pending=remap_pending,
        recovery_action=change.recovery_action,
        mig_enabled=change.mig_enabled,
        mig=change.mig,
    )
    return replace(gpu, **values)
