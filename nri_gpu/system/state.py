"""The state of the daemon: node, policy and ledger now, and who is called when one of them changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto

from msgspec.structs import replace

from nri_gpu.domain.mps import MpsFolders
from nri_gpu.domain.node import CompatPackage, DriverFiles, Inventory, Node
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.system.tasks import later, tell


class Changed(Enum):
    NODE = auto()
    POLICY = auto()
    LEDGER = auto()


Follower = tuple[Callable[[], None], frozenset[Changed]]


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
        hwcaps: bool = True,
        later: Callable[[Callable[[], None]], object] = later,
    ) -> None:
        """fallback: the settings that hold while the policy is broken; by default the built-in ones.

        hwcaps: as in `Node`. later: run something once the reply is on its way.
        """
        self.node = Node(number=1, inventory=inventory, driver_fault=driver_fault, hwcaps=hwcaps)
        self.policy: Policy = policy or Policy.default()
        self.ledger = Ledger()
        self.synchronized = False
        self._fallback = fallback or Policy.default()
        self._later = later
        self._first: list[Follower] = []
        self._then: list[Follower] = []
        self._untold: frozenset[Changed] = frozenset()  # of these changes the followers were not told yet

    @property
    def settings(self) -> Policy:
        """The policy in force, or what holds while it is broken."""
        return self._fallback if self.policy.fault else self.policy

    @property
    def synchronized_ledger(self) -> Ledger | None:
        """The ledger; None before the runtime has listed its containers."""
        return self.ledger if self.synchronized else None

    def first(self, follower: Callable[[], None], *changes: Changed) -> None:
        """Call it within each change of these, for what the next decision, or the order of a record, depends on."""
        self._first.append((follower, frozenset(changes)))

    def then(self, follower: Callable[[], None], *changes: Changed) -> None:
        """Call it once the reply is on its way, once for all changes of these until then.

        Followers are called in the order in which they were added. What one raises ends nothing: see `tell`.
        """
        self._then.append((follower, frozenset(changes)))

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
        tell(_concerned(self._first, frozenset((change,))))
        if self._then:
            untold, self._untold = self._untold, self._untold | {change}
            if not untold:
                self._later(self._tell_followers)

    def _tell_followers(self) -> None:
        changes, self._untold = self._untold, frozenset()
        tell(_concerned(self._then, changes))


def _concerned(followers: list[Follower], changes: frozenset[Changed]) -> Iterator[Callable[[], None]]:
    return (follower for follower, of in followers if of & changes)
