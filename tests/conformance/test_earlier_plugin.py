"""A plugin of others' that is asked before us sets what we set, too: a real one, on real containerds."""

from typing import Final

import pytest

from tests.conformance.conftest import injected
from tests.support.containerd import Containerd
from tests.support.cri import CriError, Status
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.guard import NriGuard
from tests.support.pods import PodSpec

pytestmark = pytest.mark.containerd

PATH, VISIBLE = "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES"
THEIRS: Final = {PATH: "/opt/theirs/lib", VISIBLE: "all", "OTHER": "stays"}


def adjusted(node: Containerd, claim: str, adjustment: dict[str, object]) -> Status:
    pod = node.cri.run_pod(PodSpec("both", annotations=injected(adjustment) | {"gpu.nri.io": claim}))
    return node.cri.status(node.cri.run(pod))


@pytest.mark.short
@pytest.mark.usefixtures("injector")
def test_what_it_set_is_taken_over(node: Containerd, daemon: NriGpu) -> None:
    variables = [{"key": key, "value": value} for key, value in THEIRS.items()]
    env = adjusted(node, "device=0", {"env": variables}).env
    ours, _, theirs = env[PATH].rpartition(":")
    assert (theirs, bool(ours)) == (THEIRS[PATH], True)
    assert env[VISIBLE] == UUIDS[0]
    assert env["OTHER"] == "stays"
    daemon.wait_logged(f"replaced={PATH},{VISIBLE}")


# Device nodes with numbers of the injector's own, which are not the driver's.
SHARED: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm")
TREES: Final = ("/usr/local/nvidia", "/opt/nri-gpu/nvidia", "/run/nri-gpu/nvidia")


@pytest.mark.short
@pytest.mark.usefixtures("injector")
def test_device_nodes_that_it_added_are_taken_over(node: Containerd, launch: Launch) -> None:
    devices = [{"path": path, "type": "c", "major": 1, "minor": 3} for path in (*SHARED, "/dev/theirs")]
    with staged(launch) as daemon, NriGuard(launch) as guard:
        guard.wait_logged("registered")
        oci = adjusted(node, "device=0", {"linux": {"devices": devices}}).oci
        numbers = {each["path"]: (each["major"], each["minor"]) for each in oci["linux"]["devices"]}
        assert numbers["/dev/nvidiactl"] == (195, 255)
        assert numbers["/dev/nvidia-uvm"] != (1, 3)
        assert numbers["/dev/theirs"] == (1, 3)
        assert len(numbers) == len(oci["linux"]["devices"])
        daemon.wait_logged("replaced=/dev/nvidia-uvm,/dev/nvidiactl")


@pytest.mark.short
@pytest.mark.usefixtures("injector")
def test_a_node_of_a_gpu_that_it_added_is_refused_in_our_words(node: Containerd, daemon: NriGpu) -> None:
    device = {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}
    with pytest.raises(CriError, match=r"\[held-by-others\]: the container already holds /dev/nvidia1"):
        adjusted(node, "device=0", {"linux": {"devices": [device]}})
    daemon.wait_held({})


@pytest.mark.short
@pytest.mark.usefixtures("injector")
def test_where_its_mounts_leave_the_driver_no_place_they_are_taken_over(node: Containerd, launch: Launch) -> None:
    mounts = [{"destination": each, "type": "tmpfs", "source": "theirs"} for each in TREES]
    with staged(launch.with_policy('[driver]\nloader = "tree"\n')):
        found = adjusted(node, "device=0", {"mounts": mounts}).oci["mounts"]
    sources = {each["destination"]: each["source"] for each in found}
    assert [sources[place] == "theirs" for place in TREES] == [True, True, False]
