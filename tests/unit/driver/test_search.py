"""Where the driver is: which NVML and which libcuda are taken of each layout, and which module decides."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.driver_scan import changed, folder_signatures, scan
from nri_gpu.driver.search import DriverSearch, loader_folders, machine_of
from tests.support.driver_root import Layout, make_driver_root, put_libraries, write_library
from tests.support.elf_file import EM_386, shared_library

V, OLD = "580.95.05", "470.256.02"
MULTIARCH: Final = f"usr/lib/{platform.machine()}-linux-gnu"
DEBIAN: Final = f"{MULTIARCH}/nvidia"
CUDA, NVML = "libcuda", "libnvidia-ml"


def unversioned(root: Path, folder: str) -> Path:
    """As tests' NVML and hosts whose links were followed by a copy have it."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    write_library(root / folder / "libnvidia-ml.so.1", "libnvidia-ml.so.1")
    return root


def alternatives(root: Path, target: str) -> Path:
    """As update-alternatives sets them: absolute, and by way of /etc/alternatives."""
    folder = root / "etc/alternatives"
    folder.mkdir(parents=True, exist_ok=True)
    (root / MULTIARCH).mkdir(parents=True, exist_ok=True)
    for library in (CUDA, NVML):
        name = f"{library}.so.1"
        (folder / f"nvidia--{name}").unlink(missing_ok=True)
        (folder / f"nvidia--{name}").symlink_to(f"/{DEBIAN}/{target}/{name}")
        if not (root / MULTIARCH / name).is_symlink():
            (root / MULTIARCH / name).symlink_to(f"/etc/alternatives/nvidia--{name}")
    return root


def loader(root: Path, *lines: str, file: str = "etc/ld.so.conf") -> Path:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text("".join(f"{line}\n" for line in lines))
    return root


def made(layout: Layout) -> Callable[[Path], object]:
    return lambda root: make_driver_root(root, V, layout)


def side_by_side(root: Path) -> None:
    put_libraries(root, f"{DEBIAN}/current", "550.163.01")
    put_libraries(root, f"{DEBIAN}/tesla-535", "535.274.02")
    alternatives(root, "tesla-535")


def thirty_two_bits_first(root: Path) -> None:
    put_libraries(root, "lib64")
    (root / "usr/lib64").mkdir(parents=True)
    for library in (CUDA, NVML):
        content = shared_library(f"{library}.so.1", bits=32, machine=EM_386)
        (root / f"usr/lib64/{library}.so.{V}").write_bytes(content)
        (root / f"usr/lib64/{library}.so.1").symlink_to(f"{library}.so.{V}")


def leftovers_in_usr_lib64(root: Path) -> Path:
    put_libraries(root, "usr/lib64", OLD)
    return put_libraries(root, MULTIARCH)


def cuda_compat(root: Path) -> None:
    put_libraries(root, "usr/local/cuda-13.0/compat", "590.44.01", (CUDA,))
    put_libraries(root, MULTIARCH)
    loader(root, "include /etc/ld.so.conf.d/*.conf")
    loader(root, "/usr/local/cuda-13.0/compat", file="etc/ld.so.conf.d/000_cuda.conf")
    loader(root, f"/{MULTIARCH}", file="etc/ld.so.conf.d/x86_64-linux-gnu.conf")


def link_to_a_missing_file(root: Path) -> None:
    put_libraries(root, "usr/lib64", linked=False)
    for library in (CUDA, NVML):
        (root / f"usr/lib64/{library}.so.1").symlink_to(f"{library}.so.{OLD}")


class Row(Struct, frozen=True):
    """A layout, and which NVML and which libcuda are taken of it; empty: none, or no driver. module: that is loaded."""

    make: Callable[[Path], object]
    taken: tuple[str, str]
    module: str = ""
    configured: tuple[str, ...] = ()


def both(folder: str, version: str = V) -> tuple[str, str]:
    return f"{folder}/{NVML}.so.{version}", f"{folder}/{CUDA}.so.{version}"


LAYOUTS: dict[str, Row] = {
    "flat, as GKE's /home/kubernetes/bin/nvidia": Row(made("flat"), both("lib64")),
    "the root itself": Row(lambda root: put_libraries(root, "."), both(".")),
    "Ubuntu, Fedora's multiarch kin": Row(made("ubuntu"), both(MULTIARCH)),
    "RHEL, Fedora, openSUSE": Row(made("rhel"), both("usr/lib64")),
    "Arch": Row(lambda root: put_libraries(root, "usr/lib"), both("usr/lib")),
    "Debian": Row(made("debian"), both(f"{DEBIAN}/current")),
    "configured": Row(
        lambda root: [put_libraries(root, "run/driver/lib"), put_libraries(root, "usr/lib64", OLD)],
        both("run/driver/lib"),
        configured=("/run/driver/lib/",),
    ),
    "NVML alone, without a version": Row(lambda root: unversioned(root, "lib64"), ("lib64/libnvidia-ml.so.1", "")),
    "NVML without a version, and the rest": Row(
        lambda root: [unversioned(root, "lib64"), put_libraries(root, "lib64", libraries=(CUDA,))],
        ("lib64/libnvidia-ml.so.1", both("lib64")[1]),
    ),
    "libcuda alone": Row(lambda root: put_libraries(root, "lib64", libraries=(CUDA,)), ("", both("lib64")[1])),
    "NVML alone": Row(lambda root: put_libraries(root, "lib64", libraries=(NVML,)), (both("lib64")[0], "")),
    "each in a folder of its own": Row(
        lambda root: [
            put_libraries(root, "usr/lib64", libraries=(NVML,)),
            put_libraries(root, "lib64", libraries=(CUDA,)),
        ],
        (both("usr/lib64")[0], both("lib64")[1]),
    ),
    "of two versions": Row(
        lambda root: [put_libraries(root, "lib64", "570.10", (NVML,)), put_libraries(root, "lib64", libraries=(CUDA,))],
        ("lib64/libnvidia-ml.so.570.10", ""),
    ),
    "leftovers in the same folder": Row(
        lambda root: [put_libraries(root, "lib64", "550.1", linked=False), put_libraries(root, "lib64")], both("lib64")
    ),
    "two versions in one folder, and no link": Row(
        lambda root: [
            put_libraries(root, "lib64", "550.1", (CUDA,), linked=False),
            put_libraries(root, "lib64", V, (CUDA,), linked=False),
            put_libraries(root, "lib64", V, (NVML,)),
        ],
        (both("lib64")[0], ""),
    ),
    "a 32-bit copy first": Row(thirty_two_bits_first, both("lib64")),
    "no links": Row(lambda root: put_libraries(root, "lib64", linked=False), both("lib64")),
    "Debian's tesla-535": Row(
        lambda root: [put_libraries(root, f"{DEBIAN}/tesla-535", "535.274.02"), alternatives(root, "tesla-535")],
        both(f"{DEBIAN}/tesla-535", "535.274.02"),
    ),
    "two drivers, the alternative on 535": Row(
        side_by_side,
        both(f"{DEBIAN}/tesla-535", "535.274.02"),
        module="535.274.02",
    ),
    "two drivers, 550 loaded, the alternative on 535": Row(
        side_by_side, both(f"{DEBIAN}/current", "550.163.01"), module="550.163.01"
    ),
    "470 left in usr/lib64": Row(leftovers_in_usr_lib64, both(MULTIARCH), module=V),
    "470 left in usr/lib64, no module": Row(leftovers_in_usr_lib64, both("usr/lib64", OLD)),
    "470 left in usr/lib64, and ld.so.conf": Row(
        lambda root: [leftovers_in_usr_lib64(root), loader(root, f"/{MULTIARCH}")],
        both(MULTIARCH),
    ),
    "470 left in usr/lib64, another loaded": Row(leftovers_in_usr_lib64, both("usr/lib64", OLD), module="590.1"),
    "upgraded under a loaded module": Row(made("ubuntu"), both(MULTIARCH), module=OLD),
    "CUDA's compatibility in ld.so.conf.d": Row(cuda_compat, both(MULTIARCH)),
    "a link to an older library's missing file": Row(link_to_a_missing_file, both("usr/lib64")),
    "a folder that only ld.so.conf names": Row(
        lambda root: [put_libraries(root, "opt/driver"), loader(root, "/opt/driver")], both("opt/driver")
    ),
}


@pytest.mark.parametrize("row", LAYOUTS.values(), ids=LAYOUTS)
def test_which_libraries_are_taken(tmp_path: Path, row: Row) -> None:
    row.make(tmp_path)
    search = DriverSearch.below(tmp_path, machine_of(), row.configured)
    nvml = search.nvml(row.module)
    libcuda = ""
    try:
        found = scan(tmp_path, library_dirs=row.configured, module=row.module)
    except DriverError:
        pass
    else:
        libcuda = next((file.source.relative for file in found.libraries if file.name.startswith(CUDA)), "")
    taken = str(nvml.relative_to(tmp_path)) if nvml else "", libcuda
    assert taken == tuple(os.path.normpath(each) if each else "" for each in row.taken)


def test_the_other_drivers_are_named(tmp_path: Path) -> None:
    put_libraries(tmp_path, "usr/lib64", OLD)
    cuda_compat(tmp_path)
    named = [str(each) for each in scan(tmp_path, module=V).others]
    assert named == ["590.44.01 in usr/local/cuda-13.0/compat", f"{OLD} in usr/lib64"]


def test_all_else_is_taken_from_beside_it(tmp_path: Path) -> None:
    """What has no version in its name is of the driver that was chosen, whatever the system's links lead to."""
    side_by_side(tmp_path)
    files = ("nvidia-smi", "nvidia_drv.so")
    for name in ("current", "tesla-535"):
        programs = tmp_path / "usr/lib/nvidia" / name
        programs.mkdir(parents=True)
        for file in files:
            write_library(programs / file, name)
        (tmp_path / DEBIAN / name / "nvoptix.bin").write_text(name)
    for folder, file in (("usr/bin", files[0]), ("usr/lib/xorg/modules/drivers", files[1]), ("usr/share/nvidia", "")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        if file:
            (tmp_path / folder / file).symlink_to(f"/usr/lib/nvidia/tesla-535/{file}")
    (tmp_path / "usr/share/nvidia/nvoptix.bin").symlink_to(f"/{DEBIAN}/tesla-535/nvoptix.bin")
    found = scan(tmp_path, module="550.163.01")
    taken = [file.source.relative for file in (*found.binaries, *found.singles) if "gbm" not in file.name]
    assert taken == [
        "usr/lib/nvidia/current/nvidia-smi",
        f"{DEBIAN}/current/nvoptix.bin",
        "usr/lib/nvidia/current/nvidia_drv.so",
    ]


# -- the loader's configuration


def test_ld_so_conf_is_read_as_inside_a_chroot(tmp_path: Path) -> None:
    """Absolute links and patterns stay below the root, as for ldconfig(8) in it."""
    loader(
        tmp_path,
        "# /commented",
        "",
        "  /first/  # a comment behind",
        "/of/a/type=libc6",
        "hwcap 0 nosegneg",
        "include ld.so.conf.d/*.conf /etc/absent/*.conf",
        "/last",
        "/first",
    )
    loader(tmp_path, "/from/a/link", file="usr/share/links.conf")
    loader(tmp_path, "/of/b", "include /etc/ld.so.conf", file="etc/ld.so.conf.d/b.conf")
    (tmp_path / "etc/ld.so.conf.d/a.conf").symlink_to("/usr/share/links.conf")
    loader(tmp_path, "/not/included", file="etc/ld.so.conf.d/c.txt")
    (tmp_path / "etc/ld.so.conf.d/d.conf").symlink_to("/etc/passwd")
    assert [f"/{each.relative_to(tmp_path)}" for each in loader_folders(tmp_path)] == [
        "/first",
        "/of/a/type",
        "/from/a/link",
        "/of/b",
        "/last",
    ]


# -- what a search depends on


CHANGES: dict[str, Callable[[Path], object]] = {
    "the alternative": lambda root: alternatives(root, "current"),
    "ld.so.conf": lambda root: loader(root, "/elsewhere"),
    "a file more in ld.so.conf.d": lambda root: loader(root, "/elsewhere", file="etc/ld.so.conf.d/new.conf"),
    "a line more in ld.so.conf.d": lambda root: loader(root, "/opt/a", "/opt/b", file="etc/ld.so.conf.d/a.conf"),
    "a folder that ld.so.conf names": lambda root: put_libraries(root, "opt/a"),
    "beside the libraries": lambda root: write_library(root / DEBIAN / "tesla-535/libnvidia-new.so.1", ""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_where_the_driver_is_shows(tmp_path: Path, change: Callable[[Path], object]) -> None:
    side_by_side(tmp_path)
    loader(tmp_path, "include /etc/ld.so.conf.d/*.conf")
    loader(tmp_path, "/opt/a", file="etc/ld.so.conf.d/a.conf")
    before, found = folder_signatures(tmp_path), scan(tmp_path)
    assert not changed(tmp_path, (), before, found)
    change(tmp_path)
    assert changed(tmp_path, (), before, found)


def test_a_folder_that_others_can_write_to_and_that_holds_no_driver_is_no_matter(tmp_path: Path) -> None:
    """Debian's /usr/local/lib is its group's, and the loader's first."""
    put_libraries(tmp_path, MULTIARCH)
    loader(tmp_path, "/usr/local/lib")
    (tmp_path / "usr/local/lib").mkdir(parents=True)
    (tmp_path / "usr/local/lib").chmod(0o2775)
    assert scan(tmp_path).version == V
    put_libraries(tmp_path, "usr/local/lib")
    with pytest.raises(DriverError, match="usr/local/lib is not safe"):
        scan(tmp_path)
