from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import Container
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Unit
from nri_gpu.domain.gpu_request import NumaBinding
from nri_gpu.domain.node import DriverTree, Loader, NumaNode
from nri_gpu.injection.inject import Injection, disarmed, plan
from tests.support import builders as make

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


NODES = (NumaNode(0, "0-15,32-47"), NumaNode(1, "16-31"), NumaNode(2, "", memory=True), NumaNode(3, "48", memory=False))
ZERO, ONE, LONE, BARE, NOWHERE, UNREAD = (make.gpu(at, numa_node=node) for at, node in enumerate((0, 1, 2, 3, None, 9)))
PART = make.mig_gpu(6, numa_node=1).parts[0]

BOUND: dict[str, tuple[Sequence[Unit], NumaBinding, tuple[str, str]]] = {
    "cpus": ((ZERO,), NumaBinding.CPUS, ("0-15,32-47", "")),
    "memory": ((ZERO,), NumaBinding.MEMORY, ("", "0")),
    "both": ((ONE,), NumaBinding.BOTH, ("16-31", "1")),
    "of a MIG device": ((PART,), NumaBinding.BOTH, ("16-31", "1")),
    "of two nodes": ((ONE, ZERO), NumaBinding.BOTH, ("0-15,32-47,16-31", "0,1")),
    "of one node twice": ((ONE, PART), NumaBinding.BOTH, ("16-31", "1")),
    "none": ((ZERO,), NumaBinding.NONE, ("", "")),
    "a node without CPUs": ((LONE,), NumaBinding.BOTH, ("", "2")),
    "a node without CPUs beside one": ((ZERO, LONE), NumaBinding.BOTH, ("0-15,32-47", "0,2")),
    "a node without memory": ((BARE,), NumaBinding.BOTH, ("48", "")),
    "no node is told": ((NOWHERE,), NumaBinding.BOTH, ("", "")),
    "of one no node is told": ((ZERO, NOWHERE), NumaBinding.BOTH, ("", "")),
    "the node could not be read": ((UNREAD,), NumaBinding.BOTH, ("", "")),
    "no GPU": ((), NumaBinding.BOTH, ("", "")),
}


@pytest.mark.parametrize(("units", "binding", "cpuset"), BOUND.values(), ids=BOUND)
def test_what_a_container_is_bound_to(units: Sequence[Unit], binding: NumaBinding, cpuset: tuple[str, str]) -> None:
    injection = replace(SHARE, gpus=tuple(units), inventory=make.inventory(numa=NODES), numa=binding)
    edits = plan(injection)
    assert (edits.cpuset_cpus, edits.cpuset_mems) == cpuset
    pinned = plan(replace(injection, container=make.container(pinned=True)))
    assert (pinned.cpuset_cpus, pinned.cpuset_mems) == ("", "")


DISARMED = {
    "not set": ({}, False),
    "void already": ({"NVIDIA_VISIBLE_DEVICES": "void"}, False),
    "all": ({"NVIDIA_VISIBLE_DEVICES": "all"}, True),
    "none, which still brings the driver": ({"NVIDIA_VISIBLE_DEVICES": "none"}, True),
    "empty": ({"NVIDIA_VISIBLE_DEVICES": ""}, True),
    "another variable": ({"LD_LIBRARY_PATH": "all"}, False),
}


@pytest.mark.parametrize(("env", "armed"), DISARMED.values(), ids=DISARMED)
def test_disarming_overrides_whatever_an_nvidia_hook_would_obey(env: dict[str, str], armed: bool) -> None:
    assert disarmed(env) == ({"NVIDIA_VISIBLE_DEVICES": "void"} if armed else {})
