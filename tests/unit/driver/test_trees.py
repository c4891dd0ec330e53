"""What each set of capabilities is staged with; the same, name by name, however a host lays out its driver.

So what is proven in real containers with one layout (tests/conformance/test_capabilities.py) holds for all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct, field

from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability, closed_sets, closure
from nri_gpu.domain.node import DriverFiles
from nri_gpu.driver.driver_scan import FoundDriver, scan
from nri_gpu.driver.elf import read_elf
from nri_gpu.driver.manifest import complete
from nri_gpu.driver.stage import stage
from tests.support.driver_root import (
    CONFIGS,
    Layout,
    make_driver_root,
)

V: Final = "580.95.05"
SETS: Final = (
    *(closure(frozenset({each})) for each in Capability if each is not Capability.COMPAT32),
    DEFAULT_CAPABILITIES,
    frozenset(Capability),
)
# Staged trees of one driver: capabilities -> path in the tree -> what is there.
Trees = Mapping[Capabilities, Mapping[str, str]]


class Host(Struct, frozen=True):
    """A driver root, and what policy says of it."""

    root: Path
    library_dirs: Sequence[str] = field(default=())


def whole_root(path: Path, layout: Layout = "flat") -> Path:
    return make_driver_root(path, V, layout, machine="x86_64", everything=True)


def driver_container(base: Path) -> Host:
    """As `/run/nvidia/driver`: a distribution's root below a folder, its links absolute as if in a chroot."""
    root = whole_root(base / "run/nvidia/driver", "ubuntu")
    for link in [path for path in root.rglob("*") if path.is_symlink() and not path.is_dir()]:
        target = f"/{link.resolve().relative_to(root)}"
        link.unlink()
        link.symlink_to(target)
    return Host(root)


def with_folder(root: Path, folder: str) -> None:
    """Have each configuration of a loader name its library by a path."""
    for file in (*root.rglob("*_nvidia*.json"), *root.rglob("nvidia_*.json"), *root.rglob("nvidia.icd")):
        file.write_text(re.sub(r"lib(?=[\w-]+\.so)", f"{folder}/lib", file.read_text()))


def nixos(base: Path) -> Host:
    """A link into a store where every folder has a name of its own; 32-bit libraries in another of them.

    Source: NixOS/nixpkgs pkgs/os-specific/linux/nvidia-x11/builder.sh (installPhase).
    """
    made = whole_root(base / "nix/store/abc-nvidia-x11")
    with_folder(made, "/nix/store/abc-nvidia-x11/lib")
    icd = made / "share/vulkan/icd.d/nvidia_icd.json"
    icd.rename(icd.with_name("nvidia_icd.x86_64.json"))
    other = base / "nix/store/def-nvidia-x11-lib32"
    other.mkdir()
    (made / "lib").rename(other / "lib")
    (made / "lib64").rename(made / "lib")
    (base / "run").mkdir()
    (base / "run/opengl-driver").symlink_to("/nix/store/abc-nvidia-x11")
    (base / "run/opengl-driver-32").symlink_to("/nix/store/def-nvidia-x11-lib32")
    return Host(base, ("/run/opengl-driver/lib", "/run/opengl-driver-32/lib"))


def talos(base: Path) -> Host:
    """A system without glibc of its own: the driver beside a glibc that came with it."""
    made = whole_root(base / "made")
    target = base / "root/usr/local/glibc/usr"
    target.mkdir(parents=True)
    (made / "lib64").rename(target / "lib")
    (made / "lib").rename(target / "lib32")
    for folder in ("bin", "share", "etc"):
        (made / folder).rename(target / folder)
    return Host(base / "root", ("/usr/local/glibc/usr/lib", "/usr/local/glibc/usr/lib32/"))


def fedora(base: Path) -> Host:
    """As RPM Fusion and negativo17 have it: the loaders' configuration names libraries in /usr/lib64."""
    root = whole_root(base, "rhel")
    with_folder(root / "usr/share/vulkan", "/usr/lib64")
    escaped = root / "usr/share/glvnd/egl_vendor.d/10_nvidia.json"
    escaped.write_text(escaped.read_text().replace("libEGL", r"\/usr\/lib64\/libEGL"))
    return Host(root)


LAYOUTS: Final[Mapping[str, Callable[[Path], Host]]] = {
    "ubuntu": lambda base: Host(whole_root(base, "ubuntu")),
    "debian": lambda base: Host(whole_root(base, "debian")),
    "rhel": lambda base: Host(whole_root(base, "rhel")),
    "driver container": driver_container,
    "Fedora": fedora,
    "NixOS": nixos,
    "Talos": talos,
}


def staged(host: Host, folder: Path) -> Trees:
    found = scan(host.root, "x86_64", host.library_dirs)
    assert (found.version, found.left_out) == (V, ())
    files = stage(found, folder)
    known: dict[int, str] = {}
    trees = {some: contents(Path(files.trees[some].path), known) | dict(files.trees[some].files) for some in SETS}
    return {some: {plain(name): plain(what) for name, what in tree.items()} for some, tree in trees.items()}


def plain(name: str) -> str:
    """The name of Vulkan's ICD without the machine's, which some hosts have."""
    return name.replace("nvidia_icd.x86_64.json", "nvidia_icd.json")


def contents(tree: Path, known: dict[int, str]) -> dict[str, str]:
    """What is behind each name; a file that many trees share is read once. known: files that were read, by inode."""
    found: dict[str, str] = {}
    for path in tree.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(tree))] = os.fspath(path.readlink())
        elif path.is_file():
            inode = path.stat().st_ino
            if inode not in known:
                elf = read_elf(path)
                known[inode] = f"{elf.bits} {elf.soname}" if elf else path.read_text()
            found[str(path.relative_to(tree))] = known[inode]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FoundDriver:
    """A driver that lacks nothing, as `/usr/local/nvidia` on hosts that are images themselves."""
    return scan(whole_root(tmp_path_factory.mktemp("whole") / "root"), "x86_64")


@pytest.fixture(scope="module")
def expected(whole: FoundDriver, tmp_path_factory: pytest.TempPathFactory) -> Trees:
    trees = staged(Host(whole.root), tmp_path_factory.mktemp("flat"))
    tree = trees[frozenset(Capability)]
    assert len([name for name in tree if name.startswith("lib64/lib32/")]) > len(CONFIGS)
    assert {"extra/etc/OpenCL/vendors/nvidia.icd", "lib64/bin/nvidia-smi", "lib64/libcuda.so.1"} <= set(tree)
    return trees


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_same_trees(tmp_path: Path, expected: Trees, layout: Callable[[Path], Host]) -> None:
    for some, tree in staged(layout(tmp_path / "host"), tmp_path / "drivers").items():
        assert tree == expected[some], sorted(some)


@pytest.fixture(scope="module")
def files(whole: FoundDriver, tmp_path_factory: pytest.TempPathFactory) -> DriverFiles:
    """It, staged."""
    return stage(whole, tmp_path_factory.mktemp("staged") / "drivers")


def of(*words: str) -> Capabilities:
    return closure(frozenset(map(Capability, words)))


def test_nothing_is_missing_of_a_whole_driver(whole: FoundDriver) -> None:
    assert dict(whole.missing) == {capability: () for capability in Capability}
    assert (whole.unknown, whole.left_out) == ((), ())
    assert {place.removeprefix("etc/").removeprefix("share/") for place in CONFIGS} <= {
        file.name.removeprefix("etc/").removeprefix("usr/share/") for file in whole.singles
    }


def test_a_link_to_the_allocator_is_what_gbm_loads(files: DriverFiles) -> None:
    tree = Path(files.trees[of("graphics")].path)
    assert os.fspath((tree / "lib64/gbm/nvidia-drm_gbm.so").readlink()) == "../libnvidia-allocator.so.1"
    assert (tree / "lib64/gbm/nvidia-drm_gbm.so").samefile(
        tree / "extra/usr/lib/x86_64-linux-gnu/gbm/nvidia-drm_gbm.so"
    )


def test_each_closed_set_has_a_tree_and_equal_ones_share_it(files: DriverFiles, tmp_path: Path) -> None:
    assert set(files.trees) == set(closed_sets()) - {of("compat32")}
    server = make_driver_root(tmp_path / "server", V, machine="x86_64")
    small = stage(scan(server, "x86_64"), tmp_path / "server-drivers")
    assert {Path(tree.path).name for tree in small.trees.values()} == {"compute", "utility", "compute+utility"}


def test_a_config_that_names_a_library_that_is_not_staged_is_left_out(tmp_path: Path) -> None:
    root = whole_root(tmp_path / "root")
    icd = root / "share/vulkan/icd.d/nvidia_icd.json"
    icd.write_text(json.dumps({"ICD": {"library_path": "/usr/lib/libGLX_mesa.so.0"}}))
    (root / "etc/OpenCL/vendors/nvidia.icd").write_text("/usr/lib/\n")
    (root / "share/glvnd/egl_vendor.d/10_nvidia.json").write_text(" " * 70_000)
    found = scan(root, "x86_64")
    assert [each.path for each in found.left_out] == [
        "etc/OpenCL/vendors/nvidia.icd",
        "share/vulkan/icd.d/nvidia_icd.json",
        "share/glvnd/egl_vendor.d/10_nvidia.json",
    ]
    *by_path, too_long = found.left_out
    assert all("by a path that containers do not have" in each.reason for each in by_path)
    assert too_long.reason == "longer than 65536 bytes"


def test_a_config_with_plain_names_is_a_new_file_and_the_hosts_stays(tmp_path: Path) -> None:
    root = whole_root(tmp_path / "root")
    with_folder(root, "/usr/lib64")
    before = (root / "share/vulkan/icd.d/nvidia_icd.json").read_text()
    files = stage(scan(root, "x86_64"), tmp_path / "drivers")
    assert stage(scan(root, "x86_64"), tmp_path / "drivers") == files
    copy = Path(files.trees[of("graphics")].path, "extra/etc/vulkan/icd.d/nvidia_icd.json")
    assert copy.read_text() == CONFIGS["share/vulkan/icd.d/nvidia_icd.json"]
    assert (root / "share/vulkan/icd.d/nvidia_icd.json").read_text() == before
    assert complete(tmp_path / "drivers" / files.generation) == files
