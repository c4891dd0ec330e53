"""The current state of the daemon, node, policy and ledger, and the followers called when one of them changes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from msgspec.structs import replace

from nri_gpu.domain.cordons import NO_CORDONS, Cordons, marked
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
    """The newest node, policy and ledger, swapped in whole. Each change of a part of the node gives it a new number."""

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
        """Begin with node 1. fallback: what holds while the policy is broken; by default the built-in settings.

        hwcaps: as in `Node`. later: run something once the reply is on its way.
        """
        self.node = Node(number=1, inventory=inventory, driver_fault=driver_fault, hwcaps=hwcaps)  # newest snapshot
        self._fallback = fallback or Policy.default()
        self._put_policy(policy or Policy.default())
        self.ledger = Ledger()  # who holds what
        self.synchronized = False  # the ledger is built from the runtime's list, not from an earlier daemon's file
        self._cordons = NO_CORDONS
        self._later = later
        self._first: list[Follower] = []
        self._then: list[Follower] = []
        self._untold: frozenset[Changed] = frozenset()  # of these changes the followers were not told yet

    @property
    def synchronized_ledger(self) -> Ledger | None:
        """Return the ledger, or None before the runtime has listed its containers."""
        return self.ledger if self.synchronized else None

    def first(self, follower: Callable[[], None], *changes: Changed) -> None:
        """Call `follower` within each of these changes, if the next decision or the order of a record depends on it."""
        self._first.append((follower, frozenset(changes)))

    def then(self, follower: Callable[[], None], *changes: Changed) -> None:
        """Call `follower` once the reply is on its way, once for all of these changes until then.

        Followers are called in the order in which they were added. An exception of a follower ends nothing: see `tell`.
        """
        self._then.append((follower, frozenset(changes)))

    def use(self, policy: Policy) -> None:
        """Decide by this policy from now on."""
        self._put_policy(policy)
        self._tell(Changed.POLICY)

    def commit(self, ledger: Ledger) -> None:
        """Put a ledger in place; followers are called only if it differs from the current object."""
        if ledger is not self.ledger:
            self.ledger = ledger
            self._tell(Changed.LEDGER)

    def put_inventory(self, inventory: Inventory) -> None:
        """Put an inventory in place, with the GPUs out of use that root took out of use."""
        self._publish(replace(self.node, inventory=marked(inventory, self._cordons)))

    def put_cordons(self, cordons: Cordons) -> None:
        """Take these GPUs out of use from now on, and no others."""
        if cordons != self._cordons:
            self._cordons = cordons
            self.put_inventory(self.node.inventory)

    def put_module(self, version: str) -> None:
        """Put in place the version of the loaded kernel module, or empty if none is loaded."""
        self._publish(replace(self.node, module_version=version))

    def put_driver(self, driver: DriverFiles | None, fault: str = "") -> None:
        """Put in place the driver's files. fault: why there are none."""
        self._publish(replace(self.node, driver=driver, driver_fault=fault))

    def put_compat(self, packages: tuple[CompatPackage, ...]) -> None:
        self._publish(replace(self.node, compat=packages))

    def put_mps(self, folders: MpsFolders) -> None:
        """Put in place the folders of each GPU's next MPS daemon; a GPU may have none."""
        self._publish(replace(self.node, mps=folders))

    def _put_policy(self, policy: Policy) -> None:
        self.policy: Policy = policy  # the one in force
        self.settings: Policy = self._fallback if policy.fault else policy  # those that hold, also while it is broken

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


def _concerned(followers: list[Follower], changes: frozenset[Changed]) -> list[Callable[[], None]]:
    return [follower for follower, of in followers if of & changes]
