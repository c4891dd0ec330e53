"""What a client of the runtime reads when it is refused; and who may hold what together."""

import re
from typing import Any

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.daemon import UUIDS, NriGpu
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = pytest.mark.containerd

PREFIX = "failed to get NRI adjustment for container: rpc error: code = FailedPrecondition desc = nri-gpu "
FORGED = {"gpu.nri.io/grant": "v1;mode=shared;uuid=GPU-0;gen=x;mac=00"}
IMAGE = {"NVIDIA_REQUIRE_CUDA": "cuda>=99.1 brand=tesla,driver>=580"}


@pytest.mark.parametrize(
    ("claim", "fields", "sentence"),
    [
        pytest.param(
            "device=0,two", {}, '[bad-request]: gpu.nri.io at character 10: "two" does not name a GPU', id="syntax"
        ),
        pytest.param(
            "device=9", {}, "[no-such-gpu]: this node has no GPU '9'; it has GPUs 0, 1, 2, 3", id="unknown GPU"
        ),
        pytest.param("model=*H100*", {}, "[no-such-gpu]: no GPU of this node fits", id="no match"),
        pytest.param("none", {"annotations": FORGED}, "[bad-request]: gpu.nri.io/grant", id="a grant of its own"),
        pytest.param(
            "1",
            {"env": IMAGE},
            "[requirement-not-met]: NVIDIA_REQUIRE_CUDA needs cuda>=99.1, and its other alternative does not",
            id="what the image requires",
        ),
    ],
)
@pytest.mark.short
def test_the_sentence_reaches_the_client(
    node: Containerd, shared_daemon: NriGpu, claim: str, fields: dict[str, Any], sentence: str
) -> None:
    refused = node.cri.refused(claim, **fields)
    assert refused.code == "FAILED_PRECONDITION"
    assert PREFIX + sentence in refused.details
    shared_daemon.wait_held({})
    assert node.cri.containers() == []


@on_newest
def test_a_pods_own_containers_may_share_what_is_exclusive_to_it(node: Containerd, shared_daemon: NriGpu) -> None:
    pod = node.cri.asking("device=3", "p")
    node.cri.run(pod, ContainerSpec(name="one"))
    node.cri.run(pod, ContainerSpec(name="two"))
    shared_daemon.wait_held({name: [UUIDS[3]] for name in ("p/one", "p/two")})
    assert "is held exclusively by default/p" in node.cri.refused("device=3; mode=shared", "other").details


@on_newest
@pytest.mark.parametrize(
    ("held", "wanted", "sentence"),
    [
        ("device=1", ("device=1", "device=1; mode=shared", "all"), r"GPU 1 .* is held exclusively by default/first"),
        ("device=1; mode=shared", ("device=1",), r"GPU 1 .* in shared mode by default/first"),
        ("4", ("1",), "of the 4 that fit none can be granted now"),
    ],
    ids=["exclusive", "shared", "all of them"],
)
def test_what_one_pod_holds_another_does_not_get(
    node: Containerd, shared_daemon: NriGpu, held: str, wanted: tuple[str, ...], sentence: str
) -> None:
    node.cri.run(node.cri.asking(held, "first"))
    for claim in wanted:
        assert re.search(rf"\[gpu-busy\]: .*{sentence}", node.cri.refused(claim, "other").details)
    shared_daemon.wait_grants(1)


@on_newest
def test_a_mistyped_key_does_not_start_a_container_without_its_gpu(node: Containerd, shared_daemon: NriGpu) -> None:
    pod = node.cri.run_pod(PodSpec(annotations={"gpu.nri.io/contaner.main": "1"}))
    with pytest.raises(CriError, match="unknown annotation"):
        node.cri.create(pod, ContainerSpec())
    shared_daemon.wait_held({})
