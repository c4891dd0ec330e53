"""A node whose daemon prepares ResourceClaims, in this process: as a driver process and a kubelet ask it."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from nri_gpu.decision.claim_devices import NotPrepared, prepared
from nri_gpu.domain.allocation import ClaimUid, ContainerDevices, PodDevices
from nri_gpu.domain.container import Container, Pod, PodUid
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, PreparedClaim
from nri_gpu.dra.markers import markers_of
from nri_gpu.kubelet.allocations import KubeletPods
from nri_gpu.ledger.claims import joined
from nri_gpu.ledger.events import ClaimPrepared, ClaimReleased, ClaimsJoined
from nri_gpu.ledger.ledger import Ledger
from tests.support.kubelet_nodes import PluginNode
from tests.support.plugin import KEY


def allocated(
    *indices: int,
    name: str = "shared",
    pods: Iterable[str] = ("train",),
    namespace: str = "ml",
    text: str = "",
    owned: bool = False,
    admin: bool = False,
    groups: Iterable[str] = (),
) -> AllocatedClaim:
    """A claim to which the scheduler allocated these GPUs; its UID is made of its name."""
    results = (
        AllocatedResult(request=f"gpu-{index}", pool="node", device=f"gpu-{7 - index}", text=text, admin=admin)
        for index in indices
    )
    pods_by_uid = {PodUid(f"uid-{each}"): each for each in pods}
    uid = ClaimUid(f"claim-{name}")
    return AllocatedClaim(
        uid=uid,
        namespace=namespace,
        name=name,
        pods=pods_by_uid,
        results=tuple(results),
        owned=owned,
        groups={f"uid-{each}": each for each in groups},
    )


def with_claims(of: Container, *claims: PreparedClaim) -> Container:
    """A container that names all devices of these claims, as the edits of their CDI devices leave it."""
    from_edits = {name: value for claim in claims for name, value in markers_of(claim, KEY)}
    return replace(of, markers={**of.markers, **from_edits})


class ClaimNode(PluginNode):
    """Prepared claims outlive the daemon, as `claims.json` does."""

    def start_daemon(self, *, connected: bool) -> None:
        claims = self.node_state.ledger.claims
        super().start_daemon(connected=connected)
        self.node_state.ledger = Ledger(claims=claims)
        self.pods = self.plugin.claims.pods = KubeletPods(told=self._told)

    def _told(self, pod: Pod, listed: PodDevices) -> None:
        self.plugin.apply(ClaimsJoined(0.0, joined(self.plugin.ledger, pod, listed, self.pods.uids)))

    def kubelet_lists(self, pod: Pod, **claims: Iterable[PreparedClaim]) -> None:
        """Its answer about a pod, if it was asked. claims: of each container that it lists."""
        named = {name: frozenset(each.uid for each in those) for name, those in claims.items()}
        listed = PodDevices(
            pod.namespace, pod.name, tuple(ContainerDevices(name, (), of) for name, of in named.items())
        )
        for asked in [each for each in self.pods.questions if each.uid == pod.uid]:
            self.pods.answered((asked,))
            self.pods.put(asked, listed)

    def prepare(self, claim: AllocatedClaim) -> PreparedClaim | NotPrepared:
        self.plugin.lapse()
        ledger = self.plugin.ledger
        found = prepared(claim, self.plugin.aged(self.node), ledger, self.node_state.policy)
        if isinstance(found, PreparedClaim):
            self.plugin.apply(ClaimPrepared(0.0, found))
        return found

    def unprepare(self, uid: ClaimUid) -> None:
        self.plugin.apply(ClaimReleased(0.0, uid))

    def prepared(self, claim: AllocatedClaim) -> PreparedClaim:
        """The same, which must succeed."""
        found = self.prepare(claim)
        assert isinstance(found, PreparedClaim), found
        return found

    def not_prepared(self, claim: AllocatedClaim) -> NotPrepared:
        """Why it is not."""
        found = self.prepare(claim)
        assert isinstance(found, NotPrepared), found
        return found

    def refused(self, of: Container) -> str:
        """The sentence with which a container is refused."""
        found = self.create(of)
        assert isinstance(found, str), found
        return found
