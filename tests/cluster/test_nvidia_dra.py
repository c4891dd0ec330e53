"""NVIDIA's DRA driver and ours on one node of a real Kubernetes: no GPU is prepared by both."""

import json
from collections.abc import Iterator

import pytest

from tests.support.cluster import DAEMON, Cluster, Object
from tests.support.cluster_claims import DraCluster, claiming, devices, template
from tests.support.daemon import FOUR_GPUS
from tests.support.nvidia_dra import DRIVER, SET, NvidiaDra, asked

pytestmark = [pytest.mark.cluster, pytest.mark.ground(SET)]

HELD = {"gpu.nri.io/held": "NoSchedule"}
WAITS = "cannot allocate all claims"


@pytest.fixture
def nvidia(cluster: Cluster, dra: DraCluster) -> Iterator[NvidiaDra]:
    """That driver beside ours, each of which offers the four GPUs."""
    made = NvidiaDra(cluster, FOUR_GPUS)
    dra.run(FOUR_GPUS)
    made.run()
    yield made
    dra.end()  # what prepared its claims must run until they are gone
    made.stop()


def gated(cluster: Cluster, name: str, wish: Object) -> list[Object]:
    """A pod on a claim whose containers come once a file is there: its claim is prepared long before."""
    gate = cluster.folder / "gate"
    gate.mkdir(exist_ok=True)
    of_claim, made = claiming(name, wish)
    spec = made["spec"]
    spec["volumes"] = [{"name": "gate", "hostPath": {"path": str(gate)}}]
    waits = {"name": "waits", "command": ["sh", "-c", "until [ -e /gate/open ]; do sleep 0.1; done"]}
    mounts = [{"name": "gate", "mountPath": "/gate"}]
    spec["initContainers"] = [{**waits, "image": spec["containers"][0]["image"], "volumeMounts": mounts}]
    return [of_claim, made]


@pytest.mark.short
def test_a_gpu_that_nvidias_driver_prepared_is_nobodys_here(
    cluster: Cluster, dra: DraCluster, nvidia: NvidiaDra
) -> None:
    assert nvidia.offered() == {f"gpu-{minor}" for minor in range(4)}
    cluster.apply(*gated(cluster, "theirs", asked()))
    cluster.wait_said("theirs", "Container started")  # the one that waits, which has no claim

    (claimed,) = cluster.get("resourceclaims")
    (result,) = claimed["status"]["allocation"]["devices"]["results"]
    assert (result["driver"], result["pool"]) == (DRIVER, "node1")
    device = result["device"]
    minor = int(device.removeprefix("gpu-"))
    dra.wait_devices("tainted", lambda _: dra.taints(device) == HELD)
    status = json.loads(cluster.nri_gpu("status", "-o", "json").stdout)
    held = [(each["pod"], each["container"], each["prepared"]) for each in status["external"]]
    assert held == [("default/theirs", "main", device)]

    cluster.apply(*claiming("rest", devices(count=3)))
    cluster.wait_phase("rest")
    assert cluster.minors("rest") == frozenset(range(4)) - {minor}
    cluster.apply(*claiming("none"))
    cluster.wait_said("none", WAITS)

    (cluster.folder / "gate" / "open").touch()
    cluster.wait_phase("theirs")
    assert cluster.minors("theirs") == {minor}
    assert dra.taints(device) == HELD

    dra.delete("pod", "theirs")
    cluster.wait_phase("none")
    assert cluster.minors("none") == {minor}
    assert "of gpu.nvidia.com that this node does not have" not in cluster.log(DAEMON)


def test_a_container_with_a_claim_of_each_driver_never_starts(
    cluster: Cluster, dra: DraCluster, nvidia: NvidiaDra
) -> None:
    """Two components may not give one container its GPUs."""
    theirs, both = claiming("both", asked())
    spec = both["spec"]
    spec["resourceClaims"].append({"name": "ours", "resourceClaimTemplateName": "ours"})
    (main,) = spec["containers"]
    main["resources"] = {"claims": [{"name": "gpus"}, {"name": "ours"}]}
    cluster.apply(theirs, template("ours", devices()), both)
    cluster.wait_said("both", "nri-gpu [held-by-others]")
    (status,) = cluster.get("pod", "both")["status"]["containerStatuses"]
    assert not status["started"], status
