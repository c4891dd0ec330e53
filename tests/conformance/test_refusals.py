"""What a client of the runtime reads when it is refused."""

from typing import Any

import pytest

from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS, NriGpu
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec

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
def test_the_sentence_reaches_the_client(
    node: Containerd, shared_daemon: NriGpu, claim: str, fields: dict[str, Any], sentence: str
) -> None:
    refused = node.cri.refused(claim, **fields)
    assert refused.code == "FAILED_PRECONDITION"
    assert PREFIX + sentence in refused.details
    assert shared_daemon.held() == {}
    assert node.cri.containers() == []


@on_newest
def test_a_pods_own_containers_may_share_what_is_exclusive_to_it(node: Containerd, shared_daemon: NriGpu) -> None:
    pod = node.cri.asking("device=3", "p")
    node.cri.run(pod, ContainerSpec(name="one"))
    node.cri.run(pod, ContainerSpec(name="two"))
    shared_daemon.wait_held({name: [UUIDS[3]] for name in ("p/one", "p/two")})
    assert "is held exclusively by default/p" in node.cri.refused("device=3; mode=shared", "other").details
