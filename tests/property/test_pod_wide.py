"""Law: in a pod that neither kubelet nor claim gave anything no container that asks runs without GPUs.

And in a pod that they gave some, a pod-wide annotation gives the containers without none, whatever PodResources knows.
"""

from __future__ import annotations

from typing import Final

from hypothesis import event, given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.allocation import AllocatedDevice, ClaimUid, ContainerDevices, PodDevices
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.kubelet.allocations import KubeletPods
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.policy.model import Policy
from tests.support.builders import container, pod, uuid
from tests.support.claim_nodes import ClaimNode, allocated, with_claims
from tests.support.kubelet_nodes import GPU, from_kubelet, token

ASKS: Final = ("all", "1", "1;mode=shared", "capabilities=utility", "memory>=1Gi", "device=3", "mig=1g.5gb", "0,1")
KEYS: Final = ("gpu.nri.io", "gpu.nri.io/pod", "gpu.nri.io/container.proxy")
CGROUPS: Final = ("", "/kubepods/burstable/poduid-train")


class Scene(Struct, frozen=True):
    """A pod `train` as kubelet and API server know it. told: what of that the daemon knows; None: it asks nobody."""

    has_devices: bool
    has_claim: bool
    told: str | None


SCENES: Final = st.builds(
    Scene, st.booleans(), st.booleans(), st.sampled_from([None, "nothing", "no such pod", "the pod", "another pod"])
)


def node_of(scene: Scene, of: Container) -> ClaimNode:
    node = ClaimNode(replace(Policy.default(), kubelet=KubeletSettings(enabled=True)))
    if scene.has_claim:
        node.prepared(allocated(0, pods=("train",)))
    node.prepared(allocated(1, name="others", pods=("another",)))
    if scene.told is None:
        return node
    pods = node.plugin.external.pods = KubeletPods()
    node.sandbox_created(of)
    devices = (AllocatedDevice(GPU, uuid(2)),) if scene.has_devices else ()
    listed = PodDevices("ml", "train", (ContainerDevices("main", devices), ContainerDevices("proxy")))
    if scene.told == "the pod":
        pods.put(of.pod, listed)
    elif scene.told == "no such pod":
        pods.put(of.pod, PodDevices("ml", "train"))
    elif scene.told == "another pod":  # of that name
        before = pod("train", id="sandbox-before", uid="uid-before")
        pods.put(before, PodDevices("ml", "train", (ContainerDevices("main", (AllocatedDevice(GPU, uuid(2)),)),)))
    return node


@given(SCENES, st.sampled_from(KEYS), st.sampled_from(ASKS), st.sampled_from(CGROUPS))
def test_whoever_asks_has_gpus_or_does_not_run_unless_its_pod_was_given_some(
    scene: Scene, key: str, asks: str, cgroup: str
) -> None:
    of = container(of=pod("train", annotations={key: asks}, cgroup_parent=cgroup), name="proxy")
    node = node_of(scene, of)
    got = node.create(of)
    event("refused" if isinstance(got, str) else f"{len(got)} GPUs")
    knows = scene.has_claim or (scene.has_devices and scene.told == "the pod")
    if got == ():
        assert knows
        assert "container." not in key
    elif knows and "container." not in key:
        assert isinstance(got, str)
        assert "[bad-request]" in got  # it cannot be read
    elif scene.told in ("nothing", "another pod") and "container." not in key:
        assert isinstance(got, str) or asks == "device=3"  # for now


@given(SCENES, st.sampled_from(KEYS[:2]), st.sampled_from(ASKS[:2]))
def test_whoever_was_given_gpus_has_them(scene: Scene, key: str, asks: str) -> None:
    of = container(of=pod("train", annotations={key: asks}))
    node = node_of(scene, of)
    got = node.create(from_kubelet(token(2), claim=asks))
    contradicted = scene.told == "the pod" and not scene.has_devices
    assert isinstance(got, str) if contradicted else got == (uuid(2),)
    if scene.has_claim:
        second = replace(of, id=ContainerId("train.second"), name="second")
        assert node.create(with_claims(second, node.plugin.ledger.claims[ClaimUid("claim-shared")])) == (uuid(0),)
