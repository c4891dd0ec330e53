"""A policy that is wrong, mended and wrong again under a running daemon; and what the rarer settings do to containers.

On one containerd: all of it is decided before the runtime's version matters.
"""

from collections.abc import Iterator

import pytest
from msgspec import Struct

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import UUIDS, Launch, NriGpu
from tests.support.image import ImageSpec
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

pytestmark = on_newest

ALL_IMAGE = ImageSpec("localhost/nri-gpu/cuda-like:1", env={"NVIDIA_VISIBLE_DEVICES": "all"})
GOOD = 'schema = 1\n[defaults]\nmode = "shared"\n'
BROKEN = 'schema = 1\n\n[defaults]\nmode = "sharde"\n'
RELOADED = "policy reloaded"
KEPT = "policy not reloaded, the old one stays"


class Bench(Struct, frozen=True):
    """A node, a daemon with a policy file of its own, and what one does with them."""

    node: Containerd
    daemon: NriGpu

    def begin(self, policy: str) -> None:
        self.daemon.launch.with_policy(policy)
        self.daemon.start()
        self.daemon.wait_staged()

    def reload(self, policy: str, said: str) -> None:
        """Change the file and hang up, until the log has said it once more."""
        before = self._logged(said)
        self.daemon.launch.with_policy(policy)
        self.daemon.hang_up()
        wait_for(f"the log to say {said!r}", lambda: self._logged(said) > before, 20, self.daemon.log)

    def create(self, name: str, value: str = "", namespace: str = "default") -> ContainerId:
        self.node.import_image(ALL_IMAGE)
        annotations = {"gpu.nri.io": value} if value else {}
        pod = self.node.cri.run_pod(PodSpec(name=name, namespace=namespace, annotations=annotations))
        return self.node.cri.run(pod, ContainerSpec(image=ALL_IMAGE.name))

    def refused(self, name: str, value: str, namespace: str = "default") -> str:
        with pytest.raises(CriError) as refusal:
            self.create(name, value, namespace)
        assert refusal.value.code in ("FAILED_PRECONDITION", "PERMISSION_DENIED")
        return refusal.value.details

    def _logged(self, text: str) -> int:
        return self.daemon.log().count(text)


@pytest.fixture
def bench(launch: Launch, node: Containerd) -> Iterator[Bench]:
    daemon = NriGpu(launch.with_policy(""))
    try:
        yield Bench(node, daemon)
    finally:
        daemon.__exit__()


def test_broken_from_the_start_then_mended_then_broken_again(bench: Bench) -> None:
    bench.begin(BROKEN)
    sentence = bench.refused("first", "1")
    assert "nri-gpu [bad-policy]: no GPU can be granted until the policy is fixed" in sentence
    assert f'{bench.daemon.launch.policy}:4: defaults.mode: cannot be "sharde"' in sentence
    bench.create("bystander")
    assert "no good policy is kept: every container that requests GPUs is refused" in bench.daemon.log()
    assert bench.daemon.held() == {}

    bench.reload(GOOD, RELOADED)
    bench.create("second", "device=0")

    assert bench.daemon.verb("status").returncode == 0
    bench.reload(BROKEN, KEPT)
    status = bench.daemon.verb("status")
    assert (status.returncode, "policy file rejected" in status.stdout) == (1, True)
    assert bench.daemon.verb("status", "--probe").returncode == 0
    bench.create("third", "device=0")  # shared, as the good one says and the built-in defaults do not
    bench.daemon.wait_held({"second/main": [UUIDS[0]], "third/main": [UUIDS[0]]})
    assert {grant["mode"] for grant in bench.daemon.ledger()["grants"]} == {"shared"}


def test_who_may_not_ask_is_refused_or_passed_over(bench: Bench) -> None:
    rules = 'schema = 1\n[namespaces]\ndeny = ["dev-*"]\n'
    bench.begin(rules)
    assert "PermissionDenied desc = nri-gpu [not-allowed]" in bench.refused("a", "1", "dev-team")

    bench.reload(f'{rules}otherwise = "ignore"\n', RELOADED)
    ignored = bench.create("b", "1", "dev-team")
    assert bench.node.cri.status(ignored).state == "RUNNING"
    assert bench.node.cri.status(ignored).device_paths == []
    granted = bench.create("c", "1", "prod")
    bench.daemon.wait_held({"c/main": [UUIDS[0]]})
    assert "/dev/nvidia0" in bench.node.cri.status(granted).device_paths


@pytest.mark.parametrize(
    ("settings", "claim", "visible", "uuids"),
    [
        pytest.param('disarm = "all"', "", "void", None, id="disarmed"),
        pytest.param('disarm = "all"', "device=2", UUIDS[2], None, id="disarmed, and granted"),
        pytest.param('visible_devices = "void"', "device=1,3", "void", f"{UUIDS[1]},{UUIDS[3]}", id="told elsewhere"),
        pytest.param('visible_devices = "void"', "", "all", None, id="told elsewhere, and not asked"),
    ],
)
def test_what_becomes_of_an_images_variable(
    bench: Bench, settings: str, claim: str, visible: str, uuids: str | None
) -> None:
    """So that other injectors stay idle."""
    bench.begin(f"schema = 1\n[environment]\n{settings}\n")
    env = bench.node.cri.status(bench.create("p", claim)).env
    assert (env["NVIDIA_VISIBLE_DEVICES"], env.get("NRI_GPU_UUIDS")) == (visible, uuids)
