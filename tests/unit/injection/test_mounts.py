from __future__ import annotations

import pytest

from nri_gpu.domain.gpu import DriverTree
from nri_gpu.injection.mounts import HWCAPS_PLACES, TREE_PLACES, free_places, tree_mounts

TREE = DriverTree("/stage/g/all", ("nvidia-smi",))
FIRST, SECOND, THIRD = TREE_PLACES
SMI = "/usr/bin/nvidia-smi"
# Where a container of containerd's always has mounts.
USUAL = frozenset({"/proc", "/dev", "/dev/pts", "/dev/shm", "/sys", "/sys/fs/cgroup", "/etc/hosts", "/etc/resolv.conf"})

PLACES = {
    "nothing in the way": (USUAL, FIRST),
    "a volume at the place": ({FIRST}, SECOND),
    "a volume below it": ({FIRST + "/lib64"}, SECOND),
    "a volume above it": ({"/usr/local"}, SECOND),
    "a volume beside it": ({FIRST + "-old", "/usr/local/nvidi"}, FIRST),
    "a slash at the end": ({FIRST + "/"}, SECOND),
    "slashes doubled": ({"//usr//local/nvidia"}, SECOND),
    "a detour": ({"/usr/local/bin/../nvidia"}, SECOND),
    "a relative destination": ({"usr/local"}, SECOND),
    "two taken": ({FIRST, "/opt"}, THIRD),
    "all taken": ({FIRST, SECOND, THIRD}, THIRD),
    "the root": ({"/"}, THIRD),
}


@pytest.mark.parametrize(("taken", "place"), PLACES.values(), ids=PLACES)
def test_the_tree_keeps_clear_of_the_containers_own_mounts(taken: frozenset[str], place: str) -> None:
    assert free_places(taken).tree == place


def test_the_tree_its_loader_folders_and_the_tool() -> None:
    mounts = {mount.destination: mount.source for mount in tree_mounts(TREE, free_places(USUAL))}
    assert mounts == {
        FIRST: TREE.path,
        **dict.fromkeys(HWCAPS_PLACES, f"{TREE.path}/lib64"),
        SMI: f"{TREE.path}/bin/nvidia-smi",
    }


LEFT_OUT = {
    "the tool, where it has a file of that name": (frozenset({SMI}), SMI),
    "the tool, where its folder is a volume": (frozenset({"/usr/bin"}), SMI),
    "the loader folder, where it is a volume": (frozenset({"/usr/lib64"}), "/usr/lib64/glibc-hwcaps/x86-64-v2"),
}


@pytest.mark.parametrize(("taken", "gone"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_would_hide_a_mount_of_the_containers_is_left_out(taken: frozenset[str], gone: str) -> None:
    assert gone not in {mount.destination for mount in tree_mounts(TREE, free_places(taken))}


def test_without_the_tool_in_the_tree_it_is_not_mounted() -> None:
    assert SMI not in {mount.destination for mount in tree_mounts(DriverTree("/stage"), free_places(()))}


def test_every_mount_is_a_read_only_bind() -> None:
    assert all({"rbind", "ro"} <= set(mount.options) for mount in tree_mounts(TREE, free_places(USUAL)))


ICD, EGL = "/etc/vulkan/icd.d/nvidia_icd.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"
DRAWING = DriverTree("/stage", files=((ICD, f"extra{ICD}"), (EGL, f"extra{EGL}")))
BESIDE = {
    "nothing in the way": (USUAL, {ICD, EGL}),
    "a file of its own": (frozenset({ICD}), {EGL}),
    "a folder of its own": (frozenset({"/etc/vulkan"}), {EGL}),
    "another file of the folder": (frozenset({"/etc/vulkan/icd.d/mine.json", "/etc/hosts"}), {ICD, EGL}),
}


@pytest.mark.parametrize(("taken", "given"), BESIDE.values(), ids=BESIDE)
def test_single_files_go_beside_the_containers_own(taken: frozenset[str], given: set[str]) -> None:
    mounts = {each.destination: each.source for each in tree_mounts(DRAWING, free_places(taken, DRAWING))}
    assert {place: f"/stage/extra{place}" for place in given}.items() <= mounts.items()
    assert not ({ICD, EGL} - given) & mounts.keys()
