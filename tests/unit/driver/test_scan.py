import os
import platform
import re
import shutil
from pathlib import Path

import pytest

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.gpu import Capability
from nri_gpu.driver.scan import FoundDriver, scan
from tests.support.driver_root import LIBRARIES, PROGRAMS, Layout, make_driver_root, write_library
from tests.support.elf_file import EM_386, shared_library

V = "580.95.05"
MACHINE = platform.machine()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_driver_root(tmp_path / "root", V)


def names(found: FoundDriver) -> dict[str, tuple[tuple[str, str], ...]]:
    return {file.name: file.links for file in found.libraries}


@pytest.mark.parametrize("layout", ["flat", "ubuntu", "debian", "rhel"])
def test_finds_the_whole_driver_in_every_layout(tmp_path: Path, layout: Layout) -> None:
    found = scan(make_driver_root(tmp_path / "root", V, layout))
    assert found.version == V
    assert set(names(found)) == {f"{name}.so.{V}" for name in LIBRARIES}
    assert [file.name for file in found.binaries] == list(PROGRAMS)
    assert (found.unknown, found.left_out) == ((), ())
    assert found.missing[Capability.COMPUTE] == found.missing[Capability.UTILITY] == ()
    assert "libnvcuvid.so" in found.missing[Capability.VIDEO]
    assert found.missing[Capability.COMPAT32] == (("every 32-bit library",) if MACHINE == "x86_64" else ())


@pytest.mark.parametrize("layout", ["flat", "ubuntu", "debian", "rhel"])
def test_names_are_those_a_program_loads_by(tmp_path: Path, layout: Layout) -> None:
    links = names(scan(make_driver_root(tmp_path / "root", V, layout)))
    assert links[f"libcuda.so.{V}"] == (("libcuda.so.1", f"libcuda.so.{V}"), ("libcuda.so", "libcuda.so.1"))
    assert links[f"libnvidia-ml.so.{V}"] == (
        ("libnvidia-ml.so.1", f"libnvidia-ml.so.{V}"),
        ("libnvidia-ml.so", "libnvidia-ml.so.1"),
    )
    assert links[f"libnvidia-nvvm.so.{V}"] == (("libnvidia-nvvm.so.4", f"libnvidia-nvvm.so.{V}"),)
    assert links[f"libnvidia-gpucomp.so.{V}"] == ()


def test_sources_are_real_files_below_the_root(tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "root", V, "debian")
    smi = next(file for file in scan(root).binaries if file.name == "nvidia-smi")
    assert smi.source.path == root / "usr/lib/nvidia/current/nvidia-smi"
    assert not smi.source.path.is_symlink()


def test_libcuda_gets_its_link_even_where_the_host_has_none(root: Path) -> None:
    (root / "lib64/libcuda.so").unlink()
    (root / "lib64/libcuda.so.1").unlink()
    (root / "lib64/libnvidia-ml.so").unlink()
    links = names(scan(root))
    assert links[f"libcuda.so.{V}"] == (("libcuda.so.1", f"libcuda.so.{V}"), ("libcuda.so", "libcuda.so.1"))
    assert links[f"libnvidia-ml.so.{V}"] == (("libnvidia-ml.so.1", f"libnvidia-ml.so.{V}"),)


def test_a_root_given_as_a_link_is_resolved(root: Path) -> None:
    link = root.with_name("link")
    link.symlink_to(root)
    assert scan(link).root == root


def test_another_machine(tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "root", V, "ubuntu", machine="aarch64")
    found = scan(root, "aarch64")
    assert (root / "usr/lib/aarch64-linux-gnu").is_dir()
    assert len(found.libraries) == len(LIBRARIES)
    with pytest.raises(DriverError, match="no NVIDIA driver for riscv64, only for x86_64, aarch64"):
        scan(root, "riscv64")


# -- versions


def test_versions_must_agree(root: Path) -> None:
    (root / f"lib64/libnvidia-ml.so.{V}").rename(root / "lib64/libnvidia-ml.so.570.10")
    with pytest.raises(DriverError, match=re.escape(f"libcuda of {V} but libnvidia-ml of 570.10")):
        scan(root)


def test_one_of_the_two_is_enough(root: Path) -> None:
    (root / f"lib64/libcuda.so.{V}").unlink()
    found = scan(root)
    assert found.version == V
    assert found.missing[Capability.COMPUTE] == ("libcuda.so",)


def test_leftovers_of_an_old_driver_are_passed_over(root: Path) -> None:
    for name in ("libcuda", "libnvidia-ml"):
        write_library(root / f"lib64/{name}.so.550.1", f"{name}.so.1")
    found = scan(root)
    assert found.version == V
    assert all(V in name for name in names(found))


def test_two_versions_and_no_link_that_says_which(root: Path) -> None:
    write_library(root / "lib64/libcuda.so.550.1", "libcuda.so.1")
    (root / "lib64/libcuda.so.1").unlink()
    with pytest.raises(DriverError, match=re.escape(f"holds libcuda of 550.1 and {V}, and no link says which")):
        scan(root)


def test_the_first_folder_wins(root: Path) -> None:
    later = root / f"lib/{MACHINE}-linux-gnu"
    later.mkdir(parents=True)
    shutil.copy2(root / f"lib64/libcuda.so.{V}", later)
    found = scan(root)
    assert next(iter(found.libraries)).source.relative == f"lib64/libcuda.so.{V}"


# -- what is not given to containers


def test_32_bit_libraries_are_left_out(root: Path) -> None:
    (root / f"lib64/libnvidia-cfg.so.{V}").write_bytes(shared_library("libnvidia-cfg.so.1", bits=32, machine=EM_386))
    found = scan(root)
    assert f"libnvidia-cfg.so.{V}" not in names(found)
    assert [str(each) for each in found.left_out] == [
        f"lib64/libnvidia-cfg.so.{V} (not a 64-bit {MACHINE} library)",
    ]
    assert found.missing[Capability.UTILITY] == ("libnvidia-cfg.so",)


def test_a_32_bit_copy_in_an_earlier_folder_does_not_hide_the_right_one(root: Path) -> None:
    earlier = root / "usr/lib64"
    earlier.mkdir(parents=True)
    name = f"libcuda.so.{V}"
    (earlier / name).write_bytes(shared_library("libcuda.so.1", bits=32, machine=EM_386))
    (earlier / name).chmod(0o755)
    assert next(iter(scan(root).libraries)).source.relative == f"lib64/{name}"


def test_a_group_writable_library_is_left_out(root: Path) -> None:
    (root / f"lib64/libnvidia-opencl.so.{V}").chmod(0o775)
    found = scan(root)
    assert f"libnvidia-opencl.so.{V}" not in names(found)
    assert "mode 0775" in found.left_out[0].reason


def test_a_library_that_leads_out_of_the_root_is_left_out(root: Path) -> None:
    outside = write_library(root.parent / "outside.so", "libnvidia-cfg.so.1")
    (root / f"lib64/libnvidia-cfg.so.{V}").unlink()
    (root / f"lib64/libnvidia-cfg.so.{V}").symlink_to(outside)
    assert [each.path for each in scan(root).left_out] == [f"lib64/libnvidia-cfg.so.{V}"]


def test_a_binary_that_cannot_be_run_is_left_out(root: Path) -> None:
    (root / "bin/nvidia-smi").chmod(0o644)
    found = scan(root)
    assert "nvidia-smi" not in [file.name for file in found.binaries]
    assert [str(each) for each in found.left_out] == ["bin/nvidia-smi (not executable)"]


def test_a_folder_that_is_another_by_a_link_is_looked_at_once(tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "root", V, "rhel")
    (root / "usr/bin/nvidia-smi").chmod(0o775)
    (root / f"usr/lib64/libnvidia-cfg.so.{V}").chmod(0o775)
    assert [each.path for each in scan(root).left_out] == [f"usr/lib64/libnvidia-cfg.so.{V}", "usr/bin/nvidia-smi"]


def test_unknown_libraries_are_told_and_known_others_are_not(root: Path) -> None:
    for name in (f"libnvidia-newthing.so.{V}", f"libnvidia-gtk3.so.{V}", "libother.so.1.2.3"):
        write_library(root / "lib64" / name, name)
    found = scan(root)
    assert found.unknown == (f"libnvidia-newthing.so.{V}",)
    assert len(found.libraries) == len(LIBRARIES)


def test_older_and_unversioned_file_names(root: Path) -> None:
    (root / f"lib64/libnvidia-nvvm.so.{V}").rename(root / "lib64/libnvidia-nvvm.so.4.0.0")
    (root / "lib64/libnvidia-nvvm.so.4").unlink()
    write_library(root / "lib64/libnvidia-nvvm70.so.4", "libnvidia-nvvm70.so.4")
    links = names(scan(root))
    assert links["libnvidia-nvvm.so.4.0.0"] == (("libnvidia-nvvm.so.4", "libnvidia-nvvm.so.4.0.0"),)
    assert links["libnvidia-nvvm70.so.4"] == ()


@pytest.mark.parametrize("soname", ["../../etc/passwd", "a/b", "..", "", "with blank"])
def test_a_soname_that_is_no_plain_name_makes_no_link(root: Path, soname: str) -> None:
    write_library(root / f"lib64/libnvidia-allocator.so.{V}", soname)
    (root / "lib64/libnvidia-allocator.so.1").unlink()
    assert names(scan(root))[f"libnvidia-allocator.so.{V}"] == (
        ("gbm/nvidia-drm_gbm.so", f"../libnvidia-allocator.so.{V}"),
    )


def test_two_libraries_of_one_soname_share_no_name(root: Path) -> None:
    write_library(root / f"lib64/libnvidia-allocator.so.{V}", "libcuda.so.1")
    (root / "lib64/libnvidia-allocator.so").symlink_to(f"libnvidia-allocator.so.{V}")
    links = names(scan(root))
    assert ("libcuda.so.1", f"libcuda.so.{V}") in links[f"libcuda.so.{V}"]
    assert links[f"libnvidia-allocator.so.{V}"] == (
        ("gbm/nvidia-drm_gbm.so", f"../libnvidia-allocator.so.{V}"),
        ("libnvidia-allocator.so", f"libnvidia-allocator.so.{V}"),
        ("libnvidia-allocator.so.1", f"libnvidia-allocator.so.{V}"),
    )


# -- nothing there


def test_no_driver_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DriverError) as caught:
        scan(tmp_path)
    for folder in ("usr/lib64", f"usr/lib/{MACHINE}-linux-gnu", f"lib/{MACHINE}-linux-gnu/nvidia/current", "lib64"):
        assert str(tmp_path / folder) in str(caught.value)


def test_an_unusable_driver_says_why(root: Path) -> None:
    for name in ("libcuda", "libnvidia-ml"):
        (root / f"lib64/{name}.so.{V}").write_text("not a library")
    with pytest.raises(DriverError, match=re.escape(f"found but not usable: lib64/libcuda.so.{V} (not an ELF file)")):
        scan(root)


def test_no_root(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="is not a directory"):
        scan(tmp_path / "gone")
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(DriverError, match="is not a directory"):
        scan(tmp_path / "circle")


# -- generation


def test_the_generation_is_safe_as_a_name_and_stays(root: Path) -> None:
    generation = scan(root).generation
    assert re.fullmatch(rf"{re.escape(V)}-[0-9a-f]{{8}}", generation)
    assert scan(root).generation == generation


def test_the_generation_changes_with_every_file_and_link(root: Path) -> None:
    seen = {scan(root).generation}

    def changed() -> None:
        generation = scan(root).generation
        assert generation not in seen
        seen.add(generation)

    os.utime(root / f"lib64/libnvidia-cfg.so.{V}", ns=(0, 1))
    changed()
    os.utime(root / "bin/nvidia-smi", ns=(0, 1))
    changed()
    write_library(root / "lib64/new", "libnvidia-nvvm.so.4").rename(root / f"lib64/libnvidia-nvvm.so.{V}")
    changed()
    twin = root / "lib64/twin"  # another file of the same size and time
    shutil.copy2(root / f"lib64/libnvidia-ml.so.{V}", twin)
    twin.rename(root / f"lib64/libnvidia-ml.so.{V}")
    changed()
    (root / "lib64/libnvidia-cfg.so").symlink_to("libnvidia-cfg.so.1")
    changed()
    (root / "bin/nvidia-debugdump").unlink()
    changed()


# -- roots that are not to be trusted


@pytest.mark.parametrize("folder", [".", "lib64"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_to(root: Path, folder: str, mode: int) -> None:
    """They cannot make a file that we would take, but rename ours: to an older one, or away."""
    (root / folder).chmod(mode)
    with pytest.raises(DriverError) as caught:
        scan(root)
    assert str(caught.value) == (
        f"folder {root / folder} is not safe (owner {os.geteuid()}, mode {mode:04o}: others than root can "
        "change it): chown root and chmod go-w it"
    )


def test_a_root_of_links_that_lead_out(root: Path) -> None:
    outside = root.parent / "outside"
    (root / "lib64").rename(outside)
    (root / "lib64").mkdir()
    for path in outside.iterdir():
        (root / "lib64" / path.name).symlink_to(path)
    with pytest.raises(DriverError) as caught:
        scan(root)
    assert f"lib64/libcuda.so.{V} (leads to nothing below the driver root)" in str(caught.value)


def test_a_library_folder_that_leads_out_is_none_of_the_drivers(root: Path) -> None:
    (root / "lib64").rename(root.parent / "outside")
    (root / "lib64").symlink_to("../outside")
    with pytest.raises(DriverError, match=f"{re.escape(str(root))}"):
        scan(root)
