"""The board: the newest snapshot of the node, put together from its parts and swapped in whole."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from nri_gpu.domain.edits import Profiles
from nri_gpu.domain.mps import MpsFolders
from nri_gpu.domain.node import CompatPackage, DriverFiles, Inventory, Node


class Board:
    """Holds one `Node`; every change of a part publishes a new one with the next number.

    changed: called after each.
    """

    def __init__(self, inventory: Inventory, driver_fault: str = "") -> None:
        self._node = Node(number=1, inventory=inventory, driver_fault=driver_fault)
        self.changed: Callable[[], None] = lambda: None

    def snapshot(self) -> Node:
        """The newest snapshot: one attribute read, which is all the hook path does."""
        return self._node

    def put_inventory(self, inventory: Inventory) -> None:
        """GPUs changed."""
        self._publish(replace(self._node, inventory=inventory))

    def put_module(self, version: str) -> None:
        """Another kernel module is loaded; empty: none any more."""
        self._publish(replace(self._node, module_version=version))

    def put_profiles(self, profiles: Profiles) -> None:
        """Application profiles lie ready for other GPUs than before, or cannot be written."""
        self._publish(replace(self._node, profiles=profiles))

    def put_driver(self, driver: DriverFiles | None, fault: str = "") -> None:
        """The driver's files changed, or cannot be had (fault: the sentence why)."""
        self._publish(replace(self._node, driver=driver, driver_fault=fault))

    def put_compat(self, packages: tuple[CompatPackage, ...]) -> None:
        """The compatibility packages of CUDA changed."""
        self._publish(replace(self._node, compat=packages))

    def put_mps(self, folders: MpsFolders) -> None:
        """A GPU's next MPS daemon has another folder, or there can be none."""
        self._publish(replace(self._node, mps=folders))

    def _publish(self, node: Node) -> None:
        self._node = replace(node, number=self._node.number + 1)
        self.changed()
