from __future__ import annotations

import pytest

from nri_gpu.domain.node import DriverTree, Loader
from nri_gpu.injection import driver_mounts
from nri_gpu.injection.driver_mounts import TREE_PLACES, DriverPlaces, free_places, library_path, tree_mounts

pytestmark = pytest.mark.usefixtures("on_x86_64")

TREE = DriverTree(
    "/stage/g/all",
    ("nvidia-smi", "nvidia-debugdump"),
    libraries=(("lib64/libcuda.so.5", ("libcuda.so.5", "libcuda.so.1", "libcuda.so")),),
    libraries_32=(("lib64/lib32/libcuda.so.5", ("libcuda.so.5", "libcuda.so.1")),),
)
FIRST, SECOND, THIRD = TREE_PLACES
DEBIAN, RHEL = "/usr/lib/x86_64-linux-gnu", "/usr/lib64"
HWCAPS = (f"{DEBIAN}/glibc-hwcaps/x86-64-v2", f"{RHEL}/glibc-hwcaps/x86-64-v2")
SMI, DUMP = "/usr/bin/nvidia-smi", "/usr/bin/nvidia-debugdump"
LIBRARIES = f"{TREE.path}/lib64"
# Where a container of containerd's always has mounts.
USUAL = frozenset({"/proc", "/dev", "/dev/pts", "/dev/shm", "/sys", "/sys/fs/cgroup", "/etc/hosts", "/etc/resolv.conf"})


def given(loader: Loader, taken: frozenset[str] = USUAL, tree: DriverTree = TREE) -> dict[str, str]:
    """Destination -> source."""
    return {mount.destination: mount.source for mount in tree_mounts(tree, free_places(loader, taken, tree))}


def search(loader: Loader, taken: frozenset[str] = USUAL, *, compatible: bool = False) -> tuple[str, ...]:
    return free_places(loader, taken, TREE).search(compatible=compatible)


PLACES = {
    "a volume at the place": (frozenset({FIRST}), SECOND),
    "a volume below it": (frozenset({FIRST + "/lib64"}), SECOND),
    "a volume above it": (frozenset({"/usr/local"}), SECOND),
    "a volume beside it": (frozenset({FIRST + "-old", "/usr/local/nvidi"}), FIRST),
    "slashes doubled": (frozenset({"//usr//local/nvidia"}), SECOND),
    "a detour": (frozenset({"/usr/local/bin/../nvidia"}), SECOND),
    "a relative destination": (frozenset({"usr/local"}), SECOND),
    "all taken": (frozenset({FIRST, SECOND, THIRD}), THIRD),
    "the root": (frozenset({"/"}), THIRD),
}


@pytest.mark.parametrize(("taken", "place"), PLACES.values(), ids=PLACES)
def test_the_tree_keeps_clear_of_the_containers_own_mounts(taken: frozenset[str], place: str) -> None:
    assert given(Loader.TREE, taken) == {place: TREE.path}
    assert search(Loader.TREE, taken) == (f"{place}/lib64",)


def test_hwcaps_are_the_same_folders_and_no_variable() -> None:
    assert given(Loader.HWCAPS) == given(Loader.FOLDERS)
    assert search(Loader.HWCAPS) == ()


def test_files_are_every_name_in_every_default_folder() -> None:
    names = {f"{folder}/{name}" for folder in (DEBIAN, RHEL) for name in ("libcuda.so.5", "libcuda.so.1", "libcuda.so")}
    older = {
        f"{folder}/{name}" for folder in ("/usr/lib/i386-linux-gnu", "/usr/lib") for name in TREE.libraries_32[0][1]
    }
    assert given(Loader.FILES) == {
        **dict.fromkeys(names, f"{LIBRARIES}/libcuda.so.5"),
        **dict.fromkeys(older, f"{LIBRARIES}/lib32/libcuda.so.5"),
        SMI: f"{LIBRARIES}/bin/nvidia-smi",
        DUMP: f"{LIBRARIES}/bin/nvidia-debugdump",
    }
    assert search(Loader.FILES, compatible=True) == ()


COMPATIBLE = {
    Loader.FOLDERS: (HWCAPS[0], f"{HWCAPS[0]}/lib32"),
    Loader.TREE: (f"{FIRST}/lib64", f"{FIRST}/lib64/lib32"),
    Loader.HWCAPS: (f"{HWCAPS[0]}/lib32",),
    Loader.FILES: (),
}


@pytest.mark.parametrize("loader", Loader)
def test_32_bit_programs_are_led_by_the_variable_where_nothing_else_can(loader: Loader) -> None:
    assert search(loader, compatible=True) == COMPATIBLE[loader]


# Strategy, the pod's volume, what is left, what the variable then leads to.
VOLUMES = {
    "one folder": (Loader.FOLDERS, {RHEL}, {HWCAPS[0], SMI}, (HWCAPS[0],)),
    "both folders": (Loader.FOLDERS, {DEBIAN, RHEL}, {FIRST, SMI}, (f"{FIRST}/lib64",)),
    "both, and the tree's": (Loader.FOLDERS, {DEBIAN, RHEL, FIRST}, {SECOND, SMI}, (f"{SECOND}/lib64",)),
    "the tree's place, which is not used": (Loader.FOLDERS, {FIRST}, {*HWCAPS, SMI}, (HWCAPS[0],)),
    "the tool": (Loader.FOLDERS, {SMI}, {*HWCAPS}, (HWCAPS[0],)),
    "hwcaps, one folder": (Loader.HWCAPS, {DEBIAN}, {HWCAPS[1], SMI}, ()),
    "hwcaps, both": (Loader.HWCAPS, {DEBIAN, RHEL}, {FIRST, SMI}, (f"{FIRST}/lib64",)),
    "files, all folders": (Loader.FILES, {"/usr/lib", RHEL}, {FIRST, SMI, DUMP}, (f"{FIRST}/lib64",)),
}


@pytest.mark.parametrize(("loader", "taken", "left", "led"), VOLUMES.values(), ids=VOLUMES)
def test_what_would_hide_a_mount_of_the_containers_goes_elsewhere(
    loader: Loader, taken: set[str], left: set[str], led: tuple[str, ...]
) -> None:
    assert given(loader, USUAL | taken).keys() == left
    assert search(loader, USUAL | taken) == led


def test_a_file_of_the_containers_own_keeps_its_name_and_a_covered_folder_costs_its_files() -> None:
    mine = f"{DEBIAN}/libcuda.so.1"
    mounted = given(Loader.FILES, frozenset({mine, RHEL}))
    assert mounted.keys() == {p for p in given(Loader.FILES) if p != mine and not p.startswith(f"{RHEL}/")}


@pytest.mark.parametrize("loader", [Loader.FOLDERS, Loader.HWCAPS])
def test_a_machine_without_hwcaps_levels_has_the_tree(monkeypatch: pytest.MonkeyPatch, loader: Loader) -> None:
    old = free_places(loader, (), TREE, hwcaps=False)  # a CPU without x86-64-v2
    monkeypatch.setattr(driver_mounts, "HWCAPS_PLACES", ())
    assert old == free_places(loader, (), TREE)
    assert given(loader) == {FIRST: TREE.path, SMI: f"{LIBRARIES}/bin/nvidia-smi"}
    assert search(loader) == (f"{FIRST}/lib64",)


def test_without_the_tool_in_the_tree_it_is_not_mounted() -> None:
    assert not {SMI, DUMP} & given(Loader.FOLDERS, tree=DriverTree("/stage")).keys()


def test_without_a_driver_there_are_no_programs() -> None:
    assert free_places(Loader.FILES, (), None) == DriverPlaces(files=(DEBIAN, RHEL))


ICD, EGL = "/etc/vulkan/icd.d/nvidia_icd.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"
DRAWING = DriverTree("/stage", files=((ICD, f"extra{ICD}"), (EGL, f"extra{EGL}")))
BESIDE = {
    "nothing in the way": (USUAL, {ICD, EGL}),
    "a file of its own": (frozenset({ICD}), {EGL}),
    "a folder of its own": (frozenset({"/etc/vulkan"}), {EGL}),
    "another file of the folder": (frozenset({"/etc/vulkan/icd.d/mine.json", "/etc/hosts"}), {ICD, EGL}),
}


@pytest.mark.parametrize("loader", Loader)
@pytest.mark.parametrize(("taken", "files"), BESIDE.values(), ids=BESIDE)
def test_single_files_go_beside_the_containers_own(taken: frozenset[str], files: set[str], loader: Loader) -> None:
    mounted = given(loader, taken, DRAWING)
    assert {place: f"/stage/extra{place}" for place in files}.items() <= mounted.items()
    assert not ({ICD, EGL} - files) & mounted.keys()


OURS = f"{FIRST}/lib64"
PATHS: dict[str, tuple[str, str | None]] = {
    "empty before": ("", OURS),
    "several before": ("/a:/b", f"{OURS}:/a:/b"),
    "ours leads already": (f"{OURS}:/a", None),
    "ours is there but does not lead": (f"/a:{OURS}", f"{OURS}:/a:{OURS}"),
    "one that only begins like ours": (f"{OURS}-old", f"{OURS}:{OURS}-old"),
    "an empty element of the image's own stays its own": (":/a", f"{OURS}::/a"),
}


@pytest.mark.parametrize(("before", "after"), PATHS.values(), ids=PATHS)
def test_the_loaders_path(before: str, after: str | None) -> None:
    assert library_path([OURS], before) == ({} if after is None else {"LD_LIBRARY_PATH": after})


def test_the_loaders_path_with_32_bit_libraries() -> None:
    folders = [OURS, "/usr/local/nvidia/lib32"]
    assert library_path(folders, "/a") == {"LD_LIBRARY_PATH": f"{OURS}:/usr/local/nvidia/lib32:/a"}
    assert library_path(folders, ":".join([*folders, "/a"])) == {}
    assert library_path(folders, OURS) == {"LD_LIBRARY_PATH": ":".join([*folders, OURS])}
