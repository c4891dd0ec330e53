"""Every capability of a whole driver, in every layout: what is found, what each set of capabilities is staged with."""

import json
import os
from pathlib import Path

import pytest

from nri_gpu.domain.gpu import Capabilities, Capability, closed_sets, closure
from nri_gpu.driver.elf import read_elf
from nri_gpu.driver.scan import FoundDriver, scan
from nri_gpu.driver.stage import stage
from tests.support.driver_root import (
    CONFIGS,
    GRAPHICS,
    LIBRARIES,
    NGX,
    OWN_VERSIONS,
    VIDEO,
    Layout,
    make_driver_root,
    write_library,
)

V = "580.95.05"
COMPUTE = frozenset({Capability.COMPUTE})
LAYOUTS: list[Layout] = ["flat", "ubuntu", "debian", "rhel"]
PLAIN = "libGLX_nvidia.so.0"


@pytest.fixture(params=LAYOUTS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_driver_root(tmp_path / "root", V, request.param, machine="x86_64", everything=True)


@pytest.fixture
def found(root: Path) -> FoundDriver:
    return scan(root, "x86_64")


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    return make_driver_root(tmp_path / "root", V, machine="x86_64", everything=True)


def of(*words: str) -> Capabilities:
    return closure(frozenset(map(Capability, words)))


def names(folder: str | Path, part: str) -> set[str]:
    """What a part of a tree holds, but for the parts that are inside it."""
    here = Path(folder, part)
    paths = (path.relative_to(here) for path in here.rglob("*") if not path.is_dir())
    return {str(path) for path in paths if path.parts[0] not in ("bin", "lib32")}


def test_nothing_is_missing_of_a_whole_driver(found: FoundDriver) -> None:
    assert dict(found.missing) == {capability: () for capability in Capability}
    assert (found.unknown, found.left_out) == ((), ())
    assert {place.removeprefix("etc/").removeprefix("share/") for place in CONFIGS} <= {
        file.name.removeprefix("etc/").removeprefix("usr/share/") for file in found.singles
    }


def test_every_library_has_the_names_that_programs_open(found: FoundDriver, tmp_path: Path) -> None:
    files = stage(found, tmp_path / "drivers")
    tree = files.trees[frozenset(Capability)].path
    every = LIBRARIES | VIDEO | GRAPHICS | NGX
    sonames = {str(Path(name).with_name(soname.format(V=V))) for name, soname in every.items()}
    assert {f"{name}.so.{V}" for name in every} | sonames <= names(tree, "lib64")
    assert {soname for soname, _ in OWN_VERSIONS.values()} <= names(tree, "lib64")
    assert {"libcuda.so", "libnvidia-opticalflow.so", "libGLX_indirect.so.0", "libvdpau_nvidia.so.1"} <= names(
        tree, "lib64"
    )
    assert all(Path(tree, "lib64", name).is_file() for name in names(tree, "lib64")), "a link leads nowhere"
    assert names(tree, "lib32") >= {f"{name}.so.{V}" for name in every} | sonames
    assert read_elf(Path(tree, "lib32/libcuda.so.1").resolve()).bits == 32  # type: ignore[union-attr] # it is there
    assert not any(
        name.startswith(("libEGL.so", "libnvidia-gtk3", "libnvidia-sandboxutils")) for name in names(tree, ".")
    )


def test_a_link_to_the_allocator_is_what_gbm_loads(flat: Path, tmp_path: Path) -> None:
    tree = Path(stage(scan(flat, "x86_64"), tmp_path / "drivers").trees[of("graphics")].path)
    assert os.fspath((tree / "lib64/gbm/nvidia-drm_gbm.so").readlink()) == "../libnvidia-allocator.so.1"
    assert (tree / "lib64/gbm/nvidia-drm_gbm.so").samefile(
        tree / "extra/usr/lib/x86_64-linux-gnu/gbm/nvidia-drm_gbm.so"
    )


@pytest.mark.parametrize("capability", Capability)
def test_a_set_holds_its_own_and_nothing_else(flat: Path, tmp_path: Path, capability: Capability) -> None:
    found = scan(flat, "x86_64")
    files = stage(found, tmp_path / "drivers")
    if capability is Capability.COMPAT32:
        assert of("compat32") not in files.trees
        return
    wanted = closure(frozenset({capability}))
    tree = files.trees[wanted].path
    own = {file.name for file in found.libraries if file.capabilities & wanted}
    assert {name for name in names(tree, "lib64") if not Path(tree, "lib64", name).is_symlink()} == own
    assert not any(
        Path(tree, folder).is_symlink() or Path(tree, folder).exists() for folder in ("lib32", "lib64/lib32")
    )
    assert {path for _, path in files.trees[wanted].files} == {
        f"extra/{file.name}" for file in found.singles if file.capabilities & wanted
    }
    assert all(Path(tree, path).is_file() for _, path in files.trees[wanted].files)


def test_32_bit_libraries_are_those_of_the_others(flat: Path, tmp_path: Path) -> None:
    tree = stage(scan(flat, "x86_64"), tmp_path / "drivers").trees[of("utility", "compat32")].path
    assert {name.partition(".so")[0] for name in names(tree, "lib32")} == {"libnvidia-ml", "libnvidia-cfg"}


def test_each_closed_set_has_a_tree_and_equal_ones_share_it(flat: Path, tmp_path: Path) -> None:
    files = stage(scan(flat, "x86_64"), tmp_path / "drivers")
    assert set(files.trees) == set(closed_sets()) - {of("compat32")}
    server = make_driver_root(tmp_path / "server", V, machine="x86_64")
    small = stage(scan(server, "x86_64"), tmp_path / "server-drivers")
    assert {Path(tree.path).name for tree in small.trees.values()} == {"compute", "utility", "compute+utility"}


def test_a_config_that_names_a_folder_of_the_host_is_left_out(flat: Path) -> None:
    icd = flat / "share/vulkan/icd.d/nvidia_icd.json"
    icd.write_text(json.dumps({"ICD": {"library_path": f"/usr/lib/{PLAIN}"}}))
    (flat / "etc/OpenCL/vendors/nvidia.icd").write_text("/usr/lib/libnvidia-opencl.so.1\n")
    found = scan(flat, "x86_64")
    assert {each.path for each in found.left_out} == {
        "share/vulkan/icd.d/nvidia_icd.json",
        "etc/OpenCL/vendors/nvidia.icd",
    }
    assert all("by a path that containers do not have" in each.reason for each in found.left_out)


def test_a_writable_config_is_left_out(flat: Path) -> None:
    (flat / "share/glvnd/egl_vendor.d/10_nvidia.json").chmod(0o666)
    assert [each.path for each in scan(flat, "x86_64").left_out] == ["share/glvnd/egl_vendor.d/10_nvidia.json"]


def test_an_odd_root_by_configuration(tmp_path: Path) -> None:
    """As NixOS has it: /run/opengl-driver leads into the store, where all names are unusual."""
    store = make_driver_root(tmp_path / "nix/store/abc-driver", V, machine="x86_64", everything=True)
    (store / "lib").rename(store / "lib32")
    (store / "lib64").rename(store / "lib")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/opengl-driver").symlink_to("/nix/store/abc-driver")
    found = scan(tmp_path, "x86_64", ["/run/opengl-driver/lib", "/run/opengl-driver/lib32"])
    assert found.version == V
    assert dict(found.missing) == {capability: () for capability in Capability}
    assert len(found.libraries_32) == len(LIBRARIES | VIDEO | GRAPHICS | NGX)


def test_a_file_of_each_capability_changes_the_generation(flat: Path) -> None:
    generations = {scan(flat, "x86_64").generation}
    for path in ("lib64/libnvcuvid.so.", "lib64/libnvidia-glcore.so.", "lib64/libnvidia-ngx.so."):
        write_library(flat / f"{path}{V}", "new", "x86_64")
        generations.add(scan(flat, "x86_64").generation)
    (flat / "share/nvidia/nvoptix.bin").write_text("other weights")
    generations.add(scan(flat, "x86_64").generation)
    assert len(generations) == 5
