from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import NO_EDITS
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES
from nri_gpu.domain.node import DriverTree, Loader
from nri_gpu.injection.plan import Injection, plan
from tests.support import builders as make
from tests.support.loading import LIBRARIES, tree_of

TREE = DriverTree("/stage/all", ("nvidia-smi",))
SHARE = Injection(
    container=make.container(),
    gpus=(make.gpu(1),),
    capabilities=DEFAULT_CAPABILITIES,
    inventory=make.inventory(),
    tree=TREE,
    loader=Loader.FOLDERS,
    void=False,
)


def test_a_share_is_nodes_files_and_environment() -> None:
    edits = plan(SHARE)
    assert list(edits.devices) == ["/dev/nvidia6", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    assert tree_of(edits) == TREE.path
    assert edits.env == {
        "LD_LIBRARY_PATH": LIBRARIES,
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
    "a volume in a loader's folder": make.container(mounts=frozenset({"/usr/lib"})),
    "volumes in every place": make.container(
        mounts=frozenset({"/usr/local", "/usr/lib", "/usr/lib64", "/opt", "/run"})
    ),
}


@pytest.mark.parametrize("loader", [Loader.FOLDERS, Loader.TREE])
@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_the_loaders_path_points_at_where_the_libraries_were_mounted(container: Container, loader: Loader) -> None:
    edits = plan(replace(SHARE, container=container, loader=loader))
    folder = edits.env["LD_LIBRARY_PATH"]
    mounted = {mount.destination: mount.source for mount in edits.mounts.values()}
    assert mounted.get(folder, f"{mounted.get(folder.removesuffix('/lib64'))}/lib64") == f"{TREE.path}/lib64"


def test_a_strategy_changes_the_next_plan() -> None:
    plans = [plan(replace(SHARE, loader=loader)) for loader in Loader]
    assert "LD_LIBRARY_PATH" not in plans[list(Loader).index(Loader.FILES)].env
    assert plans[list(Loader).index(Loader.TREE)].mounts.keys() == {"/usr/local/nvidia"}
