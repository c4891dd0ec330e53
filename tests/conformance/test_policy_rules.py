"""Rules as a client of the runtime meets them, and what of a pod a real runtime shows to match on.

On one containerd: all of it is decided before the runtime's version matters.
"""

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import Cri, CriError
from tests.support.daemon import UUIDS, Launch, NriGpu
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = on_newest

ASKS = {"gpu.nri.io": "device=0"}
POLICY = """
schema = 1

[environment]
may_ask = ["legacy"]

[privileged]
action = "deny"

[[rule]]
name = "no-batch"
namespace = "batch"
labels = { "example.com/urgent" = "no" }
allow = false
reason = "batch runs elsewhere"

[[rule]]
name = "no-best-effort"
qos = "besteffort"
allow = false
"""


@pytest.fixture(scope="module")
def module_launch(module_launch: Launch) -> Launch:
    return module_launch.with_policy(POLICY)


def variable(value: str) -> ContainerSpec:
    return ContainerSpec(env={"NVIDIA_VISIBLE_DEVICES": value})


@pytest.mark.parametrize(
    ("pod", "spec", "words"),
    [
        pytest.param(
            PodSpec(namespace="batch", labels={"example.com/urgent": "no"}, annotations=ASKS),
            ContainerSpec(),
            r'rule\[0\] "no-batch" in .*\(batch runs elsewhere\)',
            id="a label",
        ),
        pytest.param(
            PodSpec(privileged=True, annotations=ASKS),
            ContainerSpec(privileged=True),
            "privileged.action in the policy denies its request",
            id="a privileged container",
        ),
        pytest.param(
            PodSpec(namespace="legacy"), variable("all"), "environment.may_ask_all", id="all, in the environment"
        ),
    ],
)
def test_refused(node: Containerd, shared_daemon: NriGpu, pod: PodSpec, spec: ContainerSpec, words: str) -> None:
    with pytest.raises(CriError, match=words) as refused:
        node.cri.run(node.cri.run_pod(pod), spec)
    assert refused.value.code == "PERMISSION_DENIED"
    assert "[not-allowed]" in refused.value.details
    shared_daemon.wait_held({})


@pytest.mark.parametrize(
    ("pod", "spec", "gpu"),
    [
        pytest.param(
            PodSpec(namespace="batch", labels={"example.com/urgent": "yes"}, annotations=ASKS),
            ContainerSpec(),
            0,
            id="another label",
        ),
        pytest.param(PodSpec(namespace="legacy"), variable("1"), 1, id="by the environment where it may ask"),
    ],
)
def test_granted(node: Containerd, shared_daemon: NriGpu, pod: PodSpec, spec: ContainerSpec, gpu: int) -> None:
    node.cri.run(node.cri.run_pod(PodSpec(name="other", namespace="modern")), variable("1"))  # which means nothing
    node.cri.run(node.cri.run_pod(pod), spec)
    shared_daemon.wait_held({"pod/main": [UUIDS[gpu]]})


@pytest.mark.parametrize(("folder", "granted"), [("besteffort/pod1", False), ("burstable/pod1", True), ("pod1", True)])
def test_the_service_class_is_read_off_what_the_runtime_shows(
    node: Containerd, shared_daemon: NriGpu, kubepods: str, folder: str, granted: bool
) -> None:
    with Cri(node.cri_socket, cgroup_parent=f"{kubepods}/{folder}") as kubelet:
        pod = kubelet.asking("device=0", "p")
        if granted:
            kubelet.run(pod)
            shared_daemon.wait_held({"p/main": [UUIDS[0]]})
        else:
            with pytest.raises(CriError, match=r'rule\[1\] "no-best-effort" in'):
                kubelet.run(pod)
