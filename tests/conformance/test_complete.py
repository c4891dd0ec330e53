"""What a device plugin gave by device specs, completed in real containers: the same GPUs, and what using them takes.

The numbers are a simulated node's, so the device cgroup's answers are real and no driver's.
"""

import os
import stat
from pathlib import Path

import pytest

from tests.conformance.conftest import launch_on
from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS, staged
from tests.support.loading import LIBRARIES
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec
from tests.support.probe import check_opens, nvidia_nodes

pytestmark = on_newest

CTL, UVM, UVM_TOOLS = (195, 255), (1510, 0), (1510, 1)
LIBRARY = f"{LIBRARIES}/libcuda.so.1"


def plugin_nodes(folder: Path, *indices: int) -> dict[str, str]:
    """What a kubelet passes on for a device plugin: path in the container -> node on the host."""
    numbers = {f"nvidia{index}": (195, index) for index in indices} | {"nvidiactl": CTL}
    for name, number in numbers.items():
        os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(*number))
        (folder / name).chmod(0o666)
    return {f"/dev/{name}": str(folder / name) for name in numbers}


@pytest.mark.parametrize(("complete", "claim"), [("asked", "2"), ("all", "")])
@pytest.mark.short
def test_it_has_the_same_gpus_and_all_it_takes(
    cgroup_node: Containerd, tmp_path: Path, complete: str, claim: str
) -> None:
    node = cgroup_node
    with staged(launch_on(node, tmp_path).with_policy(f'[foreign]\ncomplete = "{complete}"\n')) as daemon:
        pod = node.cri.asking(claim)
        spec = ContainerSpec(devices=plugin_nodes(tmp_path, 1, 3), env={"NVIDIA_VISIBLE_DEVICES": "all"})
        container = node.cri.run(pod, spec)
        granted = {(195, 1), (195, 3), CTL, UVM, UVM_TOOLS}
        assert {*nvidia_nodes(node.cri, container).values()} == granted
        check_opens(node, container, granted, {(195, 0), (195, 2)}, access={"rw", "rwm"})  # as the plugin's or as ours
        status = node.cri.status(container)
        assert status.env["NVIDIA_VISIBLE_DEVICES"] == f"{UUIDS[1]},{UUIDS[3]}"
        assert node.cri.execute(container, "/bin/ls", LIBRARY).code == 0
        assert not status.oci.get("hooks")
        assert ";uuid=;" in status.oci["annotations"]["gpu.nri.io/grant"]

        assert "[gpu-busy]: GPU 1" in node.cri.refused("device=1", "exclusive").details
        daemon.restart(kill=True)
        daemon.wait_logged("driver files staged")
        assert "[gpu-busy]: GPU 3" in node.cri.refused("device=3", "after-restart").details
        node.cri.run_asking("device=0", "free")
