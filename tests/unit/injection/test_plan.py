from __future__ import annotations

from dataclasses import replace

import pytest

from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import NO_EDITS
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, DriverTree
from nri_gpu.injection.plan import Share, plan
from tests.support import builders as make

TREE = DriverTree("/stage/all", ("nvidia-smi",))
SHARE = Share(
    container=make.container(),
    gpus=(make.gpu(1),),
    capabilities=DEFAULT_CAPABILITIES,
    inventory=make.inventory(),
    tree=TREE,
    void=False,
)


def test_a_share_is_nodes_files_and_environment() -> None:
    edits = plan(SHARE)
    assert list(edits.devices) == ["/dev/nvidia6", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    assert edits.mounts["/usr/local/nvidia"].source == TREE.path
    assert edits.env == {
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
        "NVIDIA_VISIBLE_DEVICES": make.uuid(1),
    }
    assert not edits.annotations  # the mark is the shell's to sign


def test_no_gpu_no_edits() -> None:
    assert plan(replace(SHARE, gpus=())) == NO_EDITS


def test_a_simulated_node_without_driver_files_still_gives_nodes() -> None:
    edits = plan(replace(SHARE, tree=None))
    assert "/dev/nvidia6" in edits.devices
    assert not edits.mounts
    assert "LD_LIBRARY_PATH" not in edits.env


CONTAINERS = {
    "plain": make.container(),
    "a volume where the tree usually goes": make.container(mounts=frozenset({"/usr/local/nvidia"})),
    "volumes in every place": make.container(mounts=frozenset({"/usr/local", "/opt", "/run"})),
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_the_loaders_path_points_at_where_the_tree_was_mounted(container: Container) -> None:
    edits = plan(replace(SHARE, container=container))
    folder = edits.env["LD_LIBRARY_PATH"].removesuffix("/lib64")
    assert edits.mounts[folder].source == TREE.path
