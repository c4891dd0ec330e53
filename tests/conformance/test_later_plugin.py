"""A plugin of others' that is asked after us removes what we granted: a real one, on real containerds.

A runtime that validates adjustments (NRI 0.10, containerd 2.2) refuses the container at its creation, an older one at
its start.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.conformance.conftest import injected
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import Launch, NriGpu, staged
from tests.support.guard import NriGuard
from tests.support.pods import PodSpec

pytestmark = [pytest.mark.containerd, pytest.mark.usefixtures("later_injector")]

REFUSED: Final = r"nri-gpu \[incomplete-grant\]: this container lacks nodes of its GPUs"
SEEN: Final = r".*: NRI plugin 95-injector removed "


def created(node: Containerd, claim: str, *nodes: str, mounts: tuple[str, ...] = ()) -> ContainerId:
    """A container of which the plugin removes these."""
    adjustment = {
        "linux": {"devices": [{"path": f"-{path}"} for path in nodes]},
        "mounts": [{"destination": f"-{place}"} for place in mounts],
    }
    annotations = injected(adjustment) | {"gpu.nri.io": claim}
    return node.cri.create(node.cri.run_pod(PodSpec("robbed", annotations=annotations)))


@pytest.mark.short
def test_a_container_without_its_node_does_not_run(node: Containerd, daemon: NriGpu) -> None:
    with pytest.raises(CriError, match=REFUSED + (SEEN if node.runtime.validates else "")):
        node.cri.start(created(node, "2", "/dev/nvidia1"))
    daemon.wait_logged("container rejected" if node.runtime.validates else "start refused")
    daemon.wait_held({})
    for nodes in ((), ("/dev/nvidia-uvm", "/dev/fuse")):  # the driver's shared nodes are not measured
        node.cri.start(created(node, "2; mode=shared", *nodes))


@pytest.mark.short
def test_while_the_daemon_is_away_the_guard_refuses_its_start(node: Containerd, launch: Launch) -> None:
    with staged(launch) as daemon, NriGuard(launch) as guard:
        guard.wait_logged("registered")
        if node.runtime.validates:
            with pytest.raises(CriError, match=REFUSED + SEEN):
                created(node, "device=0", "/dev/nvidia0")
            return
        robbed, whole = created(node, "device=0", "/dev/nvidia0"), created(node, "device=1")
        daemon.terminate()
        with pytest.raises(CriError, match=REFUSED):
            node.cri.start(robbed)
        node.cri.start(whole)
        guard.wait_logged("start refused")
