"""A container whose GPU went to another while it was only created, and which was started while nobody was there.

It runs beside the new holder. Whoever comes back, daemon or guard, ends it, unless it is in nobody's way.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from msgspec import Struct

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, Pod
from tests.support.daemon import UUIDS, Launch, NriGpu
from tests.support.guard import NriGuard
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

BESIDE: Final = "container runs on GPUs that another pod holds"
ENDED_S: Final = 10.0
LATER_S: Final = 1.0  # in which what may happen at once would have happened
IGNORES_TERM: Final = ("/bin/sh", "-c", "trap '' TERM; while :; do sleep 1; done")
SLEEPS: Final = ContainerSpec(command=("/bin/sleep", "3600"))
EXCLUSIVE, SHARED = "device=0", "device=0; mode=shared"


class Early(Struct, frozen=True):
    """A container that asked for GPU 0 and was not started in time, and the next holder."""

    node: Containerd
    pod: Pod
    container: ContainerId
    next: ContainerId

    def start_unserved(self, *served: NriGpu) -> None:
        for each in served:
            each.kill()
        self.node.cri.start(self.container)

    def states(self) -> tuple[str, str]:
        return self.node.cri.status(self.container).state, self.node.cri.status(self.next).state


def run_when_free(node: Containerd, claim: str, name: str) -> ContainerId:
    return node.cri.run_persistently(node.cri.asking(claim, name), SLEEPS, "gpu-busy")


def early(node: Containerd, claim: str) -> Early:
    pod = node.cri.asking(claim, "early")
    container = node.cri.create(pod, ContainerSpec(command=IGNORES_TERM))
    return Early(node, pod, container, run_when_free(node, EXCLUSIVE, "next"))


@pytest.fixture
def both(node: Containerd, launch: Launch) -> Iterator[tuple[NriGpu, NriGuard]]:
    policy = (
        f'schema = 1\n[ledger]\ncreated_grace_s = 5\n[guard]\nstop_grace_s = 300\ncri_socket = "{node.cri_socket}"\n'
    )
    short = launch.with_policy(policy)
    with NriGpu(short) as daemon, NriGuard(short, short.policy) as guard:
        daemon.wait_staged()
        guard.wait_ready()
        yield daemon, guard


@pytest.mark.parametrize("returning", [0, 1], ids=["daemon", "guard"])
def test_beside_its_gpus_holder_it_is_ended_at_once(
    node: Containerd, both: tuple[NriGpu, NriGuard], returning: int
) -> None:
    """Without its grace, and by default: `guard.stop_ungranted` is about others."""
    lapsed, process = early(node, EXCLUSIVE), both[returning]
    lapsed.start_unserved(*both)
    assert lapsed.states() == ("RUNNING", "RUNNING")
    process.start()
    said = process.wait_logged(BESIDE)
    assert "ERROR" in said
    assert lapsed.container in said
    assert "default/next" in said
    assert lapsed.container in process.wait_logged("container stopped", ENDED_S)
    assert lapsed.states() == ("EXITED", "RUNNING")


def nobody(lapsed: Early) -> None:
    """Nobody holds its GPU any more."""


def one_that_shares(lapsed: Early) -> None:
    run_when_free(lapsed.node, SHARED, "sharing")


def one_of_its_pod(lapsed: Early) -> None:
    lapsed.node.cri.run(lapsed.pod, ContainerSpec(name="second", command=SLEEPS.command))


@on_newest
@pytest.mark.parametrize(
    ("hold", "claim"),
    [(nobody, EXCLUSIVE), (one_that_shares, SHARED), (one_of_its_pod, EXCLUSIVE)],
    ids=["nobody", "sharing", "one pod"],
)
def test_in_nobodys_way_it_goes_on_and_holds_its_gpu(
    node: Containerd, both: tuple[NriGpu, NriGuard], hold: Callable[[Early], None], claim: str
) -> None:
    lapsed = early(node, claim)
    node.cri.remove_pod_named("next")
    hold(lapsed)
    lapsed.start_unserved(*both)
    for process in both:
        process.start()
        process.wait_ready()
    wait_for("its hold", lambda: both[0].held().get("early/main") == [UUIDS[0]], 20, lambda: str(both[0].held()))
    time.sleep(LATER_S)
    assert node.cri.status(lapsed.container).state == "RUNNING"
    assert not any(BESIDE in process.log() for process in both)
