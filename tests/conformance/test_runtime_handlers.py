"""A handler of a real containerd that is called as Kata's are: it starts runc, and no GPU is given in its pods."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conformance.conftest import launch_on
from tests.support import packages
from tests.support.config import CRI_RUNTIME_V3, CRI_V2
from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.daemon import NriGpu, staged
from tests.support.guard import NriGuard
from tests.support.pods import PodSpec

pytestmark = pytest.mark.containerd

KATA: Final = "kata-test"
HANDLER: Final = """
  [plugins."{cri}".containerd.runtimes.{name}]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{cri}".containerd.runtimes.{name}.options]
      BinaryName = "{program}"
"""
REFUSED: Final = rf'nri-gpu \[bad-runtime\]: its pod\'s runtime handler "{KATA}" starts a virtual machine, in which a '


@pytest.fixture(scope="module")
def two_handlers(runtime: packages.Runtime) -> Iterator[Containerd]:
    node = Containerd(runtime)
    with node.layout.config.open("a") as file:
        cri = CRI_RUNTIME_V3 if runtime.number >= (2, 0) else CRI_V2
        file.write(HANDLER.format(cri=cri, name=KATA, program=packages.runc()))
    with node:
        yield node


@pytest.fixture
def daemon(two_handlers: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    with staged(launch_on(two_handlers, tmp_path).with_policy("")) as running:
        yield running
    two_handlers.cri.remove_all()


def started(node: Containerd, name: str, claim: str = "", handler: str = KATA) -> str:
    """The GPU nodes of a new container, or why it does not run."""
    pod = node.cri.run_pod(PodSpec(name, annotations={"gpu.nri.io": claim} if claim else {}, runtime_handler=handler))
    try:
        container = node.cri.run(pod)
    except CriError as error:
        return error.details
    return " ".join(path for path in node.cri.status(container).device_paths if path[11:].isdigit())


def test_what_would_be_given_a_gpu_is_refused_there_and_nothing_else(two_handlers: Containerd, daemon: NriGpu) -> None:
    assert re.search(REFUSED, started(two_handlers, "vm", "1"))
    daemon.wait_held({})
    assert started(two_handlers, "quiet") == started(two_handlers, "none", "none") == ""
    assert started(two_handlers, "container", "device=1", handler="runc") == "/dev/nvidia1"
    assert started(two_handlers, "of-the-default", "device=2", handler="") == "/dev/nvidia2"
    assert daemon.launch.policy
    daemon.launch.policy.write_text("[runtimes]\nrefuse = []\n")
    daemon.reload()
    assert started(two_handlers, "no-vm", "device=3") == "/dev/nvidia3"


def test_the_guard_says_the_same_while_the_daemon_is_away(two_handlers: Containerd, daemon: NriGpu) -> None:
    with NriGuard(daemon.launch) as guard:
        guard.wait_ready()
        daemon.kill()
        assert re.search(REFUSED, started(two_handlers, "vm", "1"))
        assert "[not-granted]" in started(two_handlers, "container", "1", handler="runc")
        assert started(two_handlers, "quiet") == ""
        assert "code=bad-runtime" in guard.log()
