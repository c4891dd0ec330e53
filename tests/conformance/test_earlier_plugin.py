"""A plugin of others' that is asked before us sets variables that we set, too: a real one, on real containerds."""

from typing import Final

import pytest

from tests.conformance.conftest import injected
from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = pytest.mark.containerd

PATH, VISIBLE = "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES"
THEIRS: Final = {PATH: "/opt/theirs/lib", VISIBLE: "all", "OTHER": "stays"}


def created(node: Containerd, *, claim: str = "", image: str = "") -> dict[str, str]:
    """A container for which it sets these variables: its environment. image: the image's own NVIDIA_VISIBLE_DEVICES."""
    adjustment = {"env": [{"key": key, "value": value} for key, value in THEIRS.items()]}
    annotations = injected(adjustment) | ({"gpu.nri.io": claim} if claim else {})
    pod = node.cri.run_pod(PodSpec("both", annotations=annotations))
    return node.cri.status(node.cri.run(pod, ContainerSpec(env={VISIBLE: image} if image else {}))).env


@pytest.mark.short
@pytest.mark.usefixtures("injector")
def test_what_it_set_is_taken_over(node: Containerd, daemon: NriGpu) -> None:
    env = created(node, claim="device=0")
    ours, _, theirs = env[PATH].rpartition(":")
    assert (theirs, bool(ours)) == (THEIRS[PATH], True)
    assert env[VISIBLE] == UUIDS[0]
    assert env["OTHER"] == "stays"
    daemon.wait_logged(f"replaced={PATH},{VISIBLE}")


@pytest.mark.short
@pytest.mark.usefixtures("injector")
@pytest.mark.parametrize(
    ("settings", "claim", "image"),
    [
        ('disarm = "all"', "", ""),
        ('disarm = "all"', "", "all"),
        ('disarm = "all"', "none", "all"),
        ('visible_devices = "void"', "device=1", "all"),
    ],
)
def test_what_it_armed_is_disarmed(node: Containerd, launch: Launch, settings: str, claim: str, image: str) -> None:
    with staged(launch.with_policy(f"[environment]\n{settings}\n")):
        env = created(node, claim=claim, image=image)
    assert (env[VISIBLE], env["OTHER"]) == ("void", "stays")
