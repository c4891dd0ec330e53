"""What a client of the runtime reads when it is refused; and who may hold what together."""

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import NriGpu
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = pytest.mark.containerd

PREFIX = "failed to get NRI adjustment for container: rpc error: code = FailedPrecondition desc = "


@pytest.fixture
def daemon(shared_daemon: NriGpu) -> NriGpu:
    return shared_daemon


def create(node: Containerd, value: str, *, pod: str = "p", namespace: str = "default", **spec: object) -> ContainerId:
    sandbox = node.cri.run_pod(PodSpec(name=pod, namespace=namespace, annotations={"gpu.nri.io": value}))
    return node.cri.run(sandbox, ContainerSpec(**spec))  # type: ignore[arg-type] # passed through


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("device=0,two", 'nri-gpu [bad-request]: gpu.nri.io at character 10: "two" does not name a GPU'),
        ("frob=1", "nri-gpu [bad-request]: gpu.nri.io at character 1: unknown"),
        ("device=9", "nri-gpu [no-such-gpu]: this node has no GPU '9'; it has GPUs 0, 1, 2, 3"),
        ("count=5", "nri-gpu [no-such-gpu]: asked for 5 GPUs, but this node has 4"),
        ("model=*H100*", "nri-gpu [no-such-gpu]: no GPU of this node fits"),
    ],
    ids=["syntax", "unknown key", "unknown gpu", "too many", "no match"],
)
def test_the_sentence_reaches_the_client(node: Containerd, daemon: NriGpu, value: str, sentence: str) -> None:
    with pytest.raises(CriError) as refused:
        create(node, value)
    assert refused.value.code == "FAILED_PRECONDITION"
    assert PREFIX + sentence in refused.value.details
    assert daemon.held() == {}
    assert node.cri.containers() == []


@on_newest
def test_exclusive_keeps_other_pods_away_in_any_mode(node: Containerd, daemon: NriGpu) -> None:
    create(node, "device=1", pod="owner")
    for value in ("device=1", "device=1; mode=shared", "all", "all; mode=shared"):
        with pytest.raises(CriError, match=r"\[gpu-busy\]: GPU 1 .* is held exclusively by default/owner"):
            create(node, value, pod="other")
    daemon.wait_grants(1)


@on_newest
def test_shared_keeps_exclusive_away(node: Containerd, daemon: NriGpu) -> None:
    create(node, "device=2; mode=shared", pod="first")
    create(node, "device=2; mode=shared", pod="second")
    with pytest.raises(CriError, match=r"\[gpu-busy\]: GPU 2 .* in shared mode by default/first, default/second"):
        create(node, "device=2; mode=exclusive", pod="third")
    daemon.wait_grants(2)


@on_newest
def test_a_pods_own_containers_may_share_what_is_exclusive_to_it(node: Containerd, daemon: NriGpu) -> None:
    pod = node.cri.asking("device=3", "p")
    node.cri.run(pod, ContainerSpec(name="one"))
    node.cri.run(pod, ContainerSpec(name="two"))
    daemon.wait_held({name: ["GPU-3a100004-0000-4000-8000-000000000003"] for name in ("p/one", "p/two")})


@on_newest
def test_counting_gives_each_pod_its_own(node: Containerd, daemon: NriGpu) -> None:
    for number in range(4):
        create(node, "1", pod=f"p{number}")
    daemon.wait_grants(4)
    assert sorted(uuid for uuids in daemon.held().values() for uuid in uuids) == sorted(
        gpu["uuid"] for gpu in daemon.gpus()["gpus"]
    )
    with pytest.raises(
        CriError,
        match=r"\[gpu-busy\]: asked for 1 GPU in exclusive mode, but of the 4 that fit none can be granted now; they",
    ):
        create(node, "1", pod="late")


def test_a_container_cannot_bring_its_own_grant(node: Containerd, daemon: NriGpu) -> None:
    forged = {"gpu.nri.io/grant": "v1;mode=shared;uuid=GPU-0;gen=x;mac=00"}
    with pytest.raises(CriError, match="only nri-gpu writes this annotation"):
        create(node, "none", annotations=forged)
    assert daemon.held() == {}


@on_newest
def test_a_mistyped_key_does_not_start_a_container_without_its_gpu(node: Containerd, daemon: NriGpu) -> None:
    pod = node.cri.run_pod(PodSpec(annotations={"gpu.nri.io/contaner.main": "1"}))
    with pytest.raises(CriError, match="unknown annotation"):
        node.cri.create(pod, ContainerSpec())
    assert daemon.held() == {}


@on_newest
def test_what_the_image_requires_is_refused_with_the_condition(node: Containerd, daemon: NriGpu) -> None:
    with pytest.raises(CriError) as refused:
        create(node, "1", env={"NVIDIA_REQUIRE_CUDA": "cuda>=99.1 brand=tesla,driver>=580"})
    sentence = "nri-gpu [requirement-not-met]: NVIDIA_REQUIRE_CUDA needs cuda>=99.1, and its other alternative does not"
    assert PREFIX + sentence in refused.value.details
    assert daemon.held() == {}
    create(node, "1", env={"NVIDIA_REQUIRE_CUDA": "cuda>=99.1 brand=nvidia,driver>=580", "CUDA_VERSION": "99.1.0"})
    create(node, "1", env={"CUDA_VERSION": "99.1.0", "NVIDIA_DISABLE_REQUIRE": "1"}, pod="unchecked")
    daemon.wait_grants(2)
