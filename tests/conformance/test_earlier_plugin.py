"""A plugin of others' that is asked before us sets variables that we set, too: a real one, on real containerds."""

import json
import subprocess
from collections.abc import Iterator
from typing import Final

import pytest

from tests import ground
from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS, NriGpu
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

PATH, VISIBLE = "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES"
THEIRS: Final = {PATH: "/opt/theirs/lib", VISIBLE: "all", "OTHER": "stays"}


@pytest.fixture
def injector(node: Containerd) -> Iterator[None]:
    """It sets these for pods that have its annotation (tests/ground/nri-plugins)."""
    before = node.log_path.stat().st_size
    program = [str(ground.need("nri-plugins") / "injector"), "-socket", str(node.nri_socket), "-idx", "05"]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for("the injector", lambda: b"05-injector" in node.log_path.read_bytes()[before:], 20)
            yield
        finally:
            process.kill()


@pytest.mark.short
@pytest.mark.usefixtures("injector")
def test_what_it_set_is_taken_over(node: Containerd, daemon: NriGpu) -> None:
    adjustment = {"env": [{"key": key, "value": value} for key, value in THEIRS.items()]}
    annotations = {"gpu.nri.io": "device=0", "nri-gpu.bench/adjustment": json.dumps(adjustment)}
    container = node.cri.run(node.cri.run_pod(PodSpec("both", annotations=annotations)), ContainerSpec())
    env = node.cri.status(container).env
    ours, _, theirs = env[PATH].rpartition(":")
    assert (theirs, bool(ours)) == (THEIRS[PATH], True)
    assert env[VISIBLE] == UUIDS[0]
    assert env["OTHER"] == "stays"
    daemon.wait_logged(f"replaced={PATH},{VISIBLE}")
