"""The state of the daemon: node, policy and ledger now, and who is called when one of them changes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from msgspec.structs import replace

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.edits import Profiles
from nri_gpu.domain.mps import MpsFolders
from nri_gpu.domain.node import CompatPackage, DriverFiles, Inventory, Node
from nri_gpu.policy.model import Policy


class Changed(Enum):
    NODE = auto()
    POLICY = auto()
    LEDGER = auto()


class NodeState:
    """The newest of each, swapped in whole. Every change of a part of the node gives it the next number.

    node: the newest snapshot. policy: the one in force. ledger: who holds what. synchronized: whether the ledger is
    built from the runtime's own list of containers, and not from an earlier daemon's file.
    """

    def __init__(
        self,
        inventory: Inventory,
        driver_fault: str = "",
        policy: Policy | None = None,
        *,
        fallback: Policy | None = None,
    ) -> None:
        """fallback: the settings that hold while the policy is broken; by default the built-in ones."""
        self.node = Node(number=1, inventory=inventory, driver_fault=driver_fault)
        self.policy: Policy = policy or Policy.default()
        self.ledger = Ledger()
        self.synchronized = False
        self._fallback = fallback or Policy.default()
        self._followers: list[tuple[Callable[[], None], frozenset[Changed]]] = []

    @property
    def settings(self) -> Policy:
        """The policy in force, or what holds while it is broken."""
        return self._fallback if self.policy.fault else self.policy

    @property
    def synchronized_ledger(self) -> Ledger | None:
        """The ledger; None before the runtime has listed its containers."""
        return self.ledger if self.synchronized else None

    def subscribe(self, follower: Callable[[], None], *changes: Changed) -> None:
        """Call it after each change of these. Followers are called in the order in which they subscribed."""
        self._followers.append((follower, frozenset(changes)))

    def use(self, policy: Policy) -> None:
        """Decide by this policy from now on."""
        self.policy = policy
        self._tell(Changed.POLICY)

    def commit(self, ledger: Ledger) -> None:
        """Put a ledger in place; followers are called only when it is another one."""
        if ledger is not self.ledger:
            self.ledger = ledger
            self._tell(Changed.LEDGER)

    def put_inventory(self, inventory: Inventory) -> None:
        self._publish(replace(self.node, inventory=inventory))

    def put_module(self, version: str) -> None:
        """Another kernel module is loaded; empty: none is."""
        self._publish(replace(self.node, module_version=version))

    def put_profiles(self, profiles: Profiles) -> None:
        """Application profiles were written for other GPUs than before, or cannot be written."""
        self._publish(replace(self.node, profiles=profiles))

    def put_driver(self, driver: DriverFiles | None, fault: str = "") -> None:
        """The driver's files changed. fault: why there are none."""
        self._publish(replace(self.node, driver=driver, driver_fault=fault))

    def put_compat(self, packages: tuple[CompatPackage, ...]) -> None:
        self._publish(replace(self.node, compat=packages))

    def put_mps(self, folders: MpsFolders) -> None:
        """A GPU's next MPS daemon has another folder, or there can be none."""
        self._publish(replace(self.node, mps=folders))

    def _publish(self, node: Node) -> None:
        self.node = replace(node, number=self.node.number + 1)
        self._tell(Changed.NODE)

    def _tell(self, change: Changed) -> None:
        for follower, changes in self._followers:
            if change in changes:
                follower()
