"""What a client of the runtime reads when it is refused."""

from typing import Any

import pytest

from tests.support.containerd import Containerd
from tests.support.daemon import NriGpu

pytestmark = pytest.mark.containerd

PREFIX = "failed to get NRI adjustment for container: rpc error: code = {} desc = nri-gpu "
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
        pytest.param("1; extras=gds", {}, "[not-allowed]: ", id="what policy denies"),
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
    denied = sentence.startswith("[not-allowed]")
    assert refused.code == ("PERMISSION_DENIED" if denied else "FAILED_PRECONDITION")
    assert PREFIX.format("PermissionDenied" if denied else "FailedPrecondition") + sentence in refused.details
    shared_daemon.wait_held({})
    assert node.cri.containers() == []
